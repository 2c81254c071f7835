"""Send a run's metrics to TensorBoard and Weights & Biases.

All of them are in metrics.jsonl too, so a tracker that fails is dropped with a warning and the run goes on.
"""

import importlib
import importlib.util
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from memrl.config import LogOptions
from memrl.utils.files import write_whole

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID = "wandb_id.txt"


def check_tracking(options: LogOptions) -> None:
    """Raises ValueError if log.wandb_project is set and wandb is not installed."""
    if options.wandb_project is not None and not _is_installed("wandb"):
        raise ValueError(
            f"log.wandb_project is {options.wandb_project!r}, but the package wandb is not installed; pip install wandb, or "
            "leave the setting out"
        )


class Tracker:
    """Logs each step once to every configured tracker, also in a run that was killed and resumed. For one rank only."""

    def __init__(self, run_dir: str | Path, options: LogOptions, config: dict, first_step: int):
        """Open the configured trackers.

        Args:
            config: the run's resolved settings, shown beside its metrics.
            first_step: steps that are done; later points of a killed run are purged (TensorBoard) or not logged again (W&B).
        """
        self._trackers: list[_TensorBoard | _WandB] = []
        wanted = {
            _TensorBoard: options.tensorboard and _is_installed("tensorboard"),
            _WandB: options.wandb_project is not None,
        }
        for kind in (kind for kind, is_wanted in wanted.items() if is_wanted):
            try:
                self._trackers.append(kind(Path(run_dir), options, config, first_step))
            except Exception as error:
                _warn("a tracker could not be started", error)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Log the numbers among `metrics`, except "step" itself."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, action: Callable[[Any], None]) -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn(f"{tracker.name} failed", error)


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, run_dir: Path, options: LogOptions, config: dict, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / TENSORBOARD_FOLDER
        is_new = not folder.exists()
        # Readers of the event files drop earlier points from this step on. Step 0 is the validation before training.
        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else 0)
        if is_new:  # purging does not apply to texts
            text = yaml.safe_dump(config, sort_keys=False)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)
            self._writer.flush()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        # Flushed before the step's checkpoint is saved: a resumed run must find all earlier points here.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    name = "Weights & Biases"

    def __init__(self, run_dir: Path, options: LogOptions, config: dict, first_step: int):
        wandb: Any = importlib.import_module("wandb")
        id_file = run_dir / WANDB_ID
        if not id_file.exists():
            write_whole(id_file, uuid.uuid4().hex[:12] + "\n")
        self._run = wandb.init(
            project=options.wandb_project,
            dir=str(run_dir),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            name=run_dir.resolve().name,
            config=config,
        )
        if self._run is None:
            raise RuntimeError("wandb.init returned no run")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        # Its history is append-only: steps logged before a kill stay and are not logged again.
        if step >= self._run.step:
            self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def _is_installed(package: str) -> bool:
    # A folder of that name in the working directory (such as wandb/) is found too, but has no origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _warn(what: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0].removesuffix(": ")
    print(f"warning: {what}, the run goes on without: {reason}", file=sys.stderr, flush=True)
