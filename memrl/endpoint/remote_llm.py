"""The `LLM` interface on an OpenAI-compatible server.

    llm = RemoteLLM("http://localhost:8000", "Qwen2.5-7B-Instruct", tokenizer, decoding)
    llm.check()
    trajectories = llm.run(memory_agent(llm.session(0, i), sample, config) for i, sample in enumerate(samples))

Agents work with token ids, servers with text. A prompt is the user's message alone, decoded before it is sent, or messages; the
server adds its own chat template. A response is encoded on arrival. Half a character at the edge of a chunk is sent as U+FFFD.
The server decides whether a special token's name inside a document is text, and chooses the parameters that are not sent: vLLM,
for example, reads top_k and a repetition penalty from generation_config.json unless it is started with
`--generation-config vllm`.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, UnprocessableEntityError

from memrl.endpoint.addresses import public_url, read_key, redact, split_url
from memrl.endpoint.failures import (
    CAUGHT,
    LONGEST_WAIT_S,
    EndpointDown,
    EndpointError,
    backoff,
    describe,
    is_temporary,
    is_unreachable,
    retry_after,
)
from memrl.endpoint.native_messages import calls_in_words, contents_ids, native_messages
from memrl.endpoint.replies import Completion, read_bounded, read_completion, read_model_names
from memrl.llm import BaseSession
from memrl.prompts import SLOTS, PromptTemplate
from memrl.prompts.messages import PlainMessage, check_ids, is_messages, with_system
from memrl.types import Turn
from memrl.utils.plain_text import printable
from memrl.utils.seeds import row_seed
from memrl.utils.task_pool import TaskPool

if TYPE_CHECKING:
    from memrl.llm import Decoding, OnMemory, OnTurn
    from memrl.prompts.messages import Prompt
    from memrl.tokenizer import TextTokenizer

T = TypeVar("T")

LIST_S = 10.0  # for the list of models, which needs no computing
CHECK_S = 30.0  # for the small request at the start
QUIET_S = 30.0  # without any answer, after which a line says that requests wait
SAY_EVERY_S = 5.0  # at most one line about retries in this time: many requests fail together
BUDGET_S = 900.0  # after a first attempt; no other one begins later
MOST_LOST = 8  # requests given up one after the other, with no answer to any, after which the run ends
LONGEST_TOKEN = 256  # characters; the longest tokens of published vocabularies are 128 blanks


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
                every request. Messages show neither a query nor a password in it.
            model: its name on the server.
            tokenizer: of the served model; with another one, chunks and caps count that one's tokens.
            system: system message; None sends none.
            concurrency: agents to run at a time, and requests in flight.
            timeout: seconds for one request, from sending it to the last byte of the answer.
            tries: attempts per answer while the server is unreachable, busy or broken; none begins later than 15 minutes after
                the first.
            first_wait: approximate seconds before the second attempt; every further wait is twice as long, up to a minute.
        """
        numbers = {"concurrency": concurrency, "timeout": timeout, "tries": tries, "first_wait": first_wait}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self._base_url, self._query = split_url(base_url)
        self._key = read_key()
        self.redact = partial(redact, url=base_url)
        self.url = public_url(self._base_url)
        self.model, self.decoding, self.system = model, decoding, system
        self.timeout, self.tries, self.first_wait = timeout, tries, first_wait
        self.about = [f"{model} at {self.url}, {concurrency} requests at a time"]
        self.usage: Counter[str] = Counter()
        self.tokenizer, self.concurrency = tokenizer, concurrency
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)  # as in `LocalLLM`
        self.template = lru_cache(maxsize=None)(
            lambda text, slots=SLOTS: PromptTemplate(text, PlainMessage(tokenizer), slots=slots)
        )
        # Parameters that can be omitted without changing the request (1 is the default of temperature and top_p, and max_tokens
        # has another name) or, for the seed, with the loss of reproducibility.
        self._optional = ["seed", "max_tokens", *(name for name in ("temperature", "top_p") if getattr(decoding, name) == 1.0)]
        self._omitted: frozenset[str] = frozenset()
        self._answered = self._lost_in_a_row = 0
        self._said_at = -SAY_EVERY_S

    def session(self, *identity: int, on_turn: OnTurn | None = None, on_memory: OnMemory | None = None) -> RemoteSession:
        """A session for one trajectory. The seeds that are sent depend on `identity` alone, as in `LocalLLM`."""
        return RemoteSession(self, identity, on_turn, on_memory)

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time; an EndpointError if the server cannot be reached any more."""
        return asyncio.run(self._run(agents, concurrency or self.concurrency))

    async def _run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
        tasks = TaskPool(agents, concurrency)
        self._free = asyncio.Semaphore(concurrency)
        async with self._open_client() as self._client:
            try:
                while tasks.start():
                    answered = self._answered
                    finished, _ = await asyncio.wait(tasks.running, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                    if not finished and self._answered == answered:
                        self._say(f"no answer for {QUIET_S:g} s; a request waits up to {self.timeout:g} s")
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
        wait = min(self.timeout, CHECK_S)
        async with self._open_client() as self._client:
            try:
                names = await self._model_names()
                if self.model not in names:  # a server may accept names that it does not list, so try a small request
                    await self._retry(lambda: self._create([{"role": "user", "content": "Hi"}], 16, 0, wait), 0, 1, wait)
            except EndpointError as error:
                if error.status is None:
                    advice = "; start the server, or correct its address"
                elif error.status in (401, 403):
                    advice = "; set the environment variable OPENAI_API_KEY to a key that the server accepts"
                else:
                    known = (
                        f"it serves {printable(self.redact(', '.join(names[:8])), 300)}"
                        if names
                        else "correct the address or the model's name"
                    )
                    advice = f" (model {self.model!r}); {known}"
                raise ValueError(f"{error}{advice}") from None

    async def _model_names(self) -> list[str]:
        """Names of the models that the server lists; empty if it does not list them."""
        send, wait = self._client.models.with_raw_response.list, min(self.timeout, LIST_S)
        try:
            reply = await self._retry(lambda: asyncio.wait_for(send(), wait), 0, 1, wait)
        except EndpointError as error:
            if error.status in (None, 401, 403):
                raise
            return []
        return read_model_names(self._text(reply.content))

    def _open_client(self) -> AsyncOpenAI:
        """A client; its connections belong to the running event loop, so each run has its own."""
        headers = {"accept-encoding": "identity"}  # a few compressed bytes can become gigabytes
        if "/openai/deployments/" in self.url:
            headers["api-key"] = self._key  # Azure's header
        return AsyncOpenAI(
            base_url=self._base_url,
            api_key=self._key,
            timeout=self.timeout,
            max_retries=0,  # the client's own retries wait 8 s at most and ignore a Retry-After above a minute
            default_query=self._query,
            default_headers=headers,
            http_client=DefaultAsyncHttpxClient(follow_redirects=False, event_hooks={"response": [read_bounded]}),
        )

    async def complete(
        self, messages: Sequence[Mapping], max_new_tokens: int, seed: int, tools: Sequence[Mapping] = ()
    ) -> tuple[str, list[dict], str]:
        """The answer to messages in OpenAI's form, its calls, and its finish reason: "stop" or "length"."""
        async with self._free:
            completion = await self._retry(
                lambda: self._create(messages, max_new_tokens, seed, self.timeout, tools), seed, self.tries, self.timeout
            )
        self.usage.update(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
        answer, longest = self.redact(completion.text), LONGEST_TOKEN * max_new_tokens
        calls = completion.tool_calls
        for call in calls:
            call["function"] = {name: self.redact(value) for name, value in call["function"].items()}
        # What cannot have so few tokens: the server ignores the cap, and the rest would take memory in every later step.
        if len(answer) + len(calls_in_words(calls)) > longest:
            return answer[:longest], [], "length"
        return answer, calls, completion.finish_reason

    async def _retry(self, send: Callable[[], Awaitable[T]], seed: int, tries: int, timeout: float) -> T:
        """Call `send` until it succeeds, at most `tries` times, waiting after each temporary failure, and saying so.

        Raises:
            EndpointError: the server refuses the request, or did not answer it in `tries` attempts.
            EndpointDown: no attempt reached the server, and no other request was answered in the meantime; or this is one of
                many requests in a row without an answer.
        """
        attempt, answered, began = 0, self._answered, time.monotonic()
        while True:
            try:
                result = await send()
                self._answered += 1
                self._lost_in_a_row = 0
                return result
            except CAUGHT as error:
                reason = printable(self.redact(describe(error, timeout)), 300)
                asked = retry_after(error)
                wait = max(backoff(attempt, self.first_wait, row_seed(seed, attempt)), asked)
                temporary = is_temporary(error)
                in_time = wait <= LONGEST_WAIT_S and time.monotonic() + wait - began <= BUDGET_S
                if temporary and attempt + 1 < tries and in_time:
                    attempt += 1
                    self._say(f"{reason}; next try in {wait:.0f} s (try {attempt + 1} of {tries})")
                    await asyncio.sleep(wait)
                    continue
                if temporary and asked > LONGEST_WAIT_S:
                    reason += f"; it asks to wait {asked:.0f} s, and {LONGEST_WAIT_S:.0f} are the most"
                message = f"{self.url}: {reason}{f' (try {attempt + 1} of {tries})' if attempt else ''}"
                self._lost_in_a_row += temporary
                if tries > 1 and self._answered == answered and is_unreachable(error):
                    raise EndpointDown(f"{message}; the server is down, so the run ends here") from None
                if tries > 1 and self._lost_in_a_row >= MOST_LOST:
                    lost = f"{self._lost_in_a_row} requests in a row were given up"
                    raise EndpointDown(f"{message}; {lost}, so the run ends here") from None
                raise EndpointError(message, getattr(error, "status_code", None)) from None

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said_at >= SAY_EVERY_S:
            self._said_at = time.monotonic()
            print(f"{self.url}: {text}", file=sys.stderr, flush=True)

    def _text(self, body: bytes) -> str:
        return self.redact(body.decode("utf-8-sig", "replace"))

    @property
    def chat_template(self) -> str:
        return ""

    async def _create(
        self, messages: Sequence[Mapping], max_new_tokens: int, seed: int, timeout: float, tools: Sequence[Mapping] = ()
    ) -> Completion:
        """One request, repeated without an optional parameter that the server refuses."""
        omitted = self._omitted
        while True:
            body = self._body(messages, max_new_tokens, seed, omitted, tools)
            request = self._client.chat.completions.with_raw_response.create(**body)
            try:
                # The client's own limit applies to each pause; a server that sends byte by byte never reaches it.
                reply = await asyncio.wait_for(request, timeout)
            except (BadRequestError, UnprocessableEntityError) as error:
                named = [error.param, *re.findall(r"[A-Za-z_]+", str(error)[:2000])]
                refused = [name for name in self._optional if name in named and name not in omitted]
                if not refused:
                    raise
                omitted |= {refused[0]}
                continue
            completion = read_completion(self._text(reply.content))
            if "seed" in omitted - self._omitted:
                print(f"{self.url} accepts no seed, so results are not reproducible", file=sys.stderr)
            self._omitted |= omitted  # only after a success: an error may name a parameter by chance
            return completion

    def _body(
        self, messages: Sequence[Mapping], max_new_tokens: int, seed: int, omitted: frozenset[str], tools: Sequence[Mapping]
    ) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": with_system(messages, self.system),
            "temperature": self.decoding.temperature,
            "top_p": self.decoding.top_p,
            "max_completion_tokens" if "max_tokens" in omitted else "max_tokens": max_new_tokens,
            "seed": seed & 0x7FFFFFFF,  # some servers store it in 32 bits
            "extra_body": {name: value for name in ("top_k", "min_p") if (value := getattr(self.decoding, name))},
        }
        body |= {"tools": [*tools]} if tools else {}
        return {name: value for name, value in body.items() if name not in omitted}


