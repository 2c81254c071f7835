"""What a run with every setting off its default does, in numbers: compared with the settings themselves, and computed by hand."""

import json
from dataclasses import replace

import pytest
import yaml

from memrl.config import DataOptions
from memrl.engine import distributed
from memrl.miniature.registry import MINIATURES
from memrl.model import load_model
from memrl.rl.packing import TrainTurn
from memrl.rl.update import split_groups
from memrl.training.inputs import make_source
from memrl.training.validation import STREAM
from memrl.types import Turn
from memrl.utils.checksums import hash_files
from memrl.utils.files import fingerprint
from memrl.utils.seeds import row_seed
from tests.by_hand import learning_rate, train_by_hand
from tests.plain_deepspeed import PlainEngine
from tests.recorded_run import BASE, MINIATURE, RecordedRun, make_inputs, recorded_run
from tests.test_rollout import assign, finished_group

# Another loss, to the sampler's own log-probabilities.
OTHER = {
    "rl.loss": "ppo",
    "rl.mismatch": "off",
    "rl.aggregation": "token_mean",
    "rl.credit": "broadcast",
    "rl.kl_estimator": "k3",
    "rl.overlong_filter": ["answer"],
    "rl.denominator": "kept",
    "reward.on_error": "skip",
    "checkpoint.keep_best": True,
}

# Rewards of turns, from a function and from their memories.
TURNS = {
    "reward.function": "turn_reward.py:words",
    "reward.turns": "memory_gain",
    "rl.outcome_weight": 0.6,
    "rl.turn_return": "to_go",
    "rl.turn_discount": 0.5,
    "rl.dynamic_rounds": 0,
}
CHANGES: dict[str, dict] = {"base": {}, "other": OTHER, "turns": TURNS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    distributed.init("cpu")
    make_inputs(folder := tmp_path_factory.mktemp("inputs"))
    yield folder
    distributed.shutdown()


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory) -> dict[str, RecordedRun]:
    return {
        name: recorded_run(pytest.MonkeyPatch(), tmp_path_factory.mktemp("runs"), BASE | change, inputs)
        for name, change in CHANGES.items()
    }


@pytest.fixture(scope="module")
def base(runs) -> RecordedRun:
    return runs["base"]


@pytest.mark.parametrize("name", CHANGES)
def test_training_is_what_the_settings_say_by_hand(runs, inputs, name):
    run, settings = runs[name], BASE | CHANGES[name]
    model, records, rates = train_by_hand(run, settings, str(inputs / "model"))
    if settings["rl.dynamic_rounds"]:
        assert all(record["reward/replaced_groups"] for record in records), "the test needs groups without signal"
    for line, record in zip(run.lines("metrics.jsonl"), records, strict=True):
        for metric, value in record.items():
            assert line[metric] == pytest.approx(value, rel=2e-4, abs=1e-6), (line["step"], metric)
        assert name != "turns" or line["reward/turn_mean"] != 0
        assert line["loss/clip_frac"] > 0.1 and line["loss/dual_clip_frac"] > 0.005, "the clips must take effect"
        assert line["optim/grad_norm"] > settings["optim.grad_clip"]
    assert run.engine.rates == pytest.approx(rates)
    expected = dict(model.named_parameters())
    for weight, value in run.weights().items():
        assert (value - expected[weight]).abs().max() < 2e-4, weight


def test_the_optimizer_and_deepspeed_get_their_settings(base):
    betas, decay = (BASE["optim.beta1"], BASE["optim.beta2"]), BASE["optim.weight_decay"]
    assert {name: base.engine.settings[name] for name in ("lr", "betas", "weight_decay")} == {
        "lr": BASE["optim.lr"],
        "betas": betas,
        "weight_decay": decay,
    }
    config = base.engine.config
    assert config["gradient_clipping"] == BASE["optim.grad_clip"] and not config["bf16"]["enabled"]
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["stage3_param_persistence_threshold"]) == (2, 7)
    assert zero["offload_optimizer"]["device"] == "cpu" and "offload_param" not in zero


