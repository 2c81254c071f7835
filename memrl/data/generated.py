"""The generators of the miniature's documents, by task: (number of chunks, seed) -> sample."""

from collections.abc import Callable, Sequence
from functools import partial

from memrl.data.arithmetic import make_arithmetic
from memrl.data.bench.miniature import make_bench_sample
from memrl.data.bench.stories import ORDERS, TASKS
from memrl.data.needle import make_sample
from memrl.tokenizer import Tokenizer
from memrl.types import Sample

Generator = Callable[[int, int], Sample]
GENERATORS: dict[str, Generator] = {
    "needle": make_sample,
    "arithmetic": make_arithmetic,
    **{f"bench_{task}": partial(make_bench_sample, task) for task in TASKS},
    **{f"bench_two_hop_{order}": partial(make_bench_sample, "two_hop", order=order) for order in ORDERS},
}


def check_tasks(tasks: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError if there are no tasks, or one that has no generator, or words that the tokenizer does not know."""
    wrong = next((task for task in tasks if task not in GENERATORS), None)
    if wrong is not None or not tasks:
        what = "is empty" if wrong is None else f"holds {wrong!r}"
        raise ValueError(f"data.tasks {what}; give one or more of {', '.join(GENERATORS)}")
    for task in tasks:
        sample = GENERATORS[task](8, 0)
        for word in f"{sample.question} {sample.context}".split():
            if tokenizer.hf.unk_token_id in tokenizer.encode(word):
                problem = f"data.tasks holds {task}, but the model's vocabulary lacks the word {word!r}"
                raise ValueError(f"{problem}; give a model.miniature that has it, or other tasks")


def generator(tasks: Sequence[str], index: int) -> Generator:
    """The generator of sample number `index` of a step; the tasks take turns."""
    return GENERATORS[tasks[index % len(tasks)]]
