"""The README's first command, in small: apart from the other trainings, so that it can run beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_miniature_runs_from_nothing_to_its_report(tmp_path):
    run_dir = tmp_path / "tiny"
    small = {
        "warm_start.quote_steps": 3,
        "warm_start.teach_steps": 3,
        "rl.steps": 2,
        "rl.prompts_per_step": 2,
        "rl.group_size": 2,
        "report.lengths": "[1,2,65]",
        "report.samples": 3,
        "report.samples_long": 2,
    }
    options = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--run_dir", str(run_dir), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| after RL" in done.stdout and "steps" in done.stderr
    last = done.stdout.splitlines()[-3:]
    assert [line.partition(":")[0] for line in last] == ["next"] * 3 and f"--model {run_dir}/model" in last[0]
    report = json.loads((run_dir / "report.json").read_text())
    assert [(entry["length"], entry["n"]) for entry in report["after"]] == [(1, 3), (2, 3), (65, 2)]
    assert (run_dir / "report.png").stat().st_size > 10_000
    settings = yaml.safe_load((run_dir / "model" / "memrl_agent.yaml").read_text())
    assert settings["chunk_tokens"] == 25
