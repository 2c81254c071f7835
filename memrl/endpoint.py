"""The `LLM` interface on an OpenAI-compatible server.

    llm = RemoteLLM("http://localhost:8000", "Qwen2.5-7B-Instruct", tokenizer, decoding)
    llm.check()
    trajectories = llm.run(memory_agent(llm.session(0, i), sample, config) for i, sample in enumerate(samples))

Agents work with token ids, servers with text. A prompt is the user's message alone, decoded before it is sent; the server adds
its own chat template. A response is encoded on arrival. Half a character at the edge of a chunk is sent as U+FFFD. The server
decides whether a special token's name inside a document is text, and chooses the parameters that are not sent: vLLM, for example,
reads top_k and a repetition penalty from generation_config.json unless it is started with `--generation-config vllm`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from openai import APIError, APIStatusError, APITimeoutError, AsyncOpenAI, BadRequestError, UnprocessableEntityError

from memrl.llm import BaseSession
from memrl.prompts import PromptTemplate
from memrl.types import Turn
from memrl.utils.seeds import row_seed
from memrl.utils.task_pool import TaskPool

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from memrl.llm import Decoding
    from memrl.tokenizer import TextTokenizer

__all__ = ["EndpointError", "RemoteLLM"]

T = TypeVar("T")

LONGEST_WAIT_S = 300.0  # a request with a longer Retry-After fails at once
LONGEST_BACKOFF_S = 60.0
# asyncio's TimeoutError is not the built-in one in Python 3.10; a body that is not JSON raises a ValueError.
CAUGHT = (APIError, asyncio.TimeoutError, ValueError)


class EndpointError(ConnectionError):
    """A failed request, described in one line; `status` is that of the HTTP answer, None without a readable one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EndpointDown(BaseException):
    """The server cannot be reached any more, so the run ends: not an Exception, so that no document records it as its error."""


