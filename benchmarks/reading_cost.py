"""A reward for benchmarks/agents.py: right answers, a little less the more of the document was read.

    reward = strict * (1 - COST * sections read / sections of the document)

A wrong answer earns nothing however little was read, so stopping before the answer is known never pays.
"""

from memrl.verify import strict_match

COST = 0.5


def right_and_short(trajectory, answers: list[str], metadata: dict) -> float:
    match = "all" if len(answers) > 1 else "any"  # of the bench's tasks only listings have several answers, and need all of them
    read = sum(turn.kind == "memory" for turn in trajectory.turns) / metadata["num_chunks"]
    return strict_match(trajectory.response, answers, match) * (1 - COST * read)
