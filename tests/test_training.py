"""`train.py` as a process: it learns, it survives kill -9 bit for bit, and what it writes is what it says."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.metrics_doc import assert_documented
from tests.tiny_run import make_run
from tests.workers import train_small_disk
from tests.workers.launch import ENVIRONMENT

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SMALL_DISK = Path(train_small_disk.__file__)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    return make_run(tmp_path_factory.mktemp("training"))


def command(arguments: list[str], run_dir: Path, ranks: int = 1, script: Path = TRAIN) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(script), *arguments, "--run_dir", str(run_dir)]


def run(arguments: list[str], run_dir: Path, ranks: int = 1, **options) -> subprocess.CompletedProcess:
    environment = ENVIRONMENT | options.pop("environment", {})
    return subprocess.run(
        command(arguments, run_dir, ranks, **options), capture_output=True, text=True, timeout=240, env=environment
    )


def start(arguments: list[str], run_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(arguments, run_dir), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run(arguments, run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_run_writes_what_it_promises(uninterrupted):
    assert_documented(uninterrupted)
    metrics = read_metrics(uninterrupted)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    for record in metrics:
        # On a CPU in fp32 the sampler's log-probabilities are the trainer's up to rounding.
        assert record["rollout/logprob_diff_max"] < 1e-5
        assert 0 < record["reward/mean"] < 1
        assert record["optim/updates"] == 2
    assert metrics[0]["loss/ratio"] == pytest.approx(1.0, abs=0.05)
    assert metrics[-1]["loss/kl"] > metrics[0]["loss/kl"] >= 0, "the weights never moved away from the frozen start"
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == ["step-4", "step-6"]
    rollout = json.loads((uninterrupted / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["turns"][-1]["kind"] == "answer" and len(rollout["group_rewards"]) == 4
    assert yaml.safe_load((uninterrupted / "config.yaml").read_text())["rl"]["steps"] == 6


def test_exported_model_loads_in_transformers_with_the_trained_weights(uninterrupted):
    import torch
    from transformers import AutoModelForCausalLM

    from memrl.model import load_model, logits_of
    from memrl.tokenizer import load_tokenizer

    folder = uninterrupted / "model"
    ids = load_tokenizer(folder).encode("red stone river")
    assert len(ids) == 3
    theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    assert (theirs - logits_of(load_model(folder), ids)).abs().max() < 1e-5


def test_killed_run_resumes_bit_for_bit(arguments, uninterrupted, tmp_path):
    run_dir = tmp_path / "killed"
    process = start(arguments, run_dir)
    wait_for_lines(run_dir / "metrics.jsonl", 3, process)  # a step beyond the checkpoint after step 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_metrics(run_dir)) < 6
    resumed = run(arguments, run_dir)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resuming after step" in resumed.stdout
    check_equal_bytes(run_dir, uninterrupted)


def check_equal_bytes(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
def test_run_told_to_stop_saves_between_checkpoints_and_resumes_bit_for_bit(arguments, uninterrupted, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(arguments, run_dir)
    wait_for_lines(run_dir / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    steps = len(read_metrics(run_dir))
    assert process.returncode == 143, errors
    assert "SIGTERM: finishing step " in errors or "SIGTERM: stopping once a step is saved" in errors
    assert 2 <= steps < 6 and (run_dir / "checkpoints" / f"step-{steps}" / "model" / "model.safetensors").exists()
    resumed = run(arguments, run_dir)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"resuming after step {steps}" in resumed.stdout
    check_equal_bytes(run_dir, uninterrupted)


@pytest.mark.slow
def test_full_disk_of_one_rank_ends_the_run_in_one_line_and_one_rank_takes_it_up(arguments, uninterrupted, tmp_path):
    run_dir = tmp_path / "full"
    failed = run(arguments, run_dir, ranks=2, script=SMALL_DISK, environment={"SMALL_DISK": "1:4"})
    assert failed.returncode != 0
    [line] = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert "the checkpoint after step 4 could not be written (rank 1:" in line
    assert "Traceback" not in failed.stderr.partition("torch/distributed/elastic")[0]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2"]
    resumed = run(arguments, run_dir)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resuming after step 2" in resumed.stdout and "was saved by 2 ranks, this run has 1: weights" in resumed.stdout
    for whole, other in zip(read_metrics(uninterrupted), read_metrics(run_dir), strict=True):
        # The same questions, and the same trajectories, whose sampled tokens rounding leaves alone in so short a run.
        assert whole["step"] == other["step"] and whole["reward/mean"] == other["reward/mean"]


@pytest.mark.slow
def test_two_ranks_sample_the_same_trajectories_and_learn_the_same(arguments, uninterrupted, tmp_path):
    done = run(arguments, tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(read_metrics(uninterrupted), read_metrics(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        assert one["reward/mean"] == two["reward/mean"]
        for name in one:
            # Sampled log-probabilities agree to rounding; the maximum of rounding errors does not.
            if "logprob_diff" not in name:
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), (one["step"], name)


@pytest.mark.slow
def test_a_run_with_everything_on_resumes_bit_for_bit(tmp_path):
    rl = {
        "steps": 4,
        "loss": "gspo",
        "aggregation": "prompt_mean",
        "epochs": 2,
        "mismatch": "truncate",
        "dynamic_rounds": 2,
        "entropy_coef": 0.01,
        "overlong_buffers": {"memory": 2},
        "overlong_filter": ["answer"],
    }
    validation = {"path": str(tmp_path / "data.jsonl"), "every": 1, "repeats": 2, "temperature": 1.0, "top_p": 0.7}
    arguments = make_run(tmp_path, rl=rl, validation=validation)
    arguments += ["--model.lora_rank", "2"]
    run_dir = tmp_path / "run"
    whole = run(arguments, run_dir)
    assert whole.returncode == 0, whole.stderr[-3000:]
    names = ("metrics.jsonl", "rollouts.jsonl", "validation.jsonl", "model/model.safetensors", "best/model.safetensors")
    before = {name: (run_dir / name).read_bytes() for name in (*names, "adapter/adapter_model.safetensors")}
    shutil.rmtree(run_dir / "checkpoints" / "step-4")  # as if it had been killed in step 4
    resumed = run(arguments, run_dir)
    assert resumed.returncode == 0 and "resuming after step 2" in resumed.stdout, resumed.stderr[-3000:]
    for name, content in before.items():
        assert (run_dir / name).read_bytes() == content, name
    assert_documented(run_dir)
    assert {record["reward/replaced_groups"] > 0 for record in read_metrics(run_dir)} == {True, False}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--rl.clip_hihg", "0.3"], "rl.clip_hihg"),
        (["--rl.group_size", "1"], "at least 2"),
        (["--rollout.top_p", "0.9"], "top_p must be 1"),
        (["--model.path", "nowhere"], "nowhere is not a folder"),
        (["--data.path", "missing.jsonl"], "missing.jsonl is not a file"),
    ],
)
def test_wrong_settings_end_in_one_line_and_code_2(arguments, tmp_path, extra, words):
    # In this process: none of these gets as far as importing DeepSpeed.
    import contextlib
    import io

    from memrl.commands import train

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as exit:
        train.main([*arguments, "--run_dir", str(tmp_path), *extra])
    assert exit.value.code == 2
    assert errors.getvalue().count("\n") == 1 and words in errors.getvalue()


def test_resuming_with_other_settings_is_refused(arguments, uninterrupted):
    done = run([*arguments, "--optim.lr", "1e-3"], uninterrupted)
    assert done.returncode == 2
    assert "optim.lr: 0.005 -> 0.001" in done.stderr and done.stderr.count("\n") == 1