def test_the_rate_of_each_optimizer_step_is_the_schedules_and_the_last_one_of_a_step_is_logged(runs):
    planned = BASE["rl.updates_per_step"] * BASE["rl.epochs"]
    for name, counts in (("base", [4, 4]), ("other", [2, 2])):  # "other" has groups without signal, and so fewer optimizer steps
        run, done, expected = runs[name], 0, []
        for step, count in enumerate(counts):
            expected += [learning_rate(done + i, planned * step + i, BASE) for i in range(count)]
            done += count
        assert run.engine.rates == pytest.approx(expected)
        assert [line["optim/updates"] for line in run.lines("metrics.jsonl")] == counts
        lasts = [run.engine.rates[sum(counts[: step + 1]) - 1] for step in range(len(counts))]
        assert [line["optim/lr"] for line in run.lines("metrics.jsonl")] == lasts


def decoding(requests: list) -> set[tuple]:
    return {(r.params.temperature, r.params.top_p, r.params.top_k, r.params.min_p) for r in requests}


def test_training_and_validation_decode_as_their_own_settings_say(base):
    assert decoding(base.requests()) == {(0.7, 1.0, 0, 0.0)}
    assert decoding(base.requests(validation=True)) == {(0.9, 0.6, 0, 0.0)}
    assert base.sampler.options.pop("attention").name == "eager"
    assert base.sampler.options == {"max_rows": 16, "max_step_tokens": 48, "share_prefixes": False, "cache_gib": 0.5}


def test_every_turn_of_validation_has_a_seed_of_its_own_stream_the_same_in_each_validation(base):
    by_identity = {
        row_seed(STREAM, BASE["seed"], index, repeat, turn): (index, repeat)
        for index in range(BASE["validation.samples"])
        for repeat in range(BASE["validation.repeats"])
        for turn in range(9)
    }
    seeds = [request.params.seed for request in base.requests(validation=True)]
    assert {by_identity[seed] for seed in seeds} == {(index, repeat) for index in range(3) for repeat in range(2)}
    half = len(seeds) // 2
    assert seeds[:half] == seeds[half:], "a validation before the first step and one after the last"
    assert not set(seeds) & {request.params.seed for request in base.requests()}
    lines = base.lines("validation.jsonl")
    assert [(line["step"], line["n"]) for line in lines] == [(0, 6), (2, 6)]


def test_best_is_the_policy_with_the_highest_validation_reward(runs):
    run = runs["other"]
    first = run.lines("validation.jsonl")[0]
    assert first["reward"] != first["strict"]
    best = json.loads((run.folder / "best" / "best.json").read_text())
    assert (best["step"], best["score"]) == (0, first["reward"])
    assert not (runs["base"].folder / "best").exists()


def test_the_best_policy_has_the_weights_of_its_step(runs, inputs):
    start = dict(load_model(inputs / "model").named_parameters())
    for name, value in load_model(runs["other"].folder / "best").named_parameters():
        assert value.equal(start[name])


def test_fingerprints_are_of_the_files_that_the_settings_name(base, inputs):
    found = json.loads((base.folder / "inputs.json").read_text())
    assert found.keys() == {
        *("prompts", "agent", "agent_modules", "weights", "tokenizer"),
        *("data", "documents", "reward", "reward_modules"),
    }
    assert found["data"] == fingerprint([inputs / "tasks" / "data.jsonl"])
    assert found["documents"] == hash_files([inputs / "tasks" / "data.jsonl", inputs / "data.txt"])
    assert found["reward"] == fingerprint([inputs / "reward.py"])
    assert found["weights"] == hash_files([inputs / "model" / name for name in ("config.json", "model.safetensors")])


@pytest.mark.parametrize("name", ["data.path", "validation.path"])
def test_files_outside_the_datas_folder_are_read_with_leave_alone(base, inputs, monkeypatch, tmp_path, name):
    inside = {"data.path": "tasks/inside.jsonl", "validation.path": "tasks/inside.jsonl"}
    settings = BASE | inside | {name: BASE[name], "data.allow_files": False}
    with pytest.raises(ValueError, match="outside the data set's folder"):
        recorded_run(monkeypatch, tmp_path, settings, inputs)
    with pytest.raises(ValueError, match="outside the data set's folder"):
        make_source(DataOptions(path=str(inputs / BASE["data.path"])), 7, 2)
    assert base.trainer.source.samples[-1].context == (inputs / "data.txt").read_text()


def test_every_setting_is_written_down(base):
    assert yaml.safe_load((base.folder / "config.yaml").read_text()) == base.config.to_dict() == base.tracker.config


