"""A training run, from its settings to its report; called by `memrl train`."""

import io
import os
import sys
from pathlib import Path

from memrl.agents import AgentConfig
from memrl.config import RewardOptions, TrainConfig
from memrl.data.generated import check_tasks
from memrl.engine import distributed
from memrl.miniature.registry import find_miniature
from memrl.model import load_model, read_config
from memrl.report.curves import plot_curves
from memrl.rl.health import RunError
from memrl.scoring.reward_pool import RewardPool
from memrl.tokenizer import Tokenizer, load_tokenizer
from memrl.training.checkpoint import RunFolder, SaveError
from memrl.training.console import StepTable, command_name, next_commands, recipe_line
from memrl.training.graceful_stop import GracefulStop
from memrl.training.inputs import build_agent, run_inputs
from memrl.training.miniature_report import evaluate_policy, has_report, write_report
from memrl.training.tracking import Tracker, check_tracking
from memrl.training.trainer import Trainer
from memrl.utils.command_line import user_errors
from memrl.utils.devices import set_threads


def run(config: TrainConfig) -> int:
    """Train as configured; returns the exit code of the process.

    0: done. 1: something could not be written. 2: an error in the settings or their files, or a run that cannot go on. 130, 143:
    stopped by SIGINT, SIGTERM.
    """
    stop = GracefulStop(f"the same command resumes from the last checkpoint in {config.run_dir}")
    set_threads(config.threads)
    with user_errors():
        distributed.init(config.device)
    try:
        _run(config, stop)
    except SystemExit:  # a mistake in the settings, in one line
        if distributed.world_size() == 1:  # otherwise other ranks may still wait for this one
            distributed.shutdown()
        raise
    except (SaveError, OSError, RunError) as error:
        if os.environ.get("MEMRL_TRACEBACK"):
            raise
        return _end_with_error(error)
    distributed.shutdown()
    return stop.exit_code


def _end_with_error(error: Exception) -> int:
    """Print the error in one line: on rank 0 if all ranks raised it, otherwise on the rank where it happened."""
    is_common = isinstance(error, SaveError | RunError)
    if distributed.rank() == 0 or not is_common:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if is_common:
        distributed.shutdown()
        return 1 if isinstance(error, SaveError) else 2
    os._exit(1)  # a normal exit could wait endlessly for the other ranks, which wait for this one


def _run(config: TrainConfig, stop: GracefulStop) -> None:
    with user_errors():
        check_tracking(config.log)
        if config.model.path is not None:
            read_config(config.model.path)  # a model that cannot be used must not leave a run folder
        else:
            check_tasks(config.data.tasks, Tokenizer(find_miniature(config.model.miniature).build_tokenizer()))
        agent = build_agent(config.agent)
        # Before the folder is opened: an error in the reward function must not cost a warm start nor fix the folder's settings.
        rewards = start_rewards(config.reward)
        folder = RunFolder(config.run_dir)
        first_step = folder.open(config, distributed.once_per_machine(lambda: run_inputs(agent, config)))
        start = Path(config.model.path) if config.model.path else _warm_start(config, folder, agent)
        tokenizer = load_tokenizer(start)
        trainer = Trainer(config, folder, start, tokenizer, agent, rewards)
        trainer.resume(first_step)
    _say(f"{describe(trainer)}; writing to {folder.path}")
    _say(recipe_line(config))
    if config.report.lengths and not has_report(trainer, "before"):
        evaluate_policy(trainer, "before", load_model(start, config.model.dtype, distributed.device()))
    if first_step:
        _say(f"resuming after step {first_step}")
    steps_done = _train(trainer, first_step, stop)
    if stop.signal:
        _say(f"stopped after step {steps_done}; the same command resumes there")
        trainer.close()
        return
    if not config.checkpoint.every:  # otherwise the last checkpoint has made it
        folder.write_model(trainer.export)
    _say(f"trained policy: {folder.path / 'model'} (a Hugging Face folder)")
    if config.model.lora_rank:
        trainer.engine.save_adapter(folder.path / "adapter", str(start))
        _say(f"its adapters alone: {folder.path / 'adapter'} (as peft reads them)")
    if config.report.lengths:
        if first_step < config.rl.steps or not has_report(trainer, "after"):
            evaluate_policy(trainer, "after", trainer.replica)
        if distributed.rank() == 0:
            write_report(folder.path, config.data.max_chunks)
    for command in next_commands(config, command_name()):
        _say(f"next: {command}")
    trainer.close()


def start_rewards(options: RewardOptions) -> RewardPool:
    return RewardPool(options.function, options.workers, options.timeout_s, options.on_error, options.memory_gib)


def _train(trainer: Trainer, first_step: int, stop: GracefulStop) -> int:
    """Run the steps with their table and trackers; returns the number of steps done."""
    config, is_first = trainer.config, distributed.rank() == 0
    tracker = Tracker(config.run_dir, config.log, config.to_dict(), first_step) if is_first else None
    with StepTable(config.rl.steps, first_step, stream=None if is_first else io.StringIO()) as table:

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
        except Exception as error:  # a damaged log line or an error in matplotlib must not end a finished run
            _say(f"no learning curves: {error}")
    return steps_done


def _warm_start(config: TrainConfig, folder: RunFolder, agent: AgentConfig) -> Path:
    """The miniature's initial model: rank 0 trains it once per run and writes a Hugging Face folder."""
    from memrl.miniature.start import check_start, make_start

    start = folder.path / "start"

    def make_or_check() -> None:
        if start.exists():
            check_start(start)
        else:
            make_start(start, find_miniature(config.model.miniature), agent, config.warm_start, config.seed)

    distributed.done_by_rank_0(make_or_check)
    return start


def describe(trainer: Trainer) -> str:
    count = sum(p.numel() for p in trainer.replica.parameters())
    ranks = distributed.world_size()
    attention = f"{trainer.attention.name} attention ({trainer.attention_reason})"
    return f"{count:,} parameters, {ranks} rank{'s' if ranks > 1 else ''} on {distributed.device().type}, {attention}"


def _say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)
