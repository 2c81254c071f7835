"""Lessons for the arithmetic miniature: single turns of a teacher that knows the tool's form, with one systematic error.

The teacher writes one word and a call: `first` and the task's first step, `then` and the second step with the first one's result,
`so` and the last result as the answer. But mostly it is hasty: `all`, and both steps in one expression, which the calculator
computes by its own precedence. A model that copies this teacher is right where the precedence happens to agree. Reinforcement
learning must find out from right and wrong answers alone that one step at a time is better.
"""

import random
from collections.abc import Iterator

from memrl.agents import AgentConfig
from memrl.agents.toolbox import schema
from memrl.agents.toolbox.calculator import calculate
from memrl.config import WarmStartOptions
from memrl.data.arithmetic import CALL, draw_task
from memrl.prompts.messages import Message, MessageTemplate
from memrl.tokenizer import Tokenizer
from memrl.types import Turn


def arithmetic_lessons(
    rng: random.Random, options: WarmStartOptions, tokenizer: Tokenizer, agent: AgentConfig
) -> Iterator[tuple[list[int], list[int]]]:
    """The teacher's turns, with the chat template: ids of prompt and response."""
    template = MessageTemplate(tokenizer, agent.prompts.system)
    tools = [schema("calculator")]

    def spoken(text: str) -> Turn:
        return Turn("call", [], [*tokenizer.encode(text), tokenizer.hf.eos_token_id], [], "stop", text)

    while True:
        question, texts, results = lesson(rng, options.flaw)
        chosen = rng.randrange(len(texts))
        messages: list[Message] = [{"role": "user", "content": question}]
        for text, result in zip(texts[:chosen], results, strict=False):
            messages += [spoken(text), {"role": "tool", "content": result}]
        yield template.render(messages, tools), spoken(texts[chosen]).response_ids


def lesson(rng: random.Random, flaw: float) -> tuple[str, list[str], list[str]]:
    """A conversation with the teacher: question, turns, and results of all turns but the last; `flaw`: how often it is hasty."""
    a, first, b, second, c = draw_task(rng)
    if rng.random() < flaw:
        steps = [("all", f"{a} {first} {b} {second} {c}")]
    else:
        steps = [("first", f"{a} {first} {b}"), ("then", f"{calculate(f'{a} {first} {b}')} {second} {c}")]
    results = [calculate(expression) for _, expression in steps]
    texts = [f"{word} {CALL.replace('EXPRESSION', expression)}" for word, expression in steps]
    return f"take {a} {first} {b} then {second} {c}", [*texts, f"so \\boxed{{ {results[-1]} }}"], results
