"""The bench in the miniature's language: sentences of five words, one word one token, chunks of five sentences.

    fact                     sentence                        question       answer
    a code                   code NAME V1 V2 .               code NAME      NAME V1 V2
    a rumoured code          rumour NAME V1 V2 .
    a planned code           plan NAME V1 V2 .
    a denied code            not NAME V1 V2 .
    who has a name's code    link NAME to NAME2 .            link NAME      NAME2 V1 V2
    a pet                    pet NAME V2 today .             pet NAME       all of V2, in any order
    a visit                  visit NAME the PLACE .          visit NAME     NAME three
    filler                   the wind moves slowly .

As in `memrl.data.needle` a question has two words, those that the facts begin with, and an answer about one name begins with it.
An answer has at most five words, with its box and the end eight tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from memrl.data import needle
from memrl.data.bench.stories import MOST_NEEDED, NUM_VARIATIONS, ORDERS, STORIES, Draws, Fact, Variation, vary
from memrl.data.needle import SENTENCE_WORDS, SENTENCES_PER_CHUNK, draw_filler
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

COUNTS = "none one two three four five six".split()
WORDS = (*needle.WORDS, "link", "to", "rumour", "plan", "not", "pet", "visit", *COUNTS[1:])
# Where a sentence's values stand among its words.
_SLOTS = {**dict.fromkeys(("code", "rumour", "plan", "not"), (2, 3)), "link": (3,), "pet": (2,), "visit": (3,)}
_FORMS = {"link": "link {} to {} .", "pet": "pet {} {} today .", "visit": "visit {} the {} ."}


def build_tokenizer():
    """As `memrl.data.needle.build_tokenizer`, with the bench's words."""
    return needle.build_tokenizer(WORDS)


