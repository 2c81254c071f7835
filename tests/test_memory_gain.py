"""The turn reward memory_gain, against plain log-probabilities of single sequences."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from memrl.model import PackedContext, load_model, save_model
from memrl.rl.memory_gain import MemoryGain
from memrl.types import Group, Sample, Trajectory, Turn
from tests.tiny_folder import PROMPTS, make_folder, make_tokenizer

TEMPERATURE = 0.7
MEMORIES = ["red stone", "red", "red stone", "blue two three four east"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with weights large enough for probabilities to differ by much."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"), seed=3)
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    save_model(model, folder / "loud", make_tokenizer())
    return folder / "loud"


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder).eval()


def gain(model, max_tokens: int = 10_000) -> MemoryGain:
    return MemoryGain(model, make_tokenizer(), PROMPTS, TEMPERATURE, max_tokens)


def make_group(*trajectories: list[str | None], answers=("red stone",), match="any", group_id=0) -> Group:
    """Trajectories of the turns with these memories."""
    sample = Sample(f"s{group_id}", "code name ?", "", answers, match)
    turns = [[Turn("memory", [1], [2], [-1.0], "stop", memory=memory) for memory in memories] for memories in trajectories]
    return Group(group_id, sample, [Trajectory([*row, Turn("answer", [1], [2], [-1.0], "stop")]) for row in turns])


def rewards(group: Group) -> list[list[float]]:
    return [[turn.reward for turn in trajectory.turns] for trajectory in group.trajectories]


def values_of(found: MemoryGain, groups: list[Group]) -> list[list[list[float]]]:
    found.add_to(groups)
    return [rewards(group) for group in groups]


def values_by(logits_of: Callable) -> Callable[[str, str], float]:
    """value(memory, answer): the mean log-probability, of one sequence, the prompt spelled out."""
    vocabulary = make_tokenizer().hf.get_vocab()
    unknown = vocabulary["<|unk|>"]

    def value(memory: str, answer: str) -> float:
        prompt = f"<|im_start|> A Q code name ? M {memory} <|im_end|> <|im_start|> \\boxed{{"
        prompt_ids, answer_ids = ([vocabulary.get(word, unknown) for word in text.split()] for text in (prompt, f"{answer} }}"))
        with torch.no_grad():
            logprobs = torch.log_softmax(logits_of(torch.tensor(prompt_ids + answer_ids)) / TEMPERATURE, dim=-1)
        each = [logprobs[len(prompt_ids) + j - 1, token].item() for j, token in enumerate(answer_ids)]
        return sum(each) / len(each)

    return value


@pytest.fixture(scope="module")
def value(model):
    return values_by(lambda ids: model(ids, PackedContext([len(ids)])))


@pytest.mark.slow
def test_values_are_those_of_transformers(folder, value):
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    of_peer = values_by(lambda ids: peer(ids[None]).logits[0].float())
    for memory in MEMORIES:
        assert value(memory, "red stone") == pytest.approx(of_peer(memory, "red stone"), abs=1e-4)


def test_a_turns_reward_is_the_gain_over_the_memory_before_it(model, value):
    [[found, _]] = values_of(gain(model), [make_group(MEMORIES, ["none"])])
    levels = [value(memory, "red stone") for memory in ["none", *MEMORIES]]
    assert found == pytest.approx([after - before for before, after in pairwise(levels)] + [0.0], abs=1e-4)
    assert max(levels) - min(levels) > 0.1, "the test needs memories that differ"


def test_the_rewards_of_a_trajectory_add_up_to_the_gain_of_its_last_memory(model, value):
    [[found]] = values_of(gain(model), [make_group(MEMORIES)])
    assert sum(found) == pytest.approx(value(MEMORIES[-1], "red stone") - value("none", "red stone"), abs=1e-4)


def test_the_most_probable_of_several_answers_counts(model, value):
    answers = ("blue cloud", "red stone", "north")
    [[found]] = values_of(gain(model), [make_group(["red", "blue"], answers=answers)])
    levels = [max(value(memory, answer) for answer in answers) for memory in ("none", "red", "blue")]
    assert found == pytest.approx([levels[1] - levels[0], levels[2] - levels[1], 0.0], abs=1e-4)


def test_answers_that_are_all_wanted_are_one_listing(model, value):
    [[found]] = values_of(gain(model), [make_group(["red"], answers=("red", "stone"), match="all")])
    assert found[0] == pytest.approx(value("red", "red stone") - value("none", "red stone"), abs=1e-4), "no word is a comma here"


def test_a_vocabulary_with_a_comma_separates_answers_by_it(model):
    class WithComma:
        def __init__(self):
            self.inner = make_tokenizer()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decode(self, ids):
            return ","

    found = MemoryGain(model, WithComma(), PROMPTS, 1.0, 100)  # type: ignore[arg-type]
    assert found._listing(["red", "blue two"]) == "red, blue two"


def test_equal_memories_have_equal_gains_to_the_last_bit_and_a_kept_one_has_none(model):
    group = make_group(["red", "red", "blue"], ["red", "two", "blue"])
    gain(model).add_to([group])
    (first, kept, _, answer), (other, *_) = rewards(group)
    assert first == other != 0.0 and kept == answer == 0.0


@pytest.mark.parametrize("max_tokens", [17, 40])
def test_the_cut_into_forward_passes_does_not_matter(model, max_tokens):
    groups = [make_group(MEMORIES, ["blue", "red"], group_id=i, answers=("red stone", "two")[i:]) for i in range(2)]
    whole = values_of(gain(model), [make_group(MEMORIES, ["blue", "red"], answers=("red stone", "two")[i:]) for i in range(2)])
    for found, expected in zip(values_of(gain(model, max_tokens), groups), whole, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=2e-5)


def test_the_rank_that_computes_a_group_does_not_matter(model):
    def groups():
        return [make_group(MEMORIES, ["blue", "red"], answers=("red stone", "two")[i:], group_id=i) for i in range(2)]

    together = values_of(gain(model), groups())
    apart = [values_of(gain(model), [group])[0] for group in groups()]
    for found, expected in zip(apart, together, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=2e-5)


def test_each_memory_of_a_group_is_computed_once(model, monkeypatch):
    found, seen = gain(model), []
    monkeypatch.setattr(found, "mean_logprobs", lambda items: seen.extend(items) or [0.0] * len(items))
    found.add_to([make_group(MEMORIES, ["red", "red"]), make_group(["red"], group_id=1)])
    assert len(seen) == 4 + 2  # none, red stone, red, blue two ...; none, red


def test_the_gain_is_added_to_what_the_turn_has(model):
    groups = [make_group(["red"]), make_group(["red"])]
    groups[1].trajectories[0].turns[0].reward = 5.0
    plain, added = values_of(gain(model), groups)
    assert added[0][0] == pytest.approx(plain[0][0] + 5.0) and plain[0][0] != 0


def test_trajectories_without_a_reward_and_questions_without_an_answer_get_nothing(model):
    failed, unknown = make_group(["red"], ["blue"]), make_group(["red"], answers=())
    failed.trajectories[0].left_out = True
    first, second = values_of(gain(model), [failed, unknown])
    assert first[0] == [0.0, 0.0] and first[1][0] != 0.0 and second == [[0.0, 0.0]]


def test_turns_that_say_nothing_of_the_memory_are_passed_over(model):
    [[found], [plain]] = values_of(gain(model), [make_group(["red", None, "blue"]), make_group(["red", "blue"])])
    assert found == [plain[0], 0.0, plain[1], 0.0]
