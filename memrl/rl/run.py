"""A training run from its settings to its report: what `train.py` calls."""

import os
import signal
import sys
from pathlib import Path

from memrl.agents import AgentConfig
from memrl.cli import user_errors
from memrl.config import TrainConfig
from memrl.model import load_model
from memrl.progress import Progress
from memrl.rl import distributed
from memrl.rl.checkpoint import RunFolder
from memrl.rl.report import evaluate_policy, has_report, write_report
from memrl.rl.trainer import Trainer, build_agent, run_inputs
from memrl.runtime import set_threads
from memrl.tokenizer import load_tokenizer


def run(config: TrainConfig) -> int:
    """Train as configured; returns the process's exit code."""
    set_threads(config.threads)
    with user_errors():
        distributed.init(config.device)
    # An interrupted run resumes from its last checkpoint, so there is nothing to tidy up and nothing to explain at length.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(config)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes from the last checkpoint in {config.run_dir}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)  # other ranks may be waiting in a collective that no longer comes
    distributed.shutdown()
    return 0


def _run(config: TrainConfig) -> None:
    with user_errors():
        agent = build_agent(config)
        folder = RunFolder(config.run_dir)
        first_step = folder.open(config, run_inputs(config, agent))
        start = Path(config.model.path) if config.model.path else _own_start(config, folder, agent)
        tokenizer = load_tokenizer(start)
        trainer = Trainer(config, folder, start, tokenizer, agent)
        trainer.resume(first_step)
    _say(f"{describe(trainer)}; writing to {folder.path}")
    if config.report.lengths:
        if not has_report(trainer, "before"):
            evaluate_policy(trainer, "before", load_model(start, config.model.dtype, distributed.device()))
    if first_step:
        _say(f"resuming after step {first_step}")
    steps = config.rl.steps
    with (
        open(os.devnull, "w") as nowhere,
        Progress(
            "train", steps, "steps", start=first_step, stream=None if distributed.rank() == 0 else nowhere
        ) as progress,
    ):

        def on_step(done: int, metrics: dict[str, float]) -> None:
            progress.set(done, reward=metrics["reward/strict"], kl=metrics.get("loss/kl", 0.0))

        trainer.train(first_step, on_step)
    trainer.export()
    _say(f"trained policy: {folder.path / 'model'} (a Hugging Face folder)")
    if config.report.lengths:
        if first_step < steps or not has_report(trainer, "after"):
            evaluate_policy(trainer, "after", trainer.replica)
        if distributed.rank() == 0:
            write_report(folder.path, config.data.max_chunks)
    trainer.engine.close()


def _own_start(config: TrainConfig, folder: RunFolder, agent: AgentConfig) -> Path:
    """The miniature's warm start: made once per run by rank 0, then a Hugging Face folder like any other."""
    from memrl.rl.warmstart import make_start

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