def is_spoken(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer is a miniature's with the bench's words.

    Raises:
        ValueError: it is a miniature's without them.
    """

    def has(words: Sequence[str]) -> bool:
        return len(set(tokenizer.encode(" ".join(words)))) == len(tokenizer.encode(" ".join(words))) == len(words)

    if has(needle.WORDS) and not has(WORDS):
        raise ValueError("this miniature has only the words of the task needle; the bench needs one that is made with its words")
    return has(WORDS)


def sentence(fact: Fact) -> str:
    return _FORMS.get(fact.kind, f"{fact.kind} {{}} {{}} {{}} .").format(fact.name, *fact.values)


def spell(subject: str, values: Sequence[str | int]) -> str:
    """An answer in the miniature's words: the name that it is about, and what there is about it."""
    return " ".join([*subject.split(), *(COUNTS[value] if isinstance(value, int) else value for value in values)])


def read_facts(text: str) -> list[Fact]:
    """The facts in a document, in its order."""
    found = []
    for words in map(str.split, text.split(" .")):
        if len(words) == SENTENCE_WORDS - 1 and words[0] in _SLOTS:
            found.append(Fact(words[0], words[1], tuple(words[place] for place in _SLOTS[words[0]])))
    return found


def read_question(question: str) -> tuple[str, str] | None:
    """Kind and name that a question asks for; None if it is not one of the bench in the miniature's language."""
    words = question.split()
    return (words[0], words[1]) if len(words) == 2 and words[0] in _SLOTS else None


def make_bench_sample(
    task: str,
    num_chunks: int,
    seed: int,
    *,
    variation: int | None = None,
    order: str | None = None,
    gap: int | None = None,
    needed: int | None = None,
    others: int | None = None,
    segments_per_chunk: int = SENTENCES_PER_CHUNK,
) -> Sample:
    """A document of `num_chunks` chunks for one of the bench's tasks; depends on the arguments only.

    Args:
        variation: number of the variation (`vary`); drawn if not given.
        order, gap, needed: replace the variation's.
        others: facts besides those that the answer needs, lookalikes included; by default three of ten sentences.
        segments_per_chunk: sentences per chunk.

    Raises:
        ValueError: unknown task or order, or the document has too little room.
    """
    total = num_chunks * segments_per_chunk
    if num_chunks < 1 or segments_per_chunk < 1:
        raise ValueError(f"a document of {num_chunks} chunks of {segments_per_chunk} sentences is empty; both must be at least 1")
    rng = random.Random(seed)
    number = rng.randrange(NUM_VARIATIONS) if variation is None else variation
    if task not in STORIES:
        raise ValueError(f"the bench has no task {task!r}; there are {', '.join(STORIES)}")
    varied = vary(task, number, num_chunks, most_needed=max(1, total - 1))
    varied = _replace(task, varied, order, gap, needed)
    story = STORIES[task](Draws(rng), varied)
    places = _draw_places(rng, varied, num_chunks, segments_per_chunk)
    others = max(len(story.lookalikes), 3 * (total - len(places)) // 10) if others is None else others
    if not len(story.lookalikes) <= others <= total - len(places):
        fewest = f"at least {len(story.lookalikes)} and " if story.lookalikes else ""
        raise ValueError(
            f"others is {others}; a document of {total} sentences has room for {fewest}at most {total - len(places)}"
        )
    taken = dict(zip(places, map(sentence, story.evidence), strict=True))
    free = [place for place in range(total) if place not in taken]
    added = [*story.lookalikes, *(story.other() for _ in range(others - len(story.lookalikes)))]
    taken |= zip(rng.sample(free, others), map(sentence, added), strict=True)
    sentences = [taken.get(place) or draw_filler(rng) for place in range(total)]
    context = " ".join(sentences)
    values = list(map(int, story.answers)) if task == "counting" else story.answers
    gold = story.answers if story.match == "all" else (spell(story.subject, values),)
    begins = [sum(map(len, sentences[:place])) + place for place in places]
    return Sample(
        id=f"bench_{task}-{num_chunks}-{seed}",
        question=" ".join(story.asked),
        context=context,
        answers=gold,
        match=story.match,
        metadata={
            "task": f"bench_{task}",
            "language": "miniature",
            "num_chunks": num_chunks,
            "variation": varied.shown(),
            "others": others,
            "evidence": [sentences[place] for place in places],
            "evidence_chunks": [place // segments_per_chunk for place in places],
            "depths": [begin / len(context) for begin in begins],
        },
    )


def _replace(task: str, varied: Variation, order: str | None, gap: int | None, needed: int | None) -> Variation:
    if task != "two_hop" and (order is not None or gap is not None):
        raise ValueError(f"{task} has no order and no gap; only two_hop has")
    if order is not None and order not in ORDERS:
        raise ValueError(f"order is {order!r}; it must be {' or '.join(ORDERS)}")
    if needed is not None and (task in ("two_hop", "distractors") or not 1 <= needed <= MOST_NEEDED):
        raise ValueError(f"needed is {needed}; update, listing and counting take 1 to {MOST_NEEDED}, the other tasks none")
    return Variation(order or varied.order, varied.gap if gap is None else gap, needed or varied.needed)


def _draw_places(rng: random.Random, varied: Variation, num_chunks: int, size: int) -> list[int]:
    """The places of the evidence among the document's sentences, rising.

    The facts of two_hop stand `gap` chunks apart. Those of other tasks stand in different chunks if there are enough.
    """
    needed = varied.needed
    if varied.gap is not None:
        if not 0 <= varied.gap < num_chunks or (varied.gap == 0 and size < 2):
            raise ValueError(f"a gap of {varied.gap} does not fit into {num_chunks} chunks of {size} sentences; give more chunks")
        first = rng.randrange(num_chunks - varied.gap)
        if varied.gap == 0:
            return [first * size + place for place in sorted(rng.sample(range(size), 2))]
        return [chunk * size + rng.randrange(size) for chunk in (first, first + varied.gap)]
    if needed > num_chunks * size:
        raise ValueError(f"{needed} facts do not fit into a document of {num_chunks * size} sentences; give more chunks")
    if needed > num_chunks:
        return sorted(rng.sample(range(num_chunks * size), needed))
    return [chunk * size + rng.randrange(size) for chunk in sorted(rng.sample(range(num_chunks), needed))]
