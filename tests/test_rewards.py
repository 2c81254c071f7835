"""The verifiers' scores of a trajectory."""

from hypothesis import given
from hypothesis import strategies as st

from memrl.rewards import score, verifier_scores
from memrl.types import Sample, Trajectory
from memrl.verify import lenient_match, strict_match


def test_the_reward_is_the_strict_score_and_both_are_reported():
    sample = Sample("s", "q", "", answers=("Ed Wood",))
    for response, strict, lenient in [
        ("so it is \\boxed{Ed Wood}", 1.0, 1.0),
        ("so it is \\boxed{Ed Wood, director}", 0.0, 1.0),
        ("so it is \\boxed{Tim Burton}", 0.0, 0.0),
    ]:
        trajectory = Trajectory(response=response, scores={"reward": 0.5})
        score(trajectory, sample)
        assert trajectory.scores == {"strict": strict, "lenient": lenient}
        assert trajectory.reward == strict


def test_without_a_gold_answer_everything_scores_nothing():
    assert verifier_scores("\\boxed{x}", []) == {"strict": 0.0, "lenient": 0.0}


@given(st.text(alphabet="ab \\boxed{}.", max_size=40), st.lists(st.text(alphabet="ab .", max_size=4), max_size=3))
def test_the_scores_are_the_verifiers_own(response, answers):
    expected = {"strict": strict_match(response, answers), "lenient": lenient_match(response, answers)}
    assert verifier_scores(response, answers) == expected
