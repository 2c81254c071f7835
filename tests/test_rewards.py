"""The verifiers' scores of a trajectory."""

from hypothesis import given
from hypothesis import strategies as st

from memrl.scoring.rewards import score, verifier_scores
from memrl.scoring.scores import score_response
from memrl.types import Sample, Trajectory


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


def test_where_all_answers_have_to_be_named_one_of_them_earns_nothing():
    sample = Sample("s", "q", "", answers=("17", "23"), match="all")
    for response, strict, lenient in [
        ("\\boxed{23, 17}", 1.0, 1.0),
        ("\\boxed{17 and 23, I think}", 0.0, 1.0),
        ("\\boxed{17}", 0.0, 0.0),
    ]:
        trajectory = Trajectory(response=response)
        score(trajectory, sample)
        assert trajectory.scores == {"strict": strict, "lenient": lenient}
        assert trajectory.reward == strict


def test_without_a_gold_answer_everything_scores_nothing():
    for match in ("any", "all"):
        assert verifier_scores("\\boxed{x}", [], match) == {"strict": 0.0, "lenient": 0.0}


@given(
    st.text(alphabet="ab \\boxed{},.", max_size=40),
    st.lists(st.text(alphabet="ab .", max_size=4), max_size=3),
    st.sampled_from(["any", "all"]),
)
def test_training_and_evaluation_score_alike(response, answers, match):
    scores = score_response(response, answers, match)
    assert verifier_scores(response, answers, match) == {name: scores[name] for name in ("strict", "lenient")}
