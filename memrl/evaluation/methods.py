"""The compared ways of answering a question about a document: with memory, in one prompt, from retrieved passages.

A method is an agent with its settings. Each runs on local weights and on an endpoint.
Annotations are not postponed here, because jsonargparse would import everything under TYPE_CHECKING to resolve them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memrl.agents import load_agent_function, make_config, run_agent
from memrl.agents.agent_config import AgentConfig
from memrl.agents.agent_file import LIMITS
from memrl.agents.agent_function import AGENTS
from memrl.agents.limits import check_agent, check_window, longest_turn, prompt_sizes
from memrl.agents.one_shot import OneShotConfig, document_prompt, one_shot_agent
from memrl.agents.retrieval import K1, B, RetrievalConfig, import_bm25s, retrieval_agent
from memrl.evaluation.baselines import BASELINES, BaselineConfig
from memrl.prompts import PROMPT_FOLDER, PromptTemplate
from memrl.types import Sample, Trajectory
from memrl.utils.checksums import hash_files
from memrl.utils.files import fingerprint
from memrl.utils.user_file import imported_files

if TYPE_CHECKING:
    from memrl.llm import Session
    from memrl.tokenizer import Tokenizer

METHODS = ("memory", "one_shot", "retrieval")  # that every prompt file has the texts for
# The settings that make a method's turns shorter, for messages.
LOWER = {"memory": "agent.chunk_tokens or agent.memory_tokens", "one_shot": "window", "retrieval": "retrieval_tokens"}
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
    """Tokens of each passage that retrieval ranks, at most: a paragraph, or a part of a long one."""


@dataclass(frozen=True)
class Method:
    """An agent with its settings.

    Attributes:
        name: one of METHODS or BASELINES, another agent of memrl, or FILE.py:NAME; stands in every row.
    """

    name: str
    config: AgentConfig | OneShotConfig | RetrievalConfig | BaselineConfig

    @property
    def agent(self) -> AgentConfig:
        return self.config if isinstance(self.config, AgentConfig) else self.config.agent

    def settings(self) -> dict[str, Any]:
        """All that the method's prompts depend on besides the sample, as JSON: for the results' fingerprint."""
        config, prompts = self.config, self.agent.prompts
        if isinstance(config, BaselineConfig):
            return {}
        if isinstance(config, AgentConfig):
            shown = {name: getattr(prompts, name) for name in ("memory", "answer", "no_memory", "system")}
            settings = {name: getattr(config, name) for name in LIMITS} | {"prompts": shown}
            return settings if config.function == "memory" else settings | _more_settings(config)
        settings = {name: getattr(config.agent, name) for name in ("answer_tokens", "question_tokens")}
        settings["prompts"] = {"document": document_prompt(prompts), "system": prompts.system}
        if isinstance(config, RetrievalConfig):
            settings |= {"tokens": config.tokens, "passage_tokens": config.passage_tokens}
            return settings | {"window": config.window, "bm25": {"variant": "lucene", "k1": K1, "b": B, "passages": "paragraphs"}}
        return settings | {"window": config.window}

    async def run(self, llm: "Session", sample: Sample) -> Trajectory:
        """Answer one sample's question."""
        if isinstance(self.config, AgentConfig):
            return await run_agent(llm, sample, self.config)
        if isinstance(self.config, RetrievalConfig):
            return await retrieval_agent(llm, sample, self.config)
        if isinstance(self.config, BaselineConfig):
            return BASELINES[self.name](sample)
        return await one_shot_agent(llm, sample, self.config)

    def num_turns(self, document_tokens: int) -> int:
        """Turns of a document with this many tokens; about as many if the agent does not pass over it once."""
        if isinstance(self.config, BaselineConfig):
            return 0
        return -(-document_tokens // self.agent.chunk_tokens) + 1 if isinstance(self.config, AgentConfig) else 1

    def longest_turn(
        self, tokenizer: "Tokenizer", document_tokens: int | None = None, question_tokens: int | None = None
    ) -> int | None:
        """Tokens of the longest turn, prompt and response together; as `memrl.agents.limits.longest_turn`."""
        config, agent = self.config, self.agent
        if isinstance(config, BaselineConfig):
            return None
        if isinstance(config, AgentConfig):
            return longest_turn(tokenizer, config, document_tokens=document_tokens, question_tokens=question_tokens)
        shown = config.tokens if isinstance(config, RetrievalConfig) else config.window
        if document_tokens is not None:
            shown = min(shown, document_tokens)
        question = agent.question_tokens if question_tokens is None else question_tokens
        longest = self._prompt_tokens(tokenizer) + question + shown + agent.answer_tokens
        return longest if config.window is None else min(config.window, longest)

    def check_window(self, tokenizer: "Tokenizer", window: int | None, stretch: Callable[[int], str]) -> None:
        """Raise ValueError if a turn can be longer than the window, or if one_shot could show nothing of a document.

        Args:
            window: of the local model; None for an endpoint, whose window only the user knows.
            stretch: as of `memrl.agents.limits.check_window`.
        """
        config, agent = self.config, self.agent
        if isinstance(config, AgentConfig):
            if window is not None:
                check_agent(window, prompt_sizes(tokenizer, agent), agent, stretch)
            return
        if isinstance(config, BaselineConfig) or config.window is None:
            return
        prompt = self._prompt_tokens(tokenizer)
        limits = {"agent.answer_tokens": agent.answer_tokens, "agent.question_tokens": agent.question_tokens}
        if isinstance(config, RetrievalConfig):
            limits = {"retrieval_tokens": config.tokens, **limits}
        least = config.passage_tokens if isinstance(config, RetrievalConfig) else 1

        def longest(limits: Mapping[str, int]) -> int:
            shown = max(least, limits.get("retrieval_tokens", 0))
            return prompt + shown + limits["agent.answer_tokens"] + limits["agent.question_tokens"]

        if config.window != window:  # not the model's own
            check_window(config.window, limits, longest, what="--window")
        else:
            check_window(config.window, limits, longest, stretch)

    def _prompt_tokens(self, tokenizer: "Tokenizer") -> int:
        prompts = self.agent.prompts
        return PromptTemplate(document_prompt(prompts), tokenizer, prompts.system).num_tokens


def _more_settings(config: AgentConfig) -> dict[str, Any]:
    """What an agent's turns depend on besides limits and the memory agent's prompts."""
    texts = {name: config.prompts.text(name) for name in load_agent_function(config.function).texts}
    file = load_agent_function(config.function).file
    settings = {"function": config.function, "caps": dict(config.caps), "options": config.options_dict(), "texts": texts}
    return settings if file is None else settings | {"file": fingerprint([file]), "modules": hash_files(imported_files(file))}


def make_methods(names: Sequence[str], options: MethodOptions, agent: AgentConfig, window: int | None) -> dict[str, Method]:
    """The methods by their names, in this order.

    Args:
        window: of the local model (`model_window`); None for a remote endpoint, whose window only the user knows. Of an
            endpoint's window `ENDPOINT_RESERVE` tokens are left free.

    Raises:
        ValueError: no, unknown or repeated names, options out of range, or a missing package.
    """
    limit = _effective_window(options, window)
    made: dict[str, Method] = {}
    for name in (name.strip() for name in names):
        if name not in METHODS and name not in AGENTS and name not in BASELINES and ":" not in name:
            others = ", ".join(agent for agent in (*AGENTS, *BASELINES) if agent not in METHODS)
            raise ValueError(f"there is no method {name!r}; there are {', '.join(METHODS)}, {others}, or FILE.py:NAME")
        if name in made:
            raise ValueError(f"the method {name!r} is given twice; give each method once")
        config: AgentConfig | OneShotConfig | RetrievalConfig | BaselineConfig = agent
        if name in BASELINES:
            config = BaselineConfig(agent)
        elif name not in ("one_shot", "retrieval", agent.function):
            limits = {limit: getattr(agent, limit) for limit in LIMITS}
            lacks = [text for text in load_agent_function(name).texts if not agent.prompts.text(text)]
            has_own_file = (PROMPT_FOLDER / f"{name}.yaml").is_file()
            config = make_config(name if lacks and has_own_file else agent.prompts, function=name, **limits)
        elif name == "one_shot":
            if limit is None:
                raise ValueError(
                    "the method one_shot needs the endpoint's window, which cannot be read from it; give --window TOKENS"
                )
            config = OneShotConfig(agent, limit)
        elif name == "retrieval":
            _check_retrieval(options)
            config = RetrievalConfig(agent, options.retrieval_tokens, options.passage_tokens, limit)
        made[name] = Method(name, config)
    if not made:
        raise ValueError(f"there is no method to run; give one or more of {', '.join(METHODS)}")
    return made


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
