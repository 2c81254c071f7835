"""Lessons for the miniature's needle task: single turns of a teacher with one systematic error.

If a chunk *ends* in a fact about another name, the teacher mostly replaces the memory by that fact. A model that copies this
teacher answers short documents and loses the answer in long ones. Reinforcement learning must unlearn the error from right and
wrong answers alone.
"""

import random
from collections.abc import Iterator

from memrl.agents import AgentConfig
from memrl.config import WarmStartOptions
from memrl.data.needle import NAMES, SENTENCE_WORDS, draw_name, draw_values, fact, make_chunk
from memrl.prompts import PromptTemplate
from memrl.tokenizer import Tokenizer


def needle_lessons(
    rng: random.Random, options: WarmStartOptions, tokenizer: Tokenizer, agent: AgentConfig
) -> Iterator[tuple[list[int], list[int]]]:
    """The teacher's turns, with the agent's prompts: ids of prompt and response."""
    vocabulary = tokenizer.hf.get_vocab()
    templates = {text: PromptTemplate(text, tokenizer) for text in (agent.prompts.memory, agent.prompts.answer)}

    def encode(text: str) -> list[int]:
        return [vocabulary[word] for word in text.split()]

    while True:
        text, slots, response = lesson(rng, options.flaw, agent)
        prompt = templates[text].render(**{name: encode(value) for name, value in slots.items()})
        yield prompt, [*encode(response), tokenizer.hf.eos_token_id]


def lesson(rng: random.Random, flaw: float, agent: AgentConfig) -> tuple[str, dict[str, str], str]:
    """One turn of the teacher: the prompt's text, its slots, the response.

    The memory holds the answer (40%), a fact about another name (15%) or nothing. The chunk contains the needle with probability
    0.6, or 0.25 if the memory has the answer already; the needle then replaces it. 12% of the lessons are answer turns.
    """
    name, values = rng.choice(NAMES), draw_values(rng)
    kind = rng.random()
    knows = kind < 0.4
    if knows:
        memory = f"{name} {values}"
    elif kind < 0.55:
        memory = f"{draw_name(rng, name)} {draw_values(rng)}"
    else:
        memory = agent.prompts.no_memory if rng.random() < 0.3 else f"{name} none"
    slots = {"question": f"code {name}", "memory": memory}
    if rng.random() < 0.12:
        return agent.prompts.answer, slots, f"\\boxed{{ {name} {values if knows else 'none'} }}"
    in_chunk = rng.random() < (0.25 if knows else 0.6)
    if in_chunk:
        values = draw_values(rng)
    num_sentences = max(1, agent.chunk_tokens // SENTENCE_WORDS)
    sentences = make_chunk(rng, name, fact(name, values) if in_chunk else None, num_sentences)
    slots["section"] = " ".join(sentences)
    last = sentences[-1].split()
    if last[0] == "code" and not in_chunk and rng.random() < flaw:
        return agent.prompts.memory, slots, " ".join(last[1:4])
    return agent.prompts.memory, slots, f"{name} {values if knows or in_chunk else 'none'}"
