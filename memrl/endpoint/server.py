"""Send one user message to an OpenAI-compatible server and return the answer, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from openai import AsyncOpenAI, BadRequestError, UnprocessableEntityError

from memrl.endpoint import failures
from memrl.utils.seeds import row_seed

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from memrl.llm import Decoding

T = TypeVar("T")

LONGEST_WAIT_S = 300.0  # a request with a longer Retry-After fails at once


class EndpointError(ConnectionError):
    """A failed request, described in one line.

    Attributes:
        status: of the HTTP answer; None without a readable one.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EndpointDown(BaseException):
    """The server cannot be reached any more, so the run ends.

    Not an Exception, so that code that records a document's errors does not catch it.
    """


class Server:
    """One model of an OpenAI-compatible server."""

    def __init__(
        self, url: str, model: str, decoding: Decoding, system: str | None, *, timeout: float, tries: int, first_wait: float
    ):
        """Arguments as in `memrl.endpoint.RemoteLLM`."""
        for name, value in (("timeout", timeout), ("tries", tries), ("first_wait", first_wait)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self.url, self._query = split_url(url)
        self.model, self.decoding, self.system = model, decoding, system
        self.timeout, self.tries, self.first_wait = timeout, tries, first_wait
        self.usage: Counter[str] = Counter()
        # Parameters that can be omitted without changing the request (1 is the default of temperature and top_p, and max_tokens
        # has another name) or, for the seed, with the loss of reproducibility.
        self._optional = ["seed", "max_tokens", *(name for name in ("temperature", "top_p") if getattr(decoding, name) == 1.0)]
        self._omitted: frozenset[str] = frozenset()
        self._answered = 0

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open a client; its connections belong to the running event loop, so each run has its own."""
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = AsyncOpenAI(
            base_url=self.url,
            api_key=key,
            timeout=self.timeout,
            max_retries=0,  # the client's own retries wait 8 s at most and ignore a Retry-After above a minute
            default_query=self._query,
            default_headers={"api-key": key} if "/openai/deployments/" in self.url else None,  # Azure's header
        )
        async with self._client:
            yield

    async def complete(self, text: str, max_new_tokens: int, seed: int) -> tuple[str, str]:
        """The answer to one user message, and its finish reason: "stop" or "length".

        Raises:
            EndpointError: the server refuses the request, or did not answer it in `tries` attempts.
            EndpointDown: no attempt reached the server, and no other request was answered in the meantime.
        """
        completion = await self._retry(lambda: self._create(text, max_new_tokens, seed), seed, self.tries)
        choice = completion.choices[0]
        content = getattr(choice.message, "content", None)
        answer = content if isinstance(content, str) else ""  # no content, or only reasoning, which is not the answer
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[name] += getattr(completion.usage, name, None) or 0
        # JSON can hold half a surrogate pair, which no tokenizer accepts.
        return answer.encode("utf-8", "replace").decode(), "length" if choice.finish_reason == "length" else "stop"

    async def check(self) -> None:
        """Raise a ValueError with the reason unless the server answers, accepts the key and has the model."""
        names: list[str] = []
        async with self.connected():
            try:
                names = await self._model_names()
                if self.model not in names:  # a server may accept names that it does not list, so try a small request
                    await self._retry(lambda: self._create("Hi", 16, 0), 0, 1)
            except EndpointError as error:
                known = f"it serves {', '.join(names[:8])}" if names else "correct the address or the model's name"
                advice = f" (model {self.model!r}); {known}"
                if error.status is None:
                    advice = "; start the server, or correct its address"
                elif error.status in (401, 403):
                    advice = "; set the environment variable OPENAI_API_KEY to a key that the server accepts"
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

    async def _retry(self, send: Callable[[], Awaitable[T]], seed: int, tries: int) -> T:
        """Call `send` until it succeeds, at most `tries` times, waiting after each temporary failure."""
        answered = self._answered
        for attempt in range(tries):
            try:
                result = await send()
            except failures.CAUGHT as error:
                wait = max(failures.backoff(attempt, self.first_wait, row_seed(seed, attempt)), failures.retry_after(error))
                if failures.is_temporary(error) and attempt + 1 < tries and wait <= LONGEST_WAIT_S:
                    await asyncio.sleep(wait)
                    continue
                attempts = f" (try {attempt + 1} of {tries})" if attempt else ""
                message = f"{self.url}: {failures.describe(error, self.timeout)}{attempts}"
                if failures.is_unreachable(error) and tries > 1 and self._answered == answered:
                    raise EndpointDown(f"{message}; the server is down, so the run ends here") from None
                raise EndpointError(message, getattr(error, "status_code", None)) from error
            self._answered += 1
            return result
        raise AssertionError("tries is positive")

    async def _create(self, text: str, max_new_tokens: int, seed: int) -> ChatCompletion:
        """One request, repeated without an optional parameter that the server refuses."""
        omitted = self._omitted
        while True:
            request = self._client.chat.completions.create(**self._body(text, max_new_tokens, seed, omitted))
            try:
                # The client's own limit applies to each pause; a server that sends byte by byte never reaches it.
                completion = await asyncio.wait_for(request, self.timeout)
            except (BadRequestError, UnprocessableEntityError) as error:
                refused = [name for name in self._optional if name not in omitted and failures.names_parameter(error, name)]
                if not refused:
                    raise
                omitted |= {refused[0]}
                continue
            if not getattr(completion, "choices", None):  # a gateway's page, or an error with a success status
                raise failures.NoCompletionError(f"the answer is not a completion: {' '.join(str(completion).split())[:120]!r}")
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
        }
        extra = {name: value for name in ("top_k", "min_p") if (value := getattr(self.decoding, name))}
        return {name: value for name, value in body.items() if name not in omitted} | ({"extra_body": extra} if extra else {})


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """The part of an address before /chat/completions, and its query; a ValueError if it is not a web address.

    >>> split_url("http://host:8000")
    ('http://host:8000/v1', {})
    >>> split_url("https://host/openai/deployments/gpt/chat/completions?api-version=1")
    ('https://host/openai/deployments/gpt', {'api-version': '1'})
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"endpoint {url!r} is not an address; give one like http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", "")), dict(parse_qsl(parts.query))
