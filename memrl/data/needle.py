"""The miniature's task: documents of facts and filler in a closed vocabulary, with a question about one fact.

    code irene purple falcon . the wind moves slowly . code simon happy badger . the clock glows alone . the rain rests today .

A document is a string of five-word sentences. A *chunk* is five of them, 25 words, 25 tokens. Facts `code NAME V1 V2 .` about
many names are mixed with filler; the name in the question has exactly one fact, the needle, in one random chunk. The question is
`code NAME` and the answer is `NAME V1 V2`: as the answer begins with the name, each value follows the word just written, which a
model of two layers can look up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from memrl.types import Sample

NAMES = (
    "alice bruno clara david emma felix grace henry irene jonas kevin laura marco nadia oscar paula quinn rosa simon tara "
    "ulrich vera wanda xavier"
).split()
FIRST_VALUES = (
    "red blue green white black golden silver purple orange yellow brown grey tiny giant quiet brave happy gentle clever rapid "
    "sleepy frozen hidden ancient"
).split()
SECOND_VALUES = (
    "fox owl bear wolf horse eagle tiger otter whale raven camel goose lion zebra panda mouse robin shark snake beaver falcon "
    "badger salmon turtle"
).split()
FILLER = (
    "wind rain river train garden market clock street".split(),
    "waits moves sings turns rests glows drifts fades".split(),
    "slowly again outside nearby today alone softly early".split(),
)
SPECIAL = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>")
PROMPT_WORDS = ("question", "memory", "section", "update", "answer")
WORDS = (
    *PROMPT_WORDS, "code", "nothing", "none", "the", ".", "\\boxed{", "}",
    *NAMES, *FIRST_VALUES, *SECOND_VALUES, *FILLER[0], *FILLER[1], *FILLER[2],
)  # fmt: skip

SENTENCES_PER_CHUNK = 5
SENTENCE_WORDS = 5
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<|user|> {{ message.content }} "
    "{% elif message.role == 'assistant' %}<|assistant|> {{ message.content }} <|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(words: Sequence[str] = WORDS):
    """One word, one token: a `transformers.PreTrainedTokenizerFast` over the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by spaces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_sample(num_chunks: int, seed: int, segments_per_chunk: int = SENTENCES_PER_CHUNK) -> Sample:
    """A document of `num_chunks` chunks with one needle; depends on the arguments only.

    Args:
        segments_per_chunk: sentences per chunk, for tokenizers and agents with another chunk size.

    Raises:
        ValueError: fewer than one chunk or sentence.
    """
    if num_chunks < 1 or segments_per_chunk < 1:
        raise ValueError(f"a document of {num_chunks} chunks of {segments_per_chunk} sentences is empty; both must be at least 1")
    rng = random.Random(seed)
    name = rng.choice(NAMES)
    values = draw_values(rng)
    needle_chunk = rng.randrange(num_chunks)
    sentences: list[str] = []
    for index in range(num_chunks):
        needle = fact(name, values) if index == needle_chunk else None
        sentences += make_chunk(rng, name, needle, segments_per_chunk)
    context = " ".join(sentences)
    return Sample(
        id=f"needle-{num_chunks}-{seed}",
        question=f"code {name}",
        context=context,
        answers=(f"{name} {values}",),
        metadata={
            "num_chunks": num_chunks,
            "needle_chunk": needle_chunk,
            "depths": [context.index(fact(name, values)) / len(context)],
        },
    )


def make_chunk(rng: random.Random, name: str, needle: str | None, num_sentences: int = SENTENCES_PER_CHUNK) -> list[str]:
    """The sentences of one chunk: a fifth to two fifths are facts about names other than `name`, one may be the needle."""
    distractors = rng.randint(max(1, num_sentences // 5), max(1, 2 * num_sentences // 5))
    kinds = [True] * distractors + [False] * (num_sentences - distractors)
    rng.shuffle(kinds)
    sentences = [fact(draw_name(rng, name), draw_values(rng)) if kind else draw_filler(rng) for kind in kinds]
    if needle is not None:
        sentences[rng.randrange(num_sentences)] = needle
    return sentences


def fact(name: str, values: str) -> str:
    return f"code {name} {values} ."


def draw_values(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_VALUES)} {rng.choice(SECOND_VALUES)}"


def draw_name(rng: random.Random, excluded: str) -> str:
    while (name := rng.choice(NAMES)) == excluded:
        pass
    return name


def draw_filler(rng: random.Random) -> str:
    return f"the {' '.join(rng.choice(words) for words in FILLER)} ."
