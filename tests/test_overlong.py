"""The overlong penalty: its three pieces by hand, and that a document's length does not enter it."""

import numpy as np
import pytest

from memrl.rl.overlong import overlong_penalty, trajectory_penalty
from memrl.types import Turn

# tokens, cap, buffer -> penalty
PIECES = {
    "an empty turn": (0, 1024, 256, 0.0),
    "below the buffer": (500, 1024, 256, 0.0),
    "where the buffer begins": (768, 1024, 256, 0.0),
    "one token into it": (769, 1024, 256, -1 / 256),
    "half way": (896, 1024, 256, -0.5),
    "one token below the cap": (1023, 1024, 256, -255 / 256),
    "at the cap": (1024, 1024, 256, -1.0),
    "above the cap": (2000, 1024, 256, -1.0),
    "a buffer of one token, below": (9, 10, 1, 0.0),
    "a buffer of one token, at the cap": (10, 10, 1, -1.0),
    "a buffer as large as the cap": (3, 12, 12, -0.25),
    "no buffer, at the cap": (1024, 1024, 0, 0.0),
    "no buffer, above the cap": (2000, 1024, 0, 0.0),
}


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_by_hand(piece):
    num_tokens, cap, buffer, penalty = PIECES[piece]
    assert overlong_penalty(num_tokens, cap, buffer) == penalty


@pytest.mark.parametrize(("cap", "buffer"), [(40, 0), (40, 1), (40, 7), (40, 40)])
def test_the_penalty_falls_from_zero_to_minus_one_in_equal_steps(cap, buffer):
    got = [overlong_penalty(n, cap, buffer) for n in range(2 * cap)]
    if buffer == 0:
        assert got == [0.0] * len(got)
        return
    np.testing.assert_allclose(got, np.interp(range(2 * cap), [cap - buffer, cap], [0, -1]), atol=1e-15)


@pytest.mark.parametrize("buffer", [-1, 11])
def test_a_buffer_that_does_not_fit_the_cap_is_an_error(buffer):
    with pytest.raises(ValueError, match=f"buffer of {buffer} tokens does not fit a cap of 10"):
        overlong_penalty(5, 10, buffer)


CAPS = {"memory": 100, "answer": 20, "tool": 9}


def turns(kinds, lengths):
    return [Turn(kind, [1], [2] * size, [], "stop", max_new_tokens=CAPS[kind]) for kind, size in zip(kinds, lengths, strict=True)]


def test_kinds_are_averaged_and_then_added():
    some = turns(["memory", "memory", "memory", "answer"], [100, 90, 10, 15])
    both = {"memory": 20, "answer": 10}
    assert trajectory_penalty(some, both) == pytest.approx(-(1 + 0.5 + 0) / 3 - 0.5, rel=1e-15)
    assert trajectory_penalty(some, {"memory": 20, "answer": 0}) == pytest.approx(-0.5, rel=1e-15)
    assert trajectory_penalty(some, {"answer": 10}) == -0.5
    assert trajectory_penalty(some, {}) == 0.0


def test_the_number_of_chunks_does_not_change_the_penalty():
    buffers = {"memory": 20, "answer": 10}
    one = trajectory_penalty(turns(["memory", "answer"], [95, 12]), buffers)
    for chunks in (2, 7, 100):
        many = trajectory_penalty(turns(["memory"] * chunks + ["answer"], [95] * chunks + [12]), buffers)
        assert many == pytest.approx(one, rel=1e-14)


def test_a_trajectory_without_turns_of_a_kind_pays_nothing_for_it():
    assert trajectory_penalty(turns(["answer"], [20]), {"memory": 20, "answer": 10}) == -1.0
    assert trajectory_penalty([], {"memory": 20}) == 0.0


def test_an_agents_own_kinds_have_buffers_too():
    assert trajectory_penalty(turns(["tool", "answer"], [9, 20]), {"tool": 3}) == -1.0


def test_the_cap_is_the_one_that_the_turn_was_sampled_with():
    short, long = (Turn("memory", [1], [2] * 10, [], "length", max_new_tokens=cap) for cap in (10, 40))
    assert trajectory_penalty([short, long], {"memory": 5}) == -0.5
