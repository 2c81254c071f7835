"""What an agent talks to: an `LLM` through a `Session`; both for the local sampler.

A `LocalLLM` drives the sampler for many agents at once. Each agent is a coroutine with a `Session` of its own. When all of them
wait for a response, the sampler takes one step, and the agents whose responses are complete continue.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from memrl.prompts import SLOTS, PromptTemplate
from memrl.prompts.messages import MessageTemplate, PlainMessage, Prompt, check_ids, is_messages
from memrl.sampler import Request, Sampler, SamplingParams
from memrl.tokenizer import TextTokenizer, Tokenizer
from memrl.types import Turn
from memrl.utils.seeds import row_seed
from memrl.utils.task_pool import TaskPool, task_path

T = TypeVar("T")
OnTurn = Callable[[Turn], None]
OnMemory = Callable[[Turn, list[int]], None]
TASK_DEPTH = 16


class LLM(Protocol):
    """A language model that serves many agents at once.

    Attributes:
        about: lines for people that describe the model.
    """

    about: list[str]

    @property
    def concurrency(self) -> int:
        """Number of agents to run at a time; more would only wait."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def encode(self) -> Callable[[str], list[int]]: ...

    @property
    def template(self) -> Callable[..., PromptTemplate]:
        """Called with a prompt text and a frozenset of the names of its slots: the text inside the chat template."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the checkpoint's chat template, which shows its form of tool calls; empty if a server renders."""
        ...

    def session(self, *identity: int, on_turn: OnTurn | None = None, on_memory: OnMemory | None = None) -> "Session":
        """A session for one trajectory.

        `on_turn` is called with every complete turn, `on_memory` with a turn and the ids of the memory after it. The random
        numbers depend on `identity` alone, for example (seed, step, group, rollout).
        """
        ...

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """Run the coroutines, at most `concurrency` at a time; results in order."""
        ...