class RemoteSession(BaseSession[RemoteLLM]):
    """One trajectory's connection to a `RemoteLLM`. Its `render` gives the user's message alone, without a chat template."""

    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids, which may be inserted into a later prompt as data; never more than the turn's `max_new_tokens`."""
        return list(turn.response_ids)

    async def chat(self, prompt: Prompt, *, kind: str, max_new_tokens: int, tools: Sequence[Mapping] = ()) -> Turn:
        """The server's response to a rendered prompt, or to messages; `response_logprobs` is empty.

        `response_ids` are its text, encoded, and its calls as text. The server counts the cap in its own tokens; if these have
        more local ones, the ids are cut to the cap, not the text. `prompt_ids` are the contents without the server's template.
        """
        encode = self._llm.tokenizer.encode
        if is_messages(prompt):
            prompt_ids, messages = contents_ids(prompt, encode), native_messages(prompt, self.decode)
        else:
            prompt_ids = check_ids(prompt, tools)
            messages = [{"role": "user", "content": self.decode(prompt_ids)}]
        text, calls, finish_reason = await self._llm.complete(messages, max_new_tokens, self._next_seed(), tools)
        whole = text + calls_in_words(calls)
        response_ids = encode(whole)[:max_new_tokens] if whole else []
        return self._report(Turn(kind, prompt_ids, response_ids, [], finish_reason, text, max_new_tokens, tool_calls=calls))
