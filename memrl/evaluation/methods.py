"""The compared ways of answering a question about a document: with memory, in one prompt, from retrieved passages.

A method is an agent with its settings. Each runs on local weights and on an endpoint.
Annotations are not postponed here, because jsonargparse would import everything under TYPE_CHECKING to resolve them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from memrl.agents.agent_file import LIMITS
from memrl.agents.limits import longest_turn
from memrl.agents.memory import AgentConfig, memory_agent
from memrl.agents.one_shot import OneShotConfig, document_prompt, one_shot_agent
from memrl.agents.retrieval import K1, B, RetrievalConfig, import_bm25s, retrieval_agent
from memrl.prompts import PromptTemplate
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.tokenizer import Tokenizer

METHODS = ("memory", "one_shot", "retrieval")
# Tokens of an endpoint's window that stay free: for its chat template, of unknown size, and for the few tokens
# by which a prompt that was cut between tokens grows when it is tokenised again.
ENDPOINT_RESERVE = 256


@dataclass
class MethodOptions:
    """Settings of the methods other than memory."""

    window: int | None = None
    """Most tokens of prompt and answer together (one_shot, retrieval); by default the model's own window, yarn included."""
    retrieval_tokens: int = 4000
    """Document tokens that retrieval shows: about as many as the memory agent sees at a time."""
    passage_tokens: int = 256
    """Tokens of each passage that retrieval ranks."""


class Method(Protocol):
    """
    Attributes:
        name: one of METHODS; stands in every row.
        lower: the settings that make its turns shorter, for messages.
    """

    name: ClassVar[str]
    lower: ClassVar[str]

    def settings(self) -> dict[str, Any]:
        """All that the method's prompts depend on besides the sample, as JSON: for the results' fingerprint."""
        ...

    async def run(self, llm: "Session", sample: Sample) -> Trajectory:
        """Answer one sample's question."""
        ...

    def num_turns(self, document_tokens: int) -> int:
        """Turns of a document with this many tokens."""
        return 1

    def longest_turn(self, tokenizer: "Tokenizer", document_tokens: int | None = None, question_tokens: int | None = None) -> int:
        """Tokens of the longest turn, prompt and response together; arguments as in `memrl.agents.limits.longest_turn`."""
        ...


