"""TensorBoard and Weights & Biases: the metrics of a run, for those who look at them there.

What these are told is in metrics.jsonl already, so nothing that goes wrong here ends a run.
"""

import importlib.util
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from memrl.config import LogOptions
from memrl.utils.files import write_whole

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID = "wandb_id.txt"


def check_tracking(options: LogOptions) -> None:
    """Raises ValueError where Weights & Biases is asked for and not installed."""
    if options.wandb_project is not None and not _is_installed("wandb"):
        raise ValueError(
            f"log.wandb_project is {options.wandb_project!r}, but the package wandb is not installed; pip install wandb, or "
            "leave the setting out"
        )


class Tracker:
    """Tells each of the configured trackers each metric once, also in a run that was killed and resumed. For one rank only."""

    def __init__(self, run_dir: str | Path, options: LogOptions, config: dict, first_step: int):
        """
        Args:
            config: the run's resolved settings, shown beside its metrics.
            first_step: steps that are done; what a killed run told of later ones is withdrawn, or not told again.

        Raises:
            ValueError: see `check_tracking`.
        """
        check_tracking(options)
        self._trackers: list[_TensorBoard | _WandB] = []
        if options.tensorboard:
            if not _is_installed("tensorboard"):
                _say("tensorboard is not installed, so there will be no tensorboard/ (pip install tensorboard)")
            else:
                self._open(lambda: _TensorBoard(Path(run_dir), config, first_step))
        if options.wandb_project is not None:
            self._open(lambda: _WandB(Path(run_dir), options.wandb_project, config))

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Tell the numbers among `metrics`; other values, and "step" itself, are passed over."""
        numbers = {name: float(value) for name, value in metrics.items() if name != "step" and _is_number(value)}
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _open(self, make: "Callable[[], _TensorBoard | _WandB]") -> None:
        try:
            self._trackers.append(make())
        except Exception as error:
            _say(f"a tracker could not be started, the run goes on without: {_reason(error)}")

    def _each(self, action: "Callable[[_TensorBoard | _WandB], None]") -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)  # a warning for each step to come would help nobody
                _say(f"{tracker.name} failed, the run goes on without: {_reason(error)}")


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, run_dir: Path, config: dict, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / TENSORBOARD_FOLDER
        is_new = not folder.exists()
        # Whoever reads the event files drops what earlier ones hold from this step on. Step 0 is what is known before training.
        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else 0)
        if is_new:  # readers drop numbers, but not texts
            text = yaml.safe_dump(config, sort_keys=False)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)
            self._writer.flush()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        # The checkpoint that a killed run resumes from must not know of a step that the event file has lost.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, config: dict):
        import wandb

        id_file = run_dir / WANDB_ID
        if not id_file.exists():
            write_whole(id_file, uuid.uuid4().hex[:12] + "\n")
        self._run = wandb.init(
            project=project,
            dir=str(run_dir),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            name=run_dir.resolve().name,
            config=config,
        )
        if self._run is None:
            raise RuntimeError("wandb.init gave no run")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        # Its history only grows: what it heard of a step before the run was killed stays, and is not told again.
        if step >= self._run.step:
            self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def _is_installed(package: str) -> bool:
    # A folder of that name in the working directory, such as the package itself makes, is found too, but holds no code.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
