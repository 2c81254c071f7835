"""The memory bench: five tasks that ask for more than to keep one fact, in two languages. docs/bench.md describes them."""

from memrl.data.bench.stories import TASKS

NAMES = tuple(f"bench_{task}" for task in TASKS)
