"""Print a training run: a table with one row per step, and at the end the commands to continue with.

    with StepTable(total=400, start=0) as table:
        table.row(1, metrics, seconds)

        step  reward   valid        kl  grad norm  tokens   tok/s  s/step      left
       1/400   0.542       -     0.149      0.124     3.7   2,140     1.9   0:12:36

A terminal gets a row for every step, above a bar; a log file gets a row every ten seconds at most, and the last one.
"""

import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from memrl.config import TrainConfig, flatten
from memrl.utils.progress import EVERY_SECONDS, Progress, format_seconds

# Title, width, metric, format.
_COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("reward", 6, "reward/mean", "{:.3f}".format),
    ("valid", 6, "validation/reward", "{:.3f}".format),
    ("kl", 8, "loss/kl", "{:.3g}".format),
    ("grad norm", 9, "optim/grad_norm", "{:.3g}".format),
    ("tokens", 6, "rollout/response_tokens", "{:.1f}".format),
    ("tok/s", 7, "tokens_per_s", "{:,.0f}".format),
    ("s/step", 6, "step_s", "{:.1f}".format),
    ("left", 8, "seconds_left", format_seconds),
)


class StepTable(Progress):
    """Prints the main metrics of each step, named as in `docs/metrics.md`, and the time left at this process's pace."""

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic):
        # Without a terminal the progress prints no lines of its own, except the last one, which has the total time.
        super().__init__("train", total, "steps", start=start, stream=stream, every=math.inf, clock=clock)
        self._steps = total
        self._step_width = max(len("step"), 2 * len(str(total)) + 1)
        self._last_row, self._waiting = -math.inf, ""
        self._validation: float | None = None

    def __exit__(self, *exception: object) -> None:
        if self._waiting:
            self._print_row(self._waiting)
        super().__exit__(*exception)

    def row(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float | None]) -> None:
        """Show a finished step.

        Args:
            step: steps done, this one included.
            metrics: the step's record of metrics.jsonl, with "validation/reward" if there was a validation; its column keeps
                the latest score. Missing values and None are shown as a dash.
            seconds: "step_s" and "tokens_per_s" of timing.jsonl.
        """
        self.set(step)
        if metrics.get("validation/reward") is not None:
            self._validation = metrics["validation/reward"]
        values = {**metrics, **seconds, "validation/reward": self._validation, "seconds_left": self.seconds_left}
        cells = [f"{step}/{self._steps}".rjust(self._step_width)]
        for _, width, name, show in _COLUMNS:
            value = values.get(name)
            cells.append(("-" if value is None else show(value)).rjust(width))
        line = "  ".join(cells)
        if self.bar is not None or self._clock() - self._last_row >= EVERY_SECONDS:
            self._print_row(line)
        else:
            self._waiting = line

    def _print_row(self, line: str) -> None:
        if math.isinf(self._last_row):
            titles = (title.rjust(width) for title, width, _, _ in _COLUMNS)
            self.log("  ".join(("step".rjust(self._step_width), *titles)))
        self.log(line)
        self._last_row, self._waiting = self._clock(), ""


def command_name() -> str:
    """How to call memrl with this Python: by the installed command, or in a checkout as a module."""
    python, here = Path(sys.executable), Path.cwd()
    command = python.with_name("memrl")
    if command.is_file() and shutil.which("memrl") == str(command):
        return "memrl"
    program = command if command.is_file() else python
    shown = shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))
    return shown if program == command else f"{shown} -m memrl"


# What others who rebuilt the original's run most often had different, with its values.
_RECIPE = {
    "reward.function": None,
    "rl.kl_coef": 0.001,
    "rl.clip_low": 0.2,
    "rl.clip_high": 0.2,
    "rl.normalize_std": False,
    "rollout.top_p": 1.0,
}


def recipe_line(config: TrainConfig) -> str:
    """Which of the settings that matter most differ from the original's 7B run: exact-match reward, KL, clips, std and top_p."""
    settings = flatten(config.to_dict())
    wanted = {name: "the exact match" if value is None else value for name, value in _RECIPE.items()}
    differ = [f"{name} {settings[name]} (original: {wanted[name]})" for name in _RECIPE if settings[name] != _RECIPE[name]]
    if differ:
        return f"differs from the original's recipe: {', '.join(differ)}"
    return "as in the original's recipe: exact-match reward, KL 0.001, clip 0.2/0.2, no division by the std, top_p 1"


def next_commands(config: TrainConfig, memrl: str = "memrl") -> list[str]:
    """Commands that use a finished run: read a document with its model, evaluate the model, and show its rollouts.

    Args:
        memrl: the first words of each command.
    """
    run, own = Path(config.run_dir), config.agent.function
    # A user's file is run only if the command names it.
    model = shlex.quote(str(run / "model")) + (f" --agent.function {shlex.quote(own)}" if ":" in own else "")
    task: str | None
    if config.model.path is not None:
        read, task = f'{memrl} infer FILE.txt -q "QUESTION"', shlex.quote(config.validation.path or "QUESTIONS.jsonl")
    elif config.data.tasks == ["needle"]:
        read = f'{memrl} data needle --chunks 512 --seed 1 --out needle.txt && {memrl} infer needle.txt -q "code emma"'
        task = "needle --lengths 1,8,64,512"
    else:  # no command writes one of these documents
        read, task = None, None
        if any(name.startswith("bench") for name in config.data.tasks):
            task = f"bench --methods {shlex.quote(own)},one_shot,oracle,chance"
    commands = [f"{read} --model {model}"] if read else []
    if task is not None:
        commands.append(f"{memrl} eval --model {model} --task {task}")
    if config.log.rollouts:
        rollouts, page = (shlex.quote(str(run / name)) for name in ("rollouts.jsonl", "rollouts.html"))
        commands.append(f"{memrl} trace {rollouts} --out {page}")
    return commands
