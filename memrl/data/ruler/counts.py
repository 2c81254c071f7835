"""Ask for the most frequent words: of a numbered list (cwe, common words) or of a coded text (fwe, frequent words)."""

import math

from memrl.data.paragraphs import draw
from memrl.data.ruler.draws import distinct_letters, shuffle
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.task import Plan, Rng, SyntheticTask
from memrl.data.ruler.words import NUM_WORDS, word

NUM_COMMON = 10
SHORT = 4096  # tokens; below this, lists are built with fewer repetitions
FULL_COUNTS, SHORT_COUNTS = (30, 3), (6, 1)  # repetitions of a common word and of every other word
NOISE_WORD = "..."
NUM_FREQUENT = 3
_SMALLEST_TEXT = 100  # words; from this size on the counts of ranks 2 to 5 all differ


class CommonWords(SyntheticTask):
    """A list in which 10 words occur 30 times each and all others 3 times; the number of others fills the length."""

    answer_tokens = 120

    def plan(self, length: int, rng: Rng) -> Plan:
        common, other = FULL_COUNTS if length >= SHORT else SHORT_COUNTS
        question = (
            f"Which {NUM_COMMON} words occur most often in the list? Answer with the {NUM_COMMON} words, separated by commas."
        )
        answers = tuple(map(word, draw(rng("words"), NUM_WORDS, NUM_COMMON)))

        def build(num_others: int) -> Document:
            needed = NUM_COMMON + num_others
            if needed > NUM_WORDS:
                raise ValueError(f"{self.name}: {length} tokens need more than the {NUM_WORDS} words of the lists; give fewer")
            words = [word(number) for number in draw(rng("words"), NUM_WORDS, needed)]
            items = words[:NUM_COMMON] * common + words[NUM_COMMON:] * other
            shuffle(rng("order"), items)
            return Document("\n".join(f"{place}. {item}" for place, item in enumerate(items, start=1)))

        return Plan(question, answers, "all", build, smallest=1, step=32)


def zeta_counts(size: int) -> list[int]:
    """The count of each rank's word in a text of about `size` words, rank 1 first, down to the last rank that occurs.

    Rank k occurs floor(size * k^-2 / zeta(2)) times, zeta(2) = pi^2 / 6: the zeta distribution with exponent 2 (RULER, arXiv
    2404.06654, "frequent words extraction").
    """
    scale = size * 6 / math.pi**2
    return [math.floor(scale / rank**2) for rank in range(1, math.isqrt(max(1, math.floor(scale))) + 1)]


class FrequentWords(SyntheticTask):
    """A text of coded words with zeta-distributed counts. The most frequent one is dots; the question asks for the next three."""

    answer_tokens = 50

    def plan(self, length: int, rng: Rng) -> Plan:
        def coded(number: int) -> list[str]:
            return [name.lower() for name in distinct_letters(rng("words"), 6, number)]

        def build(size: int) -> Document:
            counts = zeta_counts(size)
            words = [NOISE_WORD, *coded(len(counts) - 1)]
            text = [one for one, times in zip(words, counts, strict=True) for _ in range(times)]
            shuffle(rng("order"), text)
            return Document(" ".join(text))

        question = (
            f"Which {NUM_FREQUENT} words occur most often in the coded text? The dots {NOISE_WORD} are no word. "
            f"Answer with the {NUM_FREQUENT} words, separated by commas."
        )
        return Plan(question, tuple(coded(NUM_FREQUENT)), "all", build, _SMALLEST_TEXT, step=50)
