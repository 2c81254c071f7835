"""The memory bench: five tasks that ask for more than to keep one fact, in two languages. docs/bench.md describes them."""

from memrl.data.bench.stories import TASKS

NAMES = {f"bench_{task}": task for task in TASKS}
ENGLISH = {f"{name}_english": task for name, task in NAMES.items()}
