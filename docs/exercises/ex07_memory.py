"""Exercise 7: the memory."""

from collections.abc import Callable

Prompt = tuple[list[int], list[int], list[int] | None]


def read(
    question: list[int],
    document: list[int],
    nothing: list[int],
    generate: Callable[[Prompt], list[int]],
    chunk_tokens: int,
    memory_tokens: int,
) -> list[Prompt]:
    """Read a document chunk by chunk; returns the prompts: (question, memory, chunk), and at the end (question, memory, None).

    The memory of a prompt is what the model wrote to the prompt before. It writes until it has `memory_tokens` tokens.

    Args:
        nothing: the memory before the first chunk.
        generate: the model's response to a prompt, without any limit.
    """
    prompts: list[Prompt] = []
    memory = nothing
    for start in range(0, len(document), chunk_tokens):
        prompts.append((question, memory, document[start : start + chunk_tokens]))
        memory = generate(prompts[-1])[-memory_tokens:]
    return [*prompts, (question, memory, None)]
