"""Variable tracking (vt): hide a chain of assignments in noise and ask which variables hold a value.

LET QXJZV = 57213
LET BMKTA = QXJZV
"""

from memrl.data.ruler.draws import below, distinct_letters
from memrl.data.ruler.fitting import Document
from memrl.data.ruler.haystack import NOISE, Haystack
from memrl.data.ruler.task import Plan, Rng, SyntheticTask
from memrl.tokenizer import Tokenizer

NUM_HOPS = 4
_SMALLEST = 200  # characters of noise


class ChainTask(SyntheticTask):
    """One chain of NUM_HOPS + 1 variables; each is assigned before the next one copies its value."""

    answer_tokens = 30

    def __init__(self, name: str, tokenizer: Tokenizer):
        self.haystack = Haystack(NOISE, "\n", "noise")
        super().__init__(name, tokenizer, self.haystack.version)

    def plan(self, length: int, rng: Rng) -> Plan:
        names = distinct_letters(rng("names"), 5, NUM_HOPS + 1)
        value = 10_000 + below(rng("value"), 89_999)
        sources = [str(value), *names[:-1]]
        lines = [f"LET {name} = {source}" for name, source in zip(names, sources, strict=True)]
        numbers = rng("shares")
        shares = sorted(numbers.random() for _ in names)
        start = self.haystack.start(rng("start").random())
        question = (
            f"Which variables hold the value {value}, be it assigned to them directly or taken over from another variable? "
            f"Answer with the names of all {len(names)}, separated by commas."
        )

        def build(size: int) -> Document:
            context, places = self.haystack.hide(lines, shares, start, size)
            return Document(context, tuple(places))

        return Plan(question, tuple(names), "all", build, _SMALLEST, 2000)
