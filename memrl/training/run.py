"""A training run from its settings to its report: what `train.py` calls."""

import os
import sys
from pathlib import Path

from memrl.agents import AgentConfig
from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.model import load_model
from memrl.report.curves import plot_curves
from memrl.scoring.reward_pool import RewardPool
from memrl.tokenizer import load_tokenizer
from memrl.training.checkpoint import RunFolder, SaveError
from memrl.training.console import StepTable
from memrl.training.graceful_stop import GracefulStop
from memrl.training.miniature_report import evaluate_policy, has_report, write_report
from memrl.training.tracking import Tracker, check_tracking
from memrl.training.trainer import Trainer, build_agent, run_inputs
from memrl.utils.command_line import user_errors
from memrl.utils.devices import set_threads


def run(config: TrainConfig) -> int:
    """Train as configured; returns the process's exit code.

    0: done. 2: a mistake in the settings or their files. 1: something could not be written. 130, 143: stopped by SIGINT, SIGTERM.
    """
    stop = GracefulStop(f"the same command resumes from the last checkpoint in {config.run_dir}")
    set_threads(config.threads)
    with user_errors():
        distributed.init(config.device)
    try:
        _run(config, stop)
    except (SaveError, OSError) as error:
        if os.environ.get("MEMRL_TRACEBACK"):
            raise
        return _end_unwritten(error)
    distributed.shutdown()
    return stop.exit_code


def _end_unwritten(error: Exception) -> int:
    """One line for what could not be written: from rank 0 where all ranks know, from the rank that found out otherwise."""
    if distributed.rank() == 0 or not isinstance(error, SaveError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if isinstance(error, SaveError):
        distributed.shutdown()
        return 1
    os._exit(1)  # other ranks may be waiting in a collective that no longer comes


def _run(config: TrainConfig, stop: GracefulStop) -> None:
    with user_errors():
        check_tracking(config.log)
        agent = build_agent(config)
        # Before the folder: a mistake in the function should cost no warm start, nor bind the folder to it.
        rewards = RewardPool(config.reward.function, config.reward.workers, config.reward.timeout_s)
        folder = RunFolder(config.run_dir)
        first_step = folder.open(config, run_inputs(config, agent))
        start = Path(config.model.path) if config.model.path else _own_start(config, folder, agent)
        tokenizer = load_tokenizer(start)
        trainer = Trainer(config, folder, start, tokenizer, agent, rewards)
        trainer.resume(first_step)
    _say(f"{describe(trainer)}; writing to {folder.path}")
    if config.report.lengths:
        if not has_report(trainer, "before"):
            evaluate_policy(trainer, "before", load_model(start, config.model.dtype, distributed.device()))
    if first_step:
        _say(f"resuming after step {first_step}")
    steps = config.rl.steps
    steps_done = _train(trainer, first_step, stop)
    if stop.signal:
        _say(f"stopped after step {steps_done}; the same command resumes there")
        trainer.close()
        return
    if not config.checkpoint.every:  # otherwise the last checkpoint's
        if distributed.rank() == 0:
            trainer.export(folder.path / "model")
        distributed.barrier()
    _say(f"trained policy: {folder.path / 'model'} (a Hugging Face folder)")
    if config.model.lora_rank:
        trainer.engine.save_adapter(folder.path / "adapter", str(start))
        _say(f"its adapters alone: {folder.path / 'adapter'} (as peft reads them)")
    if config.report.lengths:
        if first_step < steps or not has_report(trainer, "after"):
            evaluate_policy(trainer, "after", trainer.replica)
        if distributed.rank() == 0:
            write_report(folder.path, config.data.max_chunks)
    trainer.close()


def _train(trainer: Trainer, first_step: int, stop: GracefulStop) -> int:
    """The steps, with their table and trackers; returns the number of steps done."""
    config, is_first = trainer.config, distributed.rank() == 0
    tracker = Tracker(config.run_dir, config.log, config.to_dict(), first_step) if is_first else None
    with (
        open(os.devnull, "w") as nowhere,
        StepTable(config.rl.steps, first_step, stream=None if is_first else nowhere) as table,
    ):

        def on_step(done: int, metrics: dict, seconds: dict, validation: dict | None) -> None:
            metrics = metrics | {f"validation/{name}": value for name, value in (validation or {}).items()}
            table.row(done, metrics, seconds)
            if tracker is not None:
                tracker.log(done, metrics | {f"timing/{name}": value for name, value in seconds.items()})

        steps_done = trainer.train(first_step, on_step, stop)
    if tracker is not None:
        tracker.close()
        try:
            _say(f"learning curves: {plot_curves(config.run_dir)}")
        except Exception as error:  # a damaged line in a log, or whatever matplotlib has against it: no picture is worth a run
            _say(f"no learning curves: {error}")
    return steps_done


def _own_start(config: TrainConfig, folder: RunFolder, agent: AgentConfig) -> Path:
    """The miniature's warm start: made once per run by rank 0, then a Hugging Face folder like any other."""
    from memrl.training.miniature_start import make_start

    start = folder.path / "start"
    if distributed.rank() == 0 and not start.exists():
        make_start(start, agent, config.warm_start, config.seed)
    distributed.barrier()
    return start


def describe(trainer: Trainer) -> str:
    count = sum(p.numel() for p in trainer.replica.parameters())
    ranks = distributed.world_size()
    attention = f"{trainer.attention.name} attention ({trainer.attention_reason})"
    return f"{count:,} parameters, {ranks} rank{'s' if ranks > 1 else ''} on {distributed.device().type}, {attention}"


def _say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)
