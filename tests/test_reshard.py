"""A ZeRO checkpoint loaded on another number of ranks: real DeepSpeed, every stage, weights and moments bit for bit."""

import pytest
import torch

from tests.workers import reshard
from tests.workers.launch import torchrun

# stage, dtype, "late" or "early" (saved before the first update), ranks that save, ranks that load
CASES = [
    (3, "float32", "late", 2, 1),
    (3, "bfloat16", "late", 1, 2),
    (3, "bfloat16", "late", 3, 2),
    (2, "float32", "late", 1, 3),
    (2, "bfloat16", "late", 2, 1),
    (1, "float32", "late", 2, 1),
    (1, "bfloat16", "late", 2, 1),
]
EARLY = (3, "float32", "early", 1, 2)


def name_of(case: tuple) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """By "save" or "load" and by case; one launch for each number of ranks saves all its cases, another one loads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[str, dict] = {"save": {}, "load": {}}
    for mode, place in (("save", 3), ("load", 4)):
        for ranks in (1, 2, 3):
            cases = [name_of(case) for case in [*CASES, EARLY] if case[place] == ranks]
            found[mode] |= torchrun(reshard, folder / f"{mode}-{ranks}.pt", mode, folder, *cases, ranks=ranks)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_weights_moments_and_schedule_go_on_at_another_world_size(results, case):
    whole, resumed = results["save"][name_of(case)], results["load"][name_of(case)]
    stage, dtype = case[:2]
    assert "moments" in resumed["words"] and "not carried" in resumed["words"]
    assert len(whole["state"]) > 15
    assert whole["state"].keys() == resumed["state"].keys()
    for name, tensor in whole["state"].items():
        assert torch.equal(tensor, resumed["state"][name]), name
    assert set(resumed["adam_step"]) == set(whole["adam_step"]) == {reshard.STEPS}
    assert stage < 3 or len(whole["adam_step"]) > 1, "AdamW's state is in one piece, as no large model's is"
    # What follows differs by the order of sums over ranks alone.
    precision = 1e-6 if dtype == "float32" else 1e-2
    for (norm, rate), (norm_resumed, rate_resumed) in zip(whole["steps"], resumed["steps"], strict=True):
        assert rate == rate_resumed
        assert norm == pytest.approx(norm_resumed, rel=precision)
    for name, tensor in whole["after"].items():
        if name.endswith("master"):
            assert torch.allclose(tensor, resumed["after"][name], rtol=precision, atol=precision), name


@pytest.mark.slow
def test_a_checkpoint_before_the_first_update_has_no_moments_to_carry(results):
    whole, resumed = results["save"][name_of(EARLY)], results["load"][name_of(EARLY)]
    for (norm, rate), (norm_resumed, rate_resumed) in zip(whole["steps"], resumed["steps"], strict=True):
        assert rate == rate_resumed
        assert norm == pytest.approx(norm_resumed, rel=1e-6)
