"""The thinking of a model is cut off before every score, however many answers a question needs."""

import pytest

from memrl.scoring.scores import SCORES, score_response, verifier_scores

GOLD = ("Ed Wood", "Tim Burton")
RIGHT, WRONG = r"\boxed{Ed Wood, Tim Burton}", r"\boxed{Nobody}"


@pytest.mark.parametrize("match", ["any", "all"])
@pytest.mark.parametrize("name", SCORES)
def test_what_was_only_thought_earns_nothing(name, match):
    gold = GOLD if match == "all" else ("Ed Wood, Tim Burton",)
    for answer, thought, score in ((RIGHT, WRONG, 1.0), (WRONG, RIGHT, 0.0), ("I cannot say.", RIGHT, 0.0), ("", RIGHT, 0.0)):
        assert score_response(f"<think>{thought}</think> {answer}", gold, match)[name] == score, answer
    assert score_response(f"<think>{RIGHT} and so on", gold, match)[name] == 0.0, "the thinking did not end"


@pytest.mark.parametrize("match", ["any", "all"])
def test_the_training_reward_and_the_test_metric_see_the_answer_alone(match):
    gold = GOLD if match == "all" else ("Ed Wood, Tim Burton",)
    assert verifier_scores(f"<think>{WRONG}</think>{RIGHT}", gold, match) == {"strict": 1.0, "lenient": 1.0}
    assert verifier_scores(f"<think>{RIGHT}</think>{WRONG}", gold, match) == {"strict": 0.0, "lenient": 0.0}
