"""Text to an OpenAI-compatible server and back: one message, one answer, tried again while the failure may pass."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from memrl.endpoint.failures import NoAnswer, asked_wait, backoff, is_passing, is_unreachable, names_parameter, reason
from memrl.utils.seeds import row_seed

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from memrl.llm import Decoding

T = TypeVar("T")

MOST_PATIENCE = 300.0  # seconds; who asks to come back later than that is not waited for


class EndpointError(ConnectionError):
    """A request that came to nothing, in one line.

    Attributes:
        status: of the HTTP answer; None where there was none, or none that could be read.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EndpointDown(BaseException):
    """Nothing answers at the address any more.

    Not an Exception, so that it passes by whoever takes a document's errors for its result: it is the end of the run.
    """


class Server:
    """One model of an OpenAI-compatible server.

    Attributes:
        usage: tokens of all answers so far, as the server counts them.
    """

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
        self._client: AsyncOpenAI | None = None  # while a run is on: connections belong to its event loop
        self._left_out: frozenset[str] = frozenset()
        self._answered = 0

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Requests can be made inside."""
        from openai import AsyncOpenAI

        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = AsyncOpenAI(
            base_url=self.url,
            api_key=key,
            timeout=self.timeout,
            max_retries=0,  # `_persist` waits longer, and as long as the server asks for
            default_query=self._query,
            default_headers={"api-key": key} if "/openai/deployments/" in self.url else None,  # Azure's own way
        )
        try:
            yield
        finally:
            await self._client.close()
            self._client = None

    async def complete(self, text: str, max_new_tokens: int, seed: int) -> tuple[str, str]:
        """The answer to one user message, and why it ended: "stop" or "length".

        Raises:
            EndpointError: the server refuses the request, or did not answer it in `tries` tries.
            EndpointDown: it could not be reached in all those tries, and nobody else's request was answered meanwhile.
        """
        completion = await self._persist(lambda: self._create(text, max_new_tokens, seed), seed, self.tries)
        choice = completion.choices[0]
        content = getattr(choice.message, "content", None)
        answer = content if isinstance(content, str) else ""  # nothing, or only reasoning, which is not the answer
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[name] += getattr(completion.usage, name, None) or 0
        # JSON can hold half a surrogate pair, which no tokenizer takes.
        return answer.encode("utf-8", "replace").decode(), "length" if choice.finish_reason == "length" else "stop"

    async def check(self) -> None:
        """Raise a ValueError unless the server answers, takes the key and has the model; says which fails."""
        names: list[str] = []
        async with self.connected():
            try:
                names = await self._served()
                if self.model not in names:
                    # A server may take names that it does not list, or list none: a small request tells.
                    await self._persist(lambda: self._create("Hi", 16, 0), 0, 1)
            except EndpointError as error:
                raise ValueError(f"{error}{self._advice(error, names)}") from error

    async def _served(self) -> list[str]:
        """Names of the models that the server lists; none where it does not tell."""
        try:
            page = await self._persist(self._client.models.list, 0, 1)
        except EndpointError as error:
            if error.status in (None, 401, 403):
                raise
            return []
        listed = getattr(page, "data", None)
        return [model.id for model in listed] if isinstance(listed, list) else []

    def _advice(self, error: EndpointError, names: list[str]) -> str:
        if error.status is None:
            return "; start the server, or correct its address"
        if error.status in (401, 403):
            return "; set the environment variable OPENAI_API_KEY to a key that the server takes"
        known = f"it serves {', '.join(names[:8])}" if names else "correct the address or the model's name"
        return f" (asked for the model {self.model!r}); {known}"

    async def _persist(self, send: Callable[[], Awaitable[T]], seed: int, tries: int) -> T:
        """The result of `send`, which is called again after failures that may pass."""
        from openai import APIError

        answered = self._answered
        for attempt in range(tries):
            try:
                result = await send()
            # asyncio's own name, because Python 3.10 does not call it TimeoutError; ValueError is a body that is no JSON.
            except (APIError, asyncio.TimeoutError, ValueError) as error:
                wait = max(backoff(attempt, self.first_wait, row_seed(seed, attempt)), asked_wait(error))
                if is_passing(error) and attempt + 1 < tries and wait <= MOST_PATIENCE:
                    await asyncio.sleep(wait)
                    continue
                message = f"{self.url}: {reason(error, self.timeout)}" + (f" (try {attempt + 1} of {tries})" if attempt else "")
                if is_unreachable(error) and tries > 1 and self._answered == answered:
                    raise EndpointDown(f"{message}; nothing answers there any more, so the run ends here") from None
                raise EndpointError(message, getattr(error, "status_code", None)) from error
            self._answered += 1
            return result
        raise AssertionError("tries is positive")

    async def _create(self, text: str, max_new_tokens: int, seed: int):
        """One request, made again without a parameter that the server refuses and that can be spared."""
        from openai import BadRequestError, UnprocessableEntityError

        left_out = self._left_out
        while True:
            request = self._client.chat.completions.create(**self._body(text, max_new_tokens, seed, left_out))
            try:
                # The client's own limit is one for each silence, and a server that trickles has none.
                completion = await asyncio.wait_for(request, self.timeout)
            except (BadRequestError, UnprocessableEntityError) as error:
                refused = next((name for name in self._sparable() if name not in left_out and names_parameter(error, name)), None)
                if refused is None:
                    raise
                left_out |= {refused}
                continue
            if not getattr(completion, "choices", None):  # a gateway's page, or its error sent as a success
                raise NoAnswer(f"what it sends is no completion: {' '.join(str(completion).split())[:120]!r}")
            if "seed" in left_out - self._left_out:
                print(f"{self.url} takes no seed, so its answers cannot be had again", file=sys.stderr)
            self._left_out |= left_out  # only what helped: an error may name a parameter by chance
            return completion

    def _sparable(self) -> list[str]:
        """What can be left out: the request means the same, or for the seed is only not to be had again.

        `max_tokens` has another name then, and temperature and top_p of 1 are the protocol's own defaults.
        """
        return ["seed", "max_tokens", *(name for name in ("temperature", "top_p") if getattr(self.decoding, name) == 1.0)]

    def _body(self, text: str, max_new_tokens: int, seed: int, left_out: frozenset[str]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self.decoding.temperature,
            "top_p": self.decoding.top_p,
            "max_tokens": max_new_tokens,
            "seed": seed & 0x7FFFFFFF,  # some servers keep it in 32 bits
        }
        if "max_tokens" in left_out:
            body["max_completion_tokens"] = max_new_tokens
        more = {name: value for name in ("top_k", "min_p") if (value := getattr(self.decoding, name))}
        return {name: value for name, value in body.items() if name not in left_out} | ({"extra_body": more} if more else {})


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """What stands before /chat/completions, and the query.

    >>> split_url("http://host:8000")
    ('http://host:8000/v1', {})
    >>> split_url("https://host/openai/deployments/gpt/chat/completions?api-version=1")
    ('https://host/openai/deployments/gpt', {'api-version': '1'})

    Raises:
        ValueError: it is no address of a web server.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"endpoint {url!r} is not an address; give one like http://localhost:8000/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", "")), dict(parse_qsl(parts.query))