class Session(Protocol):
    """One trajectory's connection to a language model. Every `chat` is an independent conversation.

    Several chats may be awaited at once (`asyncio.gather`). The random numbers of each depend on its place among the tasks that
    the agent created and on its number within its task, not on which chat ends first.
    """

    @property
    def chat_template(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def render(self, text: str, **slots: list[int]) -> list[int]:
        """Token ids of a prompt inside the LLM's chat template: `text`, with the ids of each slot where it has {name}."""
        ...

    def fill(self, text: str, **slots: list[int]) -> list[int]:
        """As `render`, without the chat template: the content of a message."""
        ...

    def content_ids(self, turn: Turn) -> list[int]:
        """The ids of a response that may be inserted into a later prompt as data."""
        ...

    def remember(self, turn: Turn, memory_ids: list[int]) -> list[int]:
        """Tell those who watch that these ids are the memory after this turn (`turn.memory`); returns them."""
        ...

    async def chat(self, prompt: Prompt, *, kind: str, max_new_tokens: int, tools: Sequence[Mapping] = ()) -> Turn:
        """The response to a prompt, as a turn of this `kind`, a word of the agent's own.

        Args:
            prompt: token ids from `render`; or messages and earlier turns, which the checkpoint's chat template renders
                (`memrl/prompts/messages.py`).
            tools: JSON schemas of the functions that may be called, in OpenAI's form; only with messages.
        """
        ...


AnyLLM = TypeVar("AnyLLM", bound=LLM)


class BaseSession(Generic[AnyLLM]):
    """What sessions on any `LLM` share; a session adds `content_ids` and `chat`."""

    def __init__(self, llm: AnyLLM, identity: tuple[int, ...], on_turn: OnTurn | None, on_memory: OnMemory | None):
        self._llm, self._identity, self._on_turn, self._on_memory = llm, identity, on_turn, on_memory
        self._num_chats: Counter[tuple[int, ...]] = Counter()

    def encode(self, text: str) -> list[int]:
        return self._llm.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._llm.tokenizer.decode(ids)

    def render(self, text: str, **slots: list[int]) -> list[int]:
        return self._llm.template(text, frozenset(slots)).render(**slots)

    def remember(self, turn: Turn, memory_ids: list[int]) -> list[int]:
        turn.memory = self.decode(memory_ids)
        if self._on_memory is not None:
            self._on_memory(turn, memory_ids)
        return memory_ids

    def fill(self, text: str, **slots: list[int]) -> list[int]:
        return PromptTemplate(text, PlainMessage(self._llm.tokenizer), slots=slots.keys()).render(**slots)

    @property
    def chat_template(self) -> str:
        return self._llm.chat_template

    def _next_seed(self) -> int:
        path = task_path()
        self._num_chats[path] += 1
        # Below zero, so that no place in a tree of tasks looks like a number of a chat.
        return row_seed(*self._identity, *(-1 - number for number in path), self._num_chats[path] - 1)

    def _report(self, turn: Turn) -> Turn:
        if self._on_turn is not None:
            self._on_turn(turn)
        return turn


@dataclass(frozen=True)
class Decoding:
    """Sampling settings of all turns of a run; `temperature` 0 is greedy. Fields as in `SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class LocalLLM:
    """The `LLM` interface on the local sampler."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        decoding: Decoding,
        system: str | None = None,
        about: Sequence[str] = (),
        max_turn_tokens: int | None = None,
    ):
        """
        Args:
            system: system message of every prompt; None keeps the chat template's default.
            max_turn_tokens: most tokens of a turn, prompt and cap together, for agents that do not say how long theirs can be.
        """
        self.about, self.max_turn_tokens = list(about), max_turn_tokens
        self.sampler, self.tokenizer = sampler, tokenizer
        stop_ids = frozenset(tokenizer.stop_ids)
        self.params = SamplingParams(1, decoding.temperature, decoding.top_p, decoding.top_k, stop_ids, min_p=decoding.min_p)
        # The G rollouts of a sample run one after another, so a few cached texts avoid tokenising a document G times.
        self.encode = lru_cache(maxsize=16)(tokenizer.encode)
        self.template = lru_cache(maxsize=None)(lambda text, slots=SLOTS: PromptTemplate(text, tokenizer, system, slots))
        self.messages = MessageTemplate(tokenizer, system)

    @property
    def chat_template(self) -> str:
        return self.tokenizer.chat_template()

    @property
    def concurrency(self) -> int:
        return self.sampler.max_rows

    def session(self, *identity: int, on_turn: OnTurn | None = None, on_memory: OnMemory | None = None) -> "LocalSession":
        return LocalSession(self, identity, on_turn, on_memory)

    def run(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int | None = None) -> list[T]:
        """As `LLM.run`; the default concurrency is twice the sampler's rows."""
        return asyncio.run(self.drive(agents, concurrency or 2 * self.sampler.max_rows))

    async def drive(self, agents: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
        tasks = TaskPool(agents, concurrency)
        try:
            while tasks.start():
                await asyncio.sleep(0)  # lets every agent that has its response run to its next chat
                for _ in range(TASK_DEPTH):  # an agent's own tasks take a pass of the event loop each to wake their agent
                    if self.sampler.has_work or any(task.done() for task in tasks.running):
                        break
                    await asyncio.sleep(0)
                tasks.collect()
                if self.sampler.has_work:
                    for request in self.sampler.step():
                        if not request.tag.done():  # done already: the agent stopped waiting, for example by its own time limit
                            request.tag.set_result(request)
                elif tasks.running:
                    await asyncio.wait(tasks.running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            return tasks.results()
        finally:
            self.sampler.abort()
            await tasks.cancel()


class LocalSession(BaseSession[LocalLLM]):
    def content_ids(self, turn: Turn) -> list[int]:
        """A response's ids without stop tokens and those that `decode` does not show."""
        stops = self._llm.params.stop_ids
        return self._llm.tokenizer.visible(token for token in turn.response_ids if token not in stops)

    async def chat(self, prompt: Prompt, *, kind: str, max_new_tokens: int, tools: Sequence[Mapping] = ()) -> Turn:
        prompt_ids = self._llm.messages.render(prompt, tools) if is_messages(prompt) else check_ids(prompt, tools)
        limit = self._llm.max_turn_tokens
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise ValueError(
                f"a turn of kind {kind!r} can have {len(prompt_ids) + max_new_tokens} tokens, prompt and cap together, and "
                f"{limit} fit (the model's window, in training also rl.micro_batch_tokens); shorten the prompt, or lower the cap"
            )
        params = replace(self._llm.params, max_new_tokens=max_new_tokens, seed=self._next_seed())
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
            max_new_tokens=max_new_tokens,
        )
        return self._report(turn)
