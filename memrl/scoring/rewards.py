"""What a trajectory earned, by the verifiers that every run reports. Rewards of one's own: `reward_pool.py`."""

from collections.abc import Sequence

from memrl.scoring.verify import lenient_match, lenient_match_all, strict_match, strict_match_all
from memrl.types import Sample, Trajectory


def verifier_scores(response: str, answers: Sequence[str], match: str = "any") -> dict[str, float]:
    """The scores "strict" and "lenient" of a response, each 0.0 or 1.0.

    The strict verifier wants the last \\boxed{} to equal a gold answer, the lenient one a gold answer inside it; where `match` is
    "all", the box has to list all gold answers, or to hold each of them. The same model can score 50% by one and 80% by the
    other, so both are always reported.
    """
    strict, lenient = (strict_match_all, lenient_match_all) if match == "all" else (strict_match, lenient_match)
    return {"strict": strict(response, answers), "lenient": lenient(response, answers)}


def score(trajectory: Trajectory, sample: Sample) -> None:
    """Set `reward` (the strict verifier's, which training maximises by default) and `scores` (strict and lenient) in place."""
    trajectory.scores = verifier_scores(trajectory.response, sample.answers, sample.match)
    trajectory.reward = trajectory.scores["strict"]
