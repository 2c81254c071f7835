"""The tool agent: the model calls tools in its checkpoint's own form, reads their results, and answers.

    question -> turn with calls -> results -> turn with calls -> results -> ... -> a turn without calls: the answer

All turns are one conversation, so each turn's prompt begins with prompt and response of the turn before. Results are in prompts
only and are never trained on. What is wrong with a call (broken JSON, no such tool, wrong arguments, too many calls) is told to
the model as its result, so that it can try again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memrl.agents.chat import PROMPTS as PROMPTS  # a question with or without a document
from memrl.agents.chat import first_message
from memrl.agents.tool_calls import call_form, native_calls, parse
from memrl.agents.toolbox import TOOLS, run_call, schema
from memrl.types import Sample, Trajectory

if TYPE_CHECKING:
    from memrl.agents.agent_config import AgentConfig
    from memrl.llm import Session
    from memrl.types import Turn

CAPS = {"call": 256}


@dataclass(frozen=True)
class Options:
    """The tool agent's own settings (agent.options).

    Attributes:
        max_turns: most turns, the answer included; the last one should answer, and a call in it is not made.
        max_calls: most calls of one turn that are made.
        result_tokens: most tokens of a result; a longer one is cut.
        tools: names of the tools that the model may call.
    """

    max_turns: int = 6
    max_calls: int = 4
    result_tokens: int = 256
    tools: list[str] = field(default_factory=lambda: ["calculator", "check_answer"])

    def __post_init__(self):
        for name in ("max_turns", "max_calls", "result_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"agent.options.{name} is {getattr(self, name)}; it must be at least 1")
        if unknown := [name for name in self.tools if name not in TOOLS]:
            raise ValueError(f"agent.options.tools names {unknown[0]!r}; there are {', '.join(TOOLS)}")


async def tools_agent(llm: Session, sample: Sample, config: AgentConfig) -> Trajectory:
    """Let the model call tools until it answers; scores: `calls`, `failed_calls`, and `cut_tokens` as of the chat agent.

    Raises:
        ValueError: the question is empty or longer than its limit, or the chat template cannot render the conversation.
    """
    options: Options = config.options
    schemas = [schema(name) for name in options.tools]
    message, cut_tokens = first_message(llm, sample, config)
    messages: list[dict | Turn] = [message]
    turns: list[Turn] = []
    results: list[str] = []
    for number in range(options.max_turns):
        is_last = number + 1 == options.max_turns
        cap = config.answer_tokens if is_last else config.cap("call")
        turn = await llm.chat(messages, kind="call", max_new_tokens=cap, tools=schemas)
        turns.append(turn)
        calls = native_calls(turn.tool_calls) if turn.tool_calls else parse(turn.text, call_form(llm.chat_template))
        if is_last or not calls:
            break
        messages.append(turn)
        for place, call in enumerate(calls):
            too_many = f"error: at most {options.max_calls} calls in one turn are made"
            results.append(run_call(call, options.tools, sample) if place < options.max_calls else too_many)
            ids = llm.encode(results[-1])
            content = results[-1] if len(ids) <= options.result_tokens else ids[: options.result_tokens]
            messages.append({"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name})
    turns[-1].kind = "answer"  # whether a turn answers shows when it ends
    failed = sum(result.startswith("error: ") for result in results)
    scores = {"calls": float(len(results)), "failed_calls": float(failed), "cut_tokens": float(cut_tokens)}
    return Trajectory(turns, turns[-1].text, scores=scores)
