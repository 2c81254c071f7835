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
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from memrl.endpoint.server import EndpointDown, EndpointError, Server
from memrl.llm import Session
from memrl.prompts import PromptTemplate
from memrl.types import Turn
from memrl.utils.task_pool import TaskPool

if TYPE_CHECKING:
    from memrl.llm import Decoding
    from memrl.tokenizer import TextTokenizer

__all__ = ["EndpointError", "RemoteLLM"]

T = TypeVar("T")


class RemoteLLM:
    """The `LLM` interface on a server.

    Attributes:
        usage: `prompt_tokens` and `completion_tokens` of all answers so far, as the server counts them.
    """

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
        """The key is read from OPENAI_API_KEY; local servers accept any.

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

        Raises:
            ValueError: the address is not a web address, or a number is not positive.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        self.server = Server(base_url, model, decoding, system, timeout=timeout, tries=tries, first_wait=first_wait)
        self.usage = self.server.usage
        self.about = [f"{model} at {self.server.url}, {concurrency} requests at a time"]
        self.tokenizer, self.concurrency = tokenizer, concurrency
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)  # as in `LocalLLM`
        self.template = lru_cache(maxsize=None)(lambda text: PromptTemplate(text, _UserMessage(tokenizer)))

    def session(self, *identity: int, on_turn: Callable[[Turn], None] | None = None) -> RemoteSession:
        """A session for one trajectory. The seeds that are sent depend on `identity` alone, as in `LocalLLM`."""
        return RemoteSession(self, identity, on_turn)

    def check(self) -> None:
        """Before any work, raise a ValueError with the reason unless the server answers, accepts the key and has the model."""
        asyncio.run(self.server.check())

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time (default: the llm's); results in order.

        An error raised by an agent ends the run and cancels the others.

        Raises:
            EndpointError: the server cannot be reached any more.
        """
        return asyncio.run(self._run(agents, concurrency or self.concurrency))

    async def _run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
        tasks = TaskPool(agents, concurrency)
        async with self.server.connected():
            try:
                while tasks.start():
                    await asyncio.wait(tasks.running, return_when=asyncio.FIRST_COMPLETED)
                    tasks.collect()
                return tasks.results()
            except EndpointDown as down:
                raise EndpointError(str(down)) from None
            finally:
                await tasks.cancel()


class RemoteSession(Session[RemoteLLM]):
    """One trajectory's connection to a `RemoteLLM`. Its `render` gives the user's message alone, without a chat template."""

    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids, which may be inserted into a later prompt as data; never more than the turn's `max_new_tokens`."""
        return list(turn.response_ids)

    async def chat(self, prompt_ids: list[int], *, kind: str, max_new_tokens: int) -> Turn:
        """The server's response to a rendered prompt.

        Returns:
            A turn whose `response_ids` are its text, encoded. The server counts the cap in its own tokens; if the text has more
            local tokens, the ids are cut to the cap and the text is not. `response_logprobs` is empty.
        """
        text, finish_reason = await self._llm.server.complete(self.decode(prompt_ids), max_new_tokens, self._next_seed())
        response_ids = self._llm.tokenizer.encode(text)[:max_new_tokens] if text else []
        return self._report(Turn(kind, prompt_ids, response_ids, [], finish_reason, text))


class _UserMessage:
    """A tokenizer for `PromptTemplate` whose chat template is the user's message alone."""

    def __init__(self, tokenizer: TextTokenizer):
        self.encode_template = tokenizer.encode

    def render_chat(self, content: str, system: str | None = None) -> str:
        return content
