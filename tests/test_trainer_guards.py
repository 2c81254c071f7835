"""What the trainer does when optimizer steps are skipped, weights break, or rewards fail; without an engine."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memrl.config import LogOptions, OptimOptions, RewardOptions, RLOptions, TrainConfig
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine
from memrl.rl.health import RunError
from memrl.training import run as run_module
from memrl.training import trainer as trainer_module
from memrl.training.trainer import MAX_SKIPPED, Trainer


class FakeRun:
    checkpoints = Path("runs/x/checkpoints")

    def __init__(self):
        self.saved = []

    def save(self, engine, step, keep_last, export, keep):
        self.saved.append((step, keep))


@pytest.fixture
def trainer(monkeypatch) -> Trainer:
    """A trainer without model, data and processes."""
    made = Trainer.__new__(Trainer)
    made.config, made.run, made.engine = TrainConfig(), FakeRun(), None
    made._skipped_in_a_row, made._last_sound = 0, None
    return made


def skip(trainer, times):
    for _ in range(times):
        trainer._check_gradient(math.nan)


def test_the_last_checkpoint_from_before_the_skipped_steps_is_kept(trainer):
    for done, skipped in ((1, 0), (2, 0), (3, 4), (4, 4), (5, 4)):
        skip(trainer, skipped)
        trainer._save(done)
    trainer._check_gradient(0.5)
    trainer._save(6)
    skip(trainer, 1)
    trainer._save(7)
    assert trainer.run.saved == [(1, None), (2, None), (3, 2), (4, 2), (5, 2), (6, None), (7, 6)]


def test_too_many_skipped_steps_end_the_run_and_name_that_checkpoint(trainer):
    trainer._save(4)
    skip(trainer, MAX_SKIPPED - 1)
    with pytest.raises(RunError, match=f"not finite in {MAX_SKIPPED} optimizer steps in a row; .* before them is step-4$"):
        skip(trainer, 1)


def test_a_weight_that_is_not_finite_ends_the_run_before_anything_is_saved(trainer, tiny_model):
    trainer.replica = tiny_model
    trainer.engine = SimpleNamespace(copy_weights_to=lambda replica: None)
    trainer._update_replica("after step 3 the weights are")
    tiny_model.model.norm.weight.data[1] = math.nan
    with pytest.raises(RunError, match=r"after step 3 the weights are not finite \(the first: model.norm.weight\)"):
        trainer._update_replica("after step 3 the weights are")


def test_a_checkpoint_whose_weights_are_not_finite_is_not_resumed(trainer, tiny_model):
    def load(replica):
        replica.model.norm.weight.data[0] = math.inf

    trainer.replica, trainer.engine = tiny_model, SimpleNamespace(copy_weights_to=load)
    trainer.run.load = lambda engine, step: None
    with pytest.raises(RunError, match="the weights in the checkpoint after step 7 are not finite"):
        trainer.resume(7)


def test_the_planned_steps_and_the_first_updates_warnings_reach_the_run(trainer, monkeypatch, capsys):
    """Two updates a step in two passes: of the four planned optimizer steps of step 5 all are done, and of step 6 two."""
    planned, updates = [], ["first", "second"]
    trainer.config.rl = RLOptions(updates_per_step=2, epochs=2)
    trainer.engine = SimpleNamespace(step=lambda number: planned.append(number) or (0.5, 1e-6))
    trainer.reference = trainer.attention = None
    trainer.replica = SimpleNamespace(dtype=trainer_module.torch.float32)
    trainer._is_first_update, trainer._is_start = True, True
    monkeypatch.setattr(trainer_module, "split_groups", lambda turns, number: list(updates))
    monkeypatch.setattr(trainer_module, "prepare_update", lambda part, rl: part)
    monkeypatch.setattr(trainer_module, "add_logprobs", lambda *arguments: None)
    monkeypatch.setattr(trainer_module, "accumulate_gradients", lambda *arguments: {"logprob_diff": 0.5, "kl": 0.5})
    assert len(trainer._update(5, {})) == 4
    updates.pop()
    trainer._update(6, {})
    assert planned == [20, 21, 22, 23, 24, 25]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("warning: step 6: the ") for line in lines)
    assert "sampler's" in lines[0] and "KL to the reference" in lines[1]


def test_the_watch_gets_its_settings(monkeypatch):
    seen = []
    monkeypatch.setattr(trainer_module, "StepWatch", lambda *arguments: seen.append(arguments))
    for name in ("make_source", "pick_attention"):
        monkeypatch.setattr(trainer_module, name, lambda *arguments: None)
    for name in ("_check_inputs", "_load_models", "_make_llm"):
        monkeypatch.setattr(Trainer, name, lambda *arguments: None)
    config = TrainConfig(reward=RewardOptions(max_failed_steps=7), log=LogOptions(flat_steps=9))
    rewards, tokenizer = SimpleNamespace(), SimpleNamespace(decode=None)
    Trainer(config, None, None, tokenizer, None, rewards)
    assert seen == [(config.reward, config.rl, 9)]


def test_a_run_that_cannot_go_on_is_one_line_and_code_2(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise RunError("all rewards\nfailed")

    monkeypatch.setattr(run_module, "_run", fail)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(distributed, name, lambda *_: None)
    monkeypatch.setattr(run_module, "set_threads", lambda threads: None)
    monkeypatch.setattr(run_module, "GracefulStop", lambda text: SimpleNamespace(exit_code=0))  # it would catch signals
    assert run_module.run(TrainConfig(run_dir=str(tmp_path))) == 2
    assert capsys.readouterr().err == "error: all rewards failed\n"


def test_the_rate_of_the_planned_step_reaches_the_optimizer():
    """The warm-up counts the steps that were done, also after a resume; the fall those that were planned."""
    optim = OptimOptions(lr=1.0, warmup_updates=2, min_lr_ratio=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    rates = []

    class DeepSpeedEngine:
        def step(self):
            rates.append(optimizer.param_groups[0]["lr"])
            engine.schedule.step()

        def get_global_grad_norm(self):
            return 1.0

    engine = Engine.__new__(Engine)
    engine.engine = DeepSpeedEngine()
    engine._set_schedule(optimizer, 12, optim)
    optimizer.step()  # PyTorch warns otherwise
    returned = [engine.step(planned)[1] for planned in (0, 4, 5, 11)]
    assert rates == returned == pytest.approx([0.5, 0.8, 0.7, 0.1])
    state = engine.schedule.state_dict()
    engine._set_schedule(optimizer, 12, optim)
    engine.schedule.load_state_dict(state)
    assert engine.step(11)[1] == pytest.approx(0.1) and engine.step()[1] == pytest.approx(1 - 3 / 10)
