"""A model behind an OpenAI-compatible server, seen from agents as if it ran here.

    llm = RemoteLLM("http://localhost:8000", "Qwen2.5-7B-Instruct", tokenizer, decoding)
    llm.check()
    trajectories = llm.run(memory_agent(llm.session(0, i), sample, config) for i, sample in enumerate(samples))

Agents deal in token ids, servers in text. Ids are those of the tokenizer at hand: a prompt is the user's message alone, decoded
when it is sent, and the server puts its own chat template around it; a response is encoded when it comes. Half a character at the
edge of a chunk travels as U+FFFD. Whether a special token's name inside a document is text is the server's matter.

What is not sent, the server chooses: vLLM, for one, takes top_k and a repetition penalty from the model's generation_config.json
unless it is started with `--generation-config vllm`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from memrl.endpoint.server import EndpointDown, EndpointError, Server
from memrl.llm import BaseSession
from memrl.prompts import PromptTemplate
from memrl.types import Turn
from memrl.utils.seeds import row_seed
from memrl.utils.task_pool import TaskPool

if TYPE_CHECKING:
    from memrl.llm import Decoding
    from memrl.tokenizer import Tokenizer

__all__ = ["EndpointError", "RemoteLLM", "Session"]

T = TypeVar("T")


class RemoteLLM:
    """An OpenAI-compatible server, with the same face as `memrl.llm.LocalLLM`."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Tokenizer,
        decoding: Decoding,
        system: str | None = None,
        concurrency: int = 32,
        *,
        timeout: float = 600.0,
        tries: int = 8,
        first_wait: float = 1.0,
    ):
        """The key is taken from OPENAI_API_KEY; local servers take any.

        Args:
            base_url: what stands before /chat/completions. Without a path it gets /v1; a query (?api-version=...) is sent with
                every request.
            model: its name on the server.
            tokenizer: counts, cuts and joins; the served model's own, or chunks and caps are in another model's tokens.
            system: system message; None sends none.
            concurrency: agents at work at a time, each with one request on its way.
            timeout: seconds for one request, from sending it to the last byte.
            tries: requests that are made for one answer while the server is unreachable, busy or broken.
            first_wait: seconds, about, before the second try; every further wait is twice as long.

        Raises:
            ValueError: what is given cannot be an address, or a number is not positive.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        self.server = Server(base_url, model, decoding, system, timeout=timeout, tries=tries, first_wait=first_wait)
        self.about = [f"{model} at {self.server.url}, {concurrency} requests at a time"]
        self.tokenizer, self.concurrency = tokenizer, concurrency
        # As in `LocalLLM`: the repeats of a sample follow each other.
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)
        self.template = lru_cache(maxsize=None)(lambda text: PromptTemplate(text, _UserMessage(tokenizer)))

    @property
    def usage(self) -> Counter[str]:
        """`prompt_tokens` and `completion_tokens` of all answers so far, as the server counts them."""
        return self.server.usage

    def session(self, *identity: int, on_turn: Callable[[Turn], None] | None = None) -> Session:
        """A handle for one trajectory. The seeds that are sent depend on `identity` alone, as in `LocalLLM`."""
        return Session(self, identity, on_turn)

    def check(self) -> None:
        """Find out whether the server answers, takes the key and has the model: before any work.

        Raises:
            ValueError: one of them fails; says which, with the server's words.
        """
        asyncio.run(self.server.check())

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time (default: the llm's); results in order.

        What an agent raises ends the run, and the others are cancelled.

        Raises:
            EndpointError: nothing answers at the address any more.
        """
        return asyncio.run(self.drive(agents, concurrency or self.concurrency))

    async def drive(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
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


class Session(BaseSession["RemoteLLM"]):
    """One trajectory's conversation partner. Its `render` gives the user's message alone, without a chat template."""

    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids: what may be shown to the model again as data. Never more than the turn's `max_new_tokens`."""
        return list(turn.response_ids)

    async def chat(self, prompt_ids: list[int], *, kind: str, max_new_tokens: int) -> Turn:
        """The server's response to a rendered prompt.

        Returns:
            A turn whose `response_ids` are its text, encoded. The server caps what it generates in its own tokens; where the text
            has more of those at hand, the ids are cut to the cap and the text is not. `response_logprobs` is empty.
        """
        seed = row_seed(*self._identity, self._num_turns)
        self._num_turns += 1
        text, finish_reason = await self._llm.server.complete(self.decode(prompt_ids), max_new_tokens, seed)
        response_ids = self._llm.tokenizer.encode(text)[:max_new_tokens] if text else []
        turn = Turn(kind, prompt_ids, response_ids, [], finish_reason, text)
        if self._on_turn is not None:
            self._on_turn(turn)
        return turn


class _UserMessage:
    """A tokenizer whose chat template shows the user's message and nothing else."""

    def __init__(self, tokenizer: Tokenizer):
        self.encode_template = tokenizer.encode

    def render_chat(self, content: str, system: str | None = None) -> str:
        return content