@dataclass(frozen=True)
class MemoryMethod(Method):
    """The memory agent: the function that is trained, with the prompts that it was trained with."""

    agent: AgentConfig

    name = "memory"
    lower = "agent.chunk_tokens or agent.memory_tokens"

    def settings(self) -> dict[str, Any]:
        prompts = self.agent.prompts
        shown = {name: getattr(prompts, name) for name in ("memory", "answer", "no_memory", "system")}
        return {name: getattr(self.agent, name) for name in LIMITS} | {"prompts": shown}

    async def run(self, llm: "Session", sample: Sample) -> Trajectory:
        return await memory_agent(llm, sample, self.agent)

    def num_turns(self, document_tokens: int) -> int:
        return -(-document_tokens // self.agent.chunk_tokens) + 1

    def longest_turn(self, tokenizer: "Tokenizer", document_tokens: int | None = None, question_tokens: int | None = None) -> int:
        return longest_turn(tokenizer, self.agent, document_tokens=document_tokens, question_tokens=question_tokens)


@dataclass(frozen=True)
class OneShotMethod(Method):
    """The whole document in one prompt; if it does not fit, its middle is cut out."""

    config: OneShotConfig

    name = "one_shot"
    lower = "window"

    def settings(self) -> dict[str, Any]:
        return _answer_settings(self.config.agent) | {"window": self.config.window}

    async def run(self, llm: "Session", sample: Sample) -> Trajectory:
        return await one_shot_agent(llm, sample, self.config)

    def longest_turn(self, tokenizer: "Tokenizer", document_tokens: int | None = None, question_tokens: int | None = None) -> int:
        if document_tokens is None:
            return self.config.window
        return min(self.config.window, _answer_turn(tokenizer, self.config.agent, document_tokens, question_tokens))


@dataclass(frozen=True)
class RetrievalMethod(Method):
    """The passages that share words with the question, in one prompt."""

    config: RetrievalConfig

    name = "retrieval"
    lower = "retrieval_tokens"

    def settings(self) -> dict[str, Any]:
        config = self.config
        own = {"tokens": config.tokens, "passage_tokens": config.passage_tokens, "window": config.window}
        return _answer_settings(config.agent) | own | {"bm25": {"variant": "lucene", "k1": K1, "b": B}}

    async def run(self, llm: "Session", sample: Sample) -> Trajectory:
        return await retrieval_agent(llm, sample, self.config)

    def longest_turn(self, tokenizer: "Tokenizer", document_tokens: int | None = None, question_tokens: int | None = None) -> int:
        config = self.config
        shown = config.tokens if document_tokens is None else min(config.tokens, document_tokens)
        longest = _answer_turn(tokenizer, config.agent, shown, question_tokens)
        return longest if config.window is None else min(config.window, longest)


def _answer_settings(agent: AgentConfig) -> dict[str, Any]:
    limits = {"answer_tokens": agent.answer_tokens, "question_tokens": agent.question_tokens}
    return limits | {"prompts": {"document": document_prompt(agent.prompts), "system": agent.prompts.system}}


def _answer_turn(tokenizer: "Tokenizer", agent: AgentConfig, shown_tokens: int, question_tokens: int | None) -> int:
    template = PromptTemplate(document_prompt(agent.prompts), tokenizer, agent.prompts.system)
    question = agent.question_tokens if question_tokens is None else question_tokens
    return template.num_tokens + question + shown_tokens + agent.answer_tokens


def make_methods(names: Sequence[str], options: MethodOptions, agent: AgentConfig, window: int | None) -> list[Method]:
    """The methods by their names, in this order.

    Args:
        window: of the local model (`model_window`); None for a remote endpoint, whose window only the user knows. Of an
            endpoint's window `ENDPOINT_RESERVE` tokens are left free.

    Raises:
        ValueError: no, unknown or repeated names, options out of range, or a missing package.
    """
    names = [name.strip() for name in names]
    if not names:
        raise ValueError(f"there is no method to run; give one or more of {', '.join(METHODS)}")
    limit = _effective_window(options, window)
    made: dict[str, Method] = {}
    for name in names:
        if name in made:
            raise ValueError(f"the method {name!r} is given twice; give each method once")
        if name == "memory":
            made[name] = MemoryMethod(agent)
        elif name == "one_shot":
            if limit is None:
                raise ValueError(
                    "the method one_shot needs the endpoint's window, which cannot be read from it; give --window TOKENS"
                )
            made[name] = OneShotMethod(OneShotConfig(agent, limit))
        elif name == "retrieval":
            _check_retrieval(options)
            made[name] = RetrievalMethod(RetrievalConfig(agent, options.retrieval_tokens, options.passage_tokens, limit))
        else:
            raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return list(made.values())


def _effective_window(options: MethodOptions, window: int | None) -> int | None:
    given = options.window
    if given is not None and given < 1:
        raise ValueError(f"window is {given}; it must be a number of tokens, at least 1")
    if window is not None:
        if given is not None and given > window:
            raise ValueError(f"window is {given}, but this model is made for {window} tokens; lower it, or give --yarn")
        return given or window
    if given is not None and given <= ENDPOINT_RESERVE:
        raise ValueError(f"window is {given}; of an endpoint's window {ENDPOINT_RESERVE} tokens are left free, so give more")
    return None if given is None else given - ENDPOINT_RESERVE


def _check_retrieval(options: MethodOptions) -> None:
    if options.passage_tokens < 1:
        raise ValueError(f"passage_tokens is {options.passage_tokens}; it must be at least 1")
    if options.retrieval_tokens < options.passage_tokens:
        raise ValueError(
            f"retrieval_tokens is {options.retrieval_tokens}, less than one passage of {options.passage_tokens} tokens; "
            "raise it or lower passage_tokens"
        )
    import_bm25s()