class RemoteLLM:
    """The `LLM` interface on a server; `usage` sums the prompt_tokens and completion_tokens that the server counts."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: TextTokenizer,
        decoding: Decoding,
        system: str | None = None,
        concurrency: int = 32,
        *,
        timeout: float = 600.0,
        tries: int = 8,
        first_wait: float = 1.0,
    ):
        """The key is read from OPENAI_API_KEY; local servers accept any. A ValueError names an argument that cannot be used.

        Args:
            base_url: the part before /chat/completions. Without a path, /v1 is added; a query (?api-version=...) is sent with
                every request.
            model: its name on the server.
            tokenizer: of the served model; with another one, chunks and caps count that one's tokens.
            system: system message; None sends none.
            concurrency: agents to run at a time, each with one request in flight.
            timeout: seconds for one request, from sending it to the last byte of the answer.
            tries: attempts per answer while the server is unreachable, busy or broken.
            first_wait: approximate seconds before the second attempt; every further wait is twice as long, up to a minute.
        """
        numbers = {"concurrency": concurrency, "timeout": timeout, "tries": tries, "first_wait": first_wait}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self.url, self._query = split_url(base_url)
        self.model, self.decoding, self.system = model, decoding, system
        self.timeout, self.tries, self.first_wait = timeout, tries, first_wait
        self.about = [f"{model} at {self.url}, {concurrency} requests at a time"]
        self.usage: Counter[str] = Counter()
        self.tokenizer, self.concurrency = tokenizer, concurrency
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)  # as in `LocalLLM`
        self.template = lru_cache(maxsize=None)(lambda text: PromptTemplate(text, _UserMessage(tokenizer)))
        # Parameters that can be omitted without changing the request (1 is the default of temperature and top_p, and max_tokens
        # has another name) or, for the seed, with the loss of reproducibility.
        self._optional = ["seed", "max_tokens", *(name for name in ("temperature", "top_p") if getattr(decoding, name) == 1.0)]
        self._omitted: frozenset[str] = frozenset()
        self._answered = 0

    def session(self, *identity: int, on_turn: Callable[[Turn], None] | None = None) -> RemoteSession:
        """A session for one trajectory. The seeds that are sent depend on `identity` alone, as in `LocalLLM`."""
        return RemoteSession(self, identity, on_turn)

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time; an EndpointError if the server cannot be reached any more."""
        return asyncio.run(self._run(agents, concurrency or self.concurrency))

    async def _run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
        tasks = TaskPool(agents, concurrency)
        async with self._open_client() as self._client:
            try:
                while tasks.start():
                    await asyncio.wait(tasks.running, return_when=asyncio.FIRST_COMPLETED)
                    tasks.collect()
                return tasks.results()
            except EndpointDown as down:
                raise EndpointError(str(down)) from None
            finally:
                await tasks.cancel()

    def check(self) -> None:
        """Raise a ValueError with the reason unless the server answers, accepts the key and has the model."""
        asyncio.run(self._check())

    async def _check(self) -> None:
        names: list[str] = []
        async with self._open_client() as self._client:
            try:
                names = await self._model_names()
                if self.model not in names:  # a server may accept names that it does not list, so try a small request
                    await self._retry(lambda: self._create("Hi", 16, 0), 0, 1)
            except EndpointError as error:
                if error.status is None:
                    advice = "; start the server, or correct its address"
                elif error.status in (401, 403):
                    advice = "; set the environment variable OPENAI_API_KEY to a key that the server accepts"
                else:
                    known = f"it serves {', '.join(names[:8])}" if names else "correct the address or the model's name"
                    advice = f" (model {self.model!r}); {known}"
                raise ValueError(f"{error}{advice}") from error

    async def _model_names(self) -> list[str]:
        """Names of the models that the server lists; empty if it does not list them."""
        try:
            page = await self._retry(self._client.models.list, 0, 1)
        except EndpointError as error:
            if error.status in (None, 401, 403):
                raise
            return []
        listed = getattr(page, "data", None)
        return [model.id for model in listed] if isinstance(listed, list) else []

    def _open_client(self) -> AsyncOpenAI:
        """A client; its connections belong to the running event loop, so each run has its own."""
        key = os.environ.get("OPENAI_API_KEY") or "none"
        return AsyncOpenAI(
            base_url=self.url,
            api_key=key,
            timeout=self.timeout,
            max_retries=0,  # the client's own retries wait 8 s at most and ignore a Retry-After above a minute
            default_query=self._query,
            default_headers={"api-key": key} if "/openai/deployments/" in self.url else None,  # Azure's header
        )

    async def complete(self, text: str, max_new_tokens: int, seed: int) -> tuple[str, str]:
        """The answer to one user message, and its finish reason: "stop" or "length"."""
        completion = await self._retry(lambda: self._create(text, max_new_tokens, seed), seed, self.tries)
        choice = completion.choices[0]
        content = getattr(choice.message, "content", None)
        answer = content if isinstance(content, str) else ""  # no content, or only reasoning, which is not the answer
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[name] += getattr(completion.usage, name, None) or 0
        # JSON can hold half a surrogate pair, which no tokenizer accepts.
        return answer.encode("utf-8", "replace").decode(), "length" if choice.finish_reason == "length" else "stop"

    async def _retry(self, send: Callable[[], Awaitable[T]], seed: int, tries: int) -> T:
        """Call `send` until it succeeds, at most `tries` times, waiting after each temporary failure.

        Raises:
            EndpointError: the server refuses the request, or did not answer it in `tries` attempts.
            EndpointDown: no attempt reached the server, and no other request was answered in the meantime.
        """
        attempt, answered = 0, self._answered
        while True:
            try:
                result = await send()
                self._answered += 1
                return result
            except CAUGHT as error:
                status = getattr(error, "status_code", None)
                is_temporary = status is None or status in (408, 409, 429) or status >= 500
                wait = max(backoff(attempt, self.first_wait, row_seed(seed, attempt)), retry_after(error))
                if is_temporary and attempt + 1 < tries and wait <= LONGEST_WAIT_S:
                    await asyncio.sleep(wait)
                    attempt += 1
                    continue
                attempts = f" (try {attempt + 1} of {tries})" if attempt else ""
                message = f"{self.url}: {_describe(error, self.timeout)}{attempts}"
                # By name: which HTTP library these classes belong to depends on the release of openai.
                is_unreachable = type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")
                if is_unreachable and tries > 1 and self._answered == answered:
                    raise EndpointDown(f"{message}; the server is down, so the run ends here") from None
                raise EndpointError(message, status) from error

    async def _create(self, text: str, max_new_tokens: int, seed: int) -> ChatCompletion:
        """One request, repeated without an optional parameter that the server refuses."""
        omitted = self._omitted
        while True:
            request = self._client.chat.completions.create(**self._body(text, max_new_tokens, seed, omitted))
            try:
                # The client's own limit applies to each pause; a server that sends byte by byte never reaches it.
                completion = await asyncio.wait_for(request, self.timeout)
            except (BadRequestError, UnprocessableEntityError) as error:
                named = [error.param, *re.findall(r"[A-Za-z_]+", str(error))]
                refused = [name for name in self._optional if name in named and name not in omitted]
                if not refused:
                    raise
                omitted |= {refused[0]}
                continue
            if not getattr(completion, "choices", None):  # a gateway's page, or an error with a success status
                raise ValueError(f"the answer is not a completion: {' '.join(str(completion).split())[:120]!r}")
            if "seed" in omitted - self._omitted:
                print(f"{self.url} accepts no seed, so results are not reproducible", file=sys.stderr)
            self._omitted |= omitted  # only after a success: an error may name a parameter by chance
            return completion

    def _body(self, text: str, max_new_tokens: int, seed: int, omitted: frozenset[str]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self.decoding.temperature,
            "top_p": self.decoding.top_p,
            "max_completion_tokens" if "max_tokens" in omitted else "max_tokens": max_new_tokens,
            "seed": seed & 0x7FFFFFFF,  # some servers store it in 32 bits
            "extra_body": {name: value for name in ("top_k", "min_p") if (value := getattr(self.decoding, name))},
        }
        return {name: value for name, value in body.items() if name not in omitted}