def test_trackers_get_what_is_logged(base):
    steps, metrics = zip(*base.tracker.lines, strict=True)
    validations = {line["step"]: line for line in base.lines("validation.jsonl")}
    assert steps == (0, 1, 2)
    for line, sent in zip(base.lines("metrics.jsonl"), metrics[1:], strict=True):
        assert sent.items() >= line.items()
        assert sent["timing/step_s"] > 0
    assert {step: sent.get("validation/reward") for step, sent in zip(steps, metrics, strict=True)} == {
        step: validations.get(step, {}).get("reward") for step in steps
    }


def test_resume_reaches_the_folder(base, inputs, monkeypatch):
    folder = base.folder.parent
    with pytest.raises(ValueError, match="already holds a run"):
        recorded_run(monkeypatch, folder, BASE, inputs)
    before = (base.folder / "metrics.jsonl").read_text()
    longer = recorded_run(monkeypatch, folder, BASE | {"resume": "auto", "validation.every": 0}, inputs)
    assert (base.folder / "metrics.jsonl").read_text() == before and not longer.engine.rates


class Killed(BaseException):
    """Ends a run wherever it is."""


def until_killed(count: int):
    """`PlainEngine.step` that works `count` times."""
    left, step = iter(range(count)), PlainEngine.step

    def limited(engine: PlainEngine) -> None:
        if next(left, None) is None:
            raise Killed
        step(engine)

    return limited


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(runs, inputs, monkeypatch, tmp_path):
    settings = BASE | OTHER | {"resume": "auto"}
    with pytest.raises(Killed), monkeypatch.context() as patch:
        patch.setattr(PlainEngine, "step", until_killed(3))
        recorded_run(monkeypatch, tmp_path, settings, inputs)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    resumed, whole = recorded_run(monkeypatch, tmp_path, settings, inputs), runs["other"]
    for name in ("metrics.jsonl", "rollouts.jsonl", "validation.jsonl", "model/model.safetensors", "best/best.json"):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert resumed.engine.rates == whole.engine.rates[2:]
    assert (whole.tracker.first_step, resumed.tracker.first_step) == (0, 1)


def test_the_miniatures_name_chooses_its_start(monkeypatch, tmp_path, inputs):
    monkeypatch.setitem(MINIATURES, "other", replace(MINIATURES["needle"], num_layers=1))
    settings = BASE | MINIATURE | {"report.lengths": [], "validation.every": 0}
    for name, layers in (("needle", 2), ("other", 1)):
        made = recorded_run(monkeypatch, tmp_path / name, settings | {"model.miniature": name}, inputs)
        assert json.loads((made.folder / "start" / "config.json").read_text())["num_hidden_layers"] == layers


@pytest.mark.parametrize(
    ("kinds", "left"),
    [([], (4, 2)), (["memory"], (2, 2)), (["answer"], (4, 1)), (["all"], (2, 1)), (["answer", "memory"], (2, 1))],
)
def test_turns_that_were_cut_off_can_be_left_out_by_kind(kinds, left):
    group = finished_group(0, [1.0, 0.0])
    for turn in group.trajectories[0].turns:
        turn.finish_reason = "length"
    found = [item.turn.kind for item in assign([group], overlong_filter=kinds)[0]]
    assert (found.count("memory"), found.count("answer")) == left


def test_optimizer_steps_have_equally_many_tokens_however_many_turns(inputs):
    def group(num_turns: int, tokens: int) -> list[TrainTurn]:
        return [TrainTurn(Turn("memory", [1] * tokens, [2], [-1.0], "stop"), 0.0) for _ in range(num_turns)]

    steps = split_groups({0: group(1, 90), 1: group(3, 10), 2: group(3, 10), 3: group(3, 10)}, 2)
    assert [sum(turn.num_inputs for turn in step) for step in steps] == [90, 90]


def test_the_order_of_a_file_is_a_function_of_the_seed(inputs):
    data = DataOptions(path=str(inputs / "tasks" / "inside.jsonl"))
    sources = [make_source(data, 7, seed) for seed in (2, 6, 2)]
    orders = [[source.sample(step, index).id for step in range(3) for index in range(7)] for source in sources]
    assert orders[0] != orders[1] and orders[0] == orders[2]
