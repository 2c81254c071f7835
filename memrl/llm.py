"""What an agent talks to.

A `LocalLLM` drives the sampler for any number of agents at once. Each agent is a coroutine with a `Session` of its own; whenever
all of them wait, the sampler takes one step, and whoever got an answer goes on. No agent waits for another one's turn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from memrl.prompts import PromptTemplate
from memrl.sampler import Request, Sampler, SamplingParams
from memrl.tokenizer import Tokenizer
from memrl.types import Turn
from memrl.utils.crew import Crew
from memrl.utils.seeds import row_seed

T = TypeVar("T")


@dataclass(frozen=True)
class Decoding:
    """How all turns of a run are sampled; `temperature` 0 is greedy. Fields as in `SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class LocalLLM:
    """The sampler, seen from agents."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        decoding: Decoding,
        system: str | None = None,
        about: Sequence[str] = (),
    ):
        """
        Args:
            system: system message of every prompt; None leaves it to the chat template.
            about: lines for people that say what runs here.
        """
        self.about = list(about)
        self.sampler, self.tokenizer = sampler, tokenizer
        stop_ids = frozenset(tokenizer.stop_ids)
        self.params = SamplingParams(1, decoding.temperature, decoding.top_p, decoding.top_k, stop_ids, min_p=decoding.min_p)
        # The G rollouts of a sample follow each other, so a few entries spare all but the first tokenisation.
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)
        self.template = lru_cache(maxsize=None)(lambda text: PromptTemplate(text, tokenizer, system))

    @property
    def concurrency(self) -> int:
        """Agents at work at a time: more would only wait."""
        return self.sampler.max_rows

    def session(self, *identity: int, on_turn: Callable[[Turn], None] | None = None) -> "Session":
        """A handle for one trajectory. Its randomness depends on `identity` alone, e.g. (seed, step, group, rollout)."""
        return Session(self, identity, on_turn)

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time (default: twice the sampler's rows); results in order."""
        return asyncio.run(self.drive(agents, concurrency or 2 * self.sampler.max_rows))

    async def drive(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
        crew = Crew(agents, concurrency)
        try:
            while crew.fill():
                await asyncio.sleep(0)  # every agent that can go on does, up to its next chat
                crew.settle()
                if self.sampler.has_work:
                    for request in self.sampler.step():
                        if not request.tag.done():  # an agent may have stopped waiting, by a time limit of its own say
                            request.tag.set_result(request)
                elif crew.live:
                    await asyncio.wait(crew.live, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            return crew.results()
        finally:
            self.sampler.abort()
            await crew.dismiss()


class Session:
    """One trajectory's conversation partner; every `chat` is an independent conversation."""

    def __init__(self, llm: LocalLLM, identity: tuple[int, ...], on_turn: Callable[[Turn], None] | None):
        self._llm, self._identity, self._on_turn = llm, identity, on_turn
        self._num_turns = 0

    def encode(self, text: str) -> list[int]:
        return self._llm.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._llm.tokenizer.decode(ids)

    def render(self, text: str, **slots: list[int]) -> list[int]:
        """Token ids of a prompt text with its slots filled, inside the chat template."""
        return self._llm.template(text).render(**slots)

    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids without stop and other special tokens: what may be shown to the model again as data."""
        special = self._llm.tokenizer.special_ids | set(self._llm.params.stop_ids)
        return [token for token in turn.response_ids if token not in special]

    async def chat(self, prompt_ids: list[int], *, kind: str, max_new_tokens: int) -> Turn:
        """Sample a response to a rendered prompt."""
        seed = row_seed(*self._identity, self._num_turns)
        self._num_turns += 1
        params = replace(self._llm.params, max_new_tokens=max_new_tokens, seed=seed)
        done: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._llm.sampler.submit(Request(prompt_ids, params, tag=done))
        request = await done
        turn = Turn(
            kind=kind,
            prompt_ids=prompt_ids,
            response_ids=request.ids,
            response_logprobs=request.logprobs,
            finish_reason=request.finish_reason,
            text=self.decode(request.content_ids),
        )
        if self._on_turn is not None:
            self._on_turn(turn)
        return turn
