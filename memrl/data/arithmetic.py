"""The arithmetic task of the tool agent's miniature: `take 7 + 5 then * 3`, two steps that are done one after the other.

There is no document. Every whole number up to LARGEST is one word, and so is every piece of a tool call in Hermes' form, written
with blanks. In two thirds of the tasks the calculator's own precedence gives another value than the steps in their order:
7 + 5 * 3 is 22, and the answer is 36.
"""

from __future__ import annotations

import random

from memrl.data import needle
from memrl.types import Sample

LARGEST = 409  # 20 * 20 + 9
FIRST, SECOND = range(2, 21), range(2, 10)  # the operands of the first step, and of the second
KINDS = (("+", "*"), ("+", "*"), ("*", "+"), ("+", "*"), ("+", "*"), ("+", "+"))  # the operations of both steps
CALL = '<tool_call> {"name": "calculator", "arguments": {"expression": " EXPRESSION "}} </tool_call>'
WORDS = (
    *dict.fromkeys(CALL.replace("EXPRESSION", "").split()), "<tool_response>", "</tool_response>", "error:", "tools",
    "calculator", "take", "first", "all", "then", "so", "+", "*", "\\boxed{", "}", *map(str, range(LARGEST + 1)),
)  # fmt: skip
# As the templates of Hermes models, in few words: of the tools it shows the names.
CHAT_TEMPLATE = (
    "{% if tools %}tools {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|> <tool_response> {{ message.content }} </tool_response> "
    "{% else %}<|{{ message.role }}|> {{ message.content }} "
    "{% for call in message.tool_calls or () %}<tool_call> {{ call.function | tojson }} </tool_call> {% endfor %}"
    "{% if message.role == 'assistant' %}<|end|> {% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer():
    """As `memrl.data.needle.build_tokenizer`, with this task's words and a chat template that knows tools."""
    tokenizer = needle.build_tokenizer(WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def draw_task(rng: random.Random) -> tuple[int, str, int, str, int]:
    """a, first operation, b, second operation, c."""
    first, second = rng.choice(KINDS)
    return rng.choice(FIRST), first, rng.choice(FIRST), second, rng.choice(SECOND)


def compute(a: int, operation: str, b: int) -> int:
    return a + b if operation == "+" else a * b


def make_arithmetic(num_chunks: int, seed: int) -> Sample:
    """A task without a document; depends on the seed only."""
    a, first, b, second, c = draw_task(random.Random(f"{seed} arithmetic"))
    return Sample(
        id=f"arithmetic-{seed}",
        question=f"take {a} {first} {b} then {second} {c}",
        context="",
        answers=(str(compute(compute(a, first, b), second, c)),),
        metadata={"num_chunks": num_chunks, "answer_form": "integer"},
    )
