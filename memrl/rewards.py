"""What a trajectory earned."""

from memrl.types import Sample, Trajectory
from memrl.verify import lenient_match, strict_match


def score(trajectory: Trajectory, sample: Sample) -> None:
    """Set `reward` (the strict verifier's, which training maximises) and `scores` (strict and lenient) in place.

    The strict verifier wants the last \\boxed{} to equal a gold answer, the lenient one a gold answer inside it. The same model
    can score 50% by one and 80% by the other, so both are always reported.
    """
    strict = strict_match(trajectory.response, sample.answers)
    trajectory.scores = {"strict": strict, "lenient": lenient_match(trajectory.response, sample.answers)}
    trajectory.reward = strict
