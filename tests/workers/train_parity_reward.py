"""`train.py` with a reward that a random model earns about half of the time: whether its answer's ids sum to an even number.

Run by tests/test_training.py; takes train.py's own arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from memrl.rl import rollout
from memrl.types import Sample, Trajectory


def parity_score(trajectory: Trajectory, sample: Sample) -> None:
    trajectory.reward = float(sum(trajectory.turns[-1].response_ids) % 2 == 0)
    trajectory.scores = {"strict": trajectory.reward, "lenient": trajectory.reward}


rollout.score = parity_score

if __name__ == "__main__":
    sys.exit(train.main(sys.argv[1:]))
