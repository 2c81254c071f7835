"""What an agent is given besides the sample: its prompts, its limits, its own options; and the ids of question and document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from memrl.types import Sample

if TYPE_CHECKING:
    from memrl.prompts import Prompts


@dataclass(frozen=True)
class AgentConfig:
    """An agent's prompts, its limits in tokens, and its own options.

    Attributes:
        prompts: the prompt file's contents.
        chunk_tokens: document tokens per chunk.
        memory_tokens: maximum length of the memory, and of the response of a memory turn.
        answer_tokens: maximum length of the answer turn's response.
        question_tokens: maximum length of the question; longer ones are refused, because cutting would change their meaning.
        function: name of the agent, or FILE.py:NAME; see `memrl.agents.agent_function`.
        caps: maximum length of the responses of further kinds of turn, by kind.
        options: an instance of the `Options` of the agent's module; of a module without them a mapping.
    """

    prompts: Prompts
    chunk_tokens: int = 5000
    memory_tokens: int = 1024
    answer_tokens: int = 1024
    question_tokens: int = 1024
    function: str = "memory"
    caps: Mapping[str, int] = field(default_factory=dict)
    options: Any = field(default_factory=dict)

    def cap(self, kind: str) -> int:
        """Most tokens of a response of this kind: memory_tokens, answer_tokens, or of `caps`; ValueError for another kind."""
        caps = {"memory": self.memory_tokens, "answer": self.answer_tokens, **self.caps}
        if kind not in caps:
            raise ValueError(f"the agent has turns of kind {kind!r} without a cap; give --agent.caps.{kind} TOKENS")
        return caps[kind]

    def options_dict(self) -> dict[str, Any]:
        """The options as a mapping."""
        return dict(self.options) if isinstance(self.options, Mapping) else asdict(self.options)


def encode_document(encode: Callable[[str], list[int]], sample: Sample) -> list[int]:
    """Token ids of the document, none if it is blank; a ValueError names the sample if the tokenizer fails on it."""
    try:
        return encode(sample.context) if sample.context.strip() else []
    except ValueError as error:
        raise ValueError(f"the document of sample {sample.id}: {error}") from error


def encode_question(encode: Callable[[str], list[int]], question: str, config: AgentConfig) -> list[int]:
    """The question's token ids, with its own blanks, as in the original; ValueError if it is blank or too long."""
    return check_question(encode(question) if question.strip() else [], config)


def check_question(question_ids: list[int], config: AgentConfig) -> list[int]:
    """The unchanged ids; ValueError if the question is empty or too long."""
    if not question_ids:
        raise ValueError("the question is empty")
    if len(question_ids) > config.question_tokens:
        raise ValueError(
            f"the question has {len(question_ids)} tokens, and the cap is {config.question_tokens}; shorten it or raise "
            "agent.question_tokens"
        )
    return question_ids