class RemoteSession(BaseSession[RemoteLLM]):
    """One trajectory's connection to a `RemoteLLM`. Its `render` gives the user's message alone, without a chat template."""

    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids, which may be inserted into a later prompt as data; never more than the turn's `max_new_tokens`."""
        return list(turn.response_ids)

    async def chat(self, prompt_ids: list[int], *, kind: str, max_new_tokens: int) -> Turn:
        """The server's response to a rendered prompt; `response_ids` are its text, encoded, and `response_logprobs` is empty.

        The server counts the cap in its own tokens; if the text has more local ones, the ids are cut to the cap, not the text.
        """
        text, finish_reason = await self._llm.complete(self.decode(prompt_ids), max_new_tokens, self._next_seed())
        response_ids = self._llm.tokenizer.encode(text)[:max_new_tokens] if text else []
        return self._report(Turn(kind, prompt_ids, response_ids, [], finish_reason, text))


class _UserMessage:
    """A tokenizer for `PromptTemplate` whose chat template is the user's message alone."""

    def __init__(self, tokenizer: TextTokenizer):
        self.encode_template = tokenizer.encode

    def render_chat(self, content: str, system: str | None = None) -> str:
        return content


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """The part of an address before /chat/completions (/v1 if it has no path), and its query; ValueError if it is no address."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"endpoint {url!r} is not an address; give one like http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", "")), dict(parse_qsl(parts.query))


def backoff(attempt: int, first_wait: float, seed: int) -> float:
    """Seconds to wait after attempt number `attempt` (from 0): w (1 + u) / 2, w = min(first_wait 2^attempt, 60), u in [0, 1).

    u comes from the 63-bit `seed`, so that requests that failed together are not repeated together.
    """
    return min(first_wait * 2 ** min(attempt, 64), LONGEST_BACKOFF_S) * (1 + seed / 2**63) / 2


def retry_after(error: Exception) -> float:
    """Seconds in the Retry-After header, given as a number or a date (RFC 9110, 10.2.3); 0 without one."""
    value = error.response.headers.get("retry-after", "") if isinstance(error, APIStatusError) else ""
    if re.fullmatch(r"\s*\d{1,9}(\.\d+)?\s*", value, re.ASCII):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds())


def _describe(error: Exception, timeout: float) -> str:
    """The reason of a failure in one line: the server's own message if there is one."""
    if isinstance(error, APIStatusError):
        message = error.body.get("message") if isinstance(error.body, dict) else error.body
        if not isinstance(message, str) or not message.strip():
            message = error.response.text or str(error)
        return f"HTTP {error.status_code}: {_one_line(message)}"
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        return "the answer is not JSON"
    if isinstance(error, (asyncio.TimeoutError, APITimeoutError)):
        return f"no answer within {timeout:g} s"
    return _one_line(_root_message(error)) or type(error).__name__


def _root_message(error: BaseException) -> str:
    """The operating system's message (connection refused, name not known) from a chain of errors; else the first cause's."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:  # asyncio replaces the message; an unknown name has a negative number
            return os.strerror(link.errno) if link.errno and link.errno > 0 else link.strerror
    return str(chain[min(1, len(chain) - 1)])


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
