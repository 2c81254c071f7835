"""Every setting of a training run arrives: changing it alone changes what TABLE says, what follows from that, and nothing else.

A new setting needs a row, and fails here without one. The numbers that BASE (`tests/recorded_run.py`) leads to are computed by
hand in `tests/test_wiring_values.py`.
"""

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest
import torch
import yaml

from memrl.agents import AgentConfig
from memrl.agents.agent_file import FILE_NAME, load_agent
from memrl.config import TrainConfig, flatten
from memrl.engine import distributed
from memrl.model.lora import LoraLinear
from tests import test_wiring_values
from tests.recorded_run import BASE, MINIATURE, ONLY_DEFAULT, RecordedRun, make_inputs, recorded_run


@dataclass
class Row:
    """Another value of a setting, and the parts of `record` that it changes by itself.

    Attributes:
        given: settings that both runs have besides BASE, where the setting has no effect with BASE's.
    """

    value: Any
    changes: set[str]
    given: dict[str, Any] = field(default_factory=dict)


BOTH = ("", "validation ")
READING = {f"{kind}prompts" for kind in BOTH}
GENERATED = MINIATURE | {"report.lengths": [], "validation.every": 0}
START = {"start", "frozen start"}
TURNS = {"reward.function": "turn_reward.py:words", "rl.outcome_weight": 0.6, "rl.dynamic_rounds": 0}
LORA = {"model.lora_rank": 2}
TABLE: dict[str, Row | list[Row]] = {
    "run_dir": Row("another", {"run folder"}),
    "seed": [
        Row(6, {"seeds", "questions", "validation seeds"}, {"data.shuffle": True}),
        Row(4, {"seeds", "questions", "documents", "validation questions", "report documents", *START}, MINIATURE),
        Row(6, {"seeds", "validation seeds", "start"}, LORA),
    ],
    "device": Row("auto", {"device"}),
    "threads": Row(3, {"threads"}),
    "model.path": Row("other_model", {"inputs", *START}),
    "model.dtype": Row("bfloat16", {"dtype", "DeepSpeed bf16.enabled", *START}),
    "model.attention": Row("sdpa", {"attention of the sampler", "attention of training"}),
    "model.checkpoint_layers": Row(True, {"recomputed layers"}),
    "model.lora_rank": Row(2, {"adapters", "start", "reference", "frozen start"}),
    "model.lora_alpha": Row(64.0, {"adapters"}, LORA),
    "data.path": Row("tasks/other_data.jsonl", {"inputs", "questions"}),
    "data.min_chunks": Row(9, {"documents"}, GENERATED | {"data.max_chunks": 9}),
    "data.max_chunks": Row(4, {"documents", "validation documents", "trained to"}, MINIATURE),
    "data.tasks": Row(["bench_update"], {"questions", "validation questions", "report documents"}, MINIATURE),
    "data.shuffle": Row(True, {"questions"}),
    "agent.function": Row("other_agents.py:read", {"agent function", "inputs", *READING}),
    "agent.caps": Row({"check": 2}, {"agent caps", "caps", "validation caps"}),
    "agent.options": Row({"twice": True}, {"agent options", "documents", "validation documents", *READING}),
    "agent.prompts": Row("other_prompts.yaml", {"agent prompts", "inputs", *READING}),
    "agent.chunk_tokens": Row(6, {"agent chunk_tokens", "documents", "validation documents"}),
    "agent.memory_tokens": Row(5, {"agent memory_tokens", "caps", "validation caps"}),
    "agent.answer_tokens": Row(5, {"agent answer_tokens", "caps", "validation caps"}),
    "agent.question_tokens": Row(8, {"agent question_tokens"}),
    "rollout.temperature": Row(0.8, {"decoding", "weights"}),
    "rollout.top_p": Row(0.9, {"decoding"}),
    "rollout.top_k": Row(3, {"decoding"}),
    "rollout.max_rows": Row(17, {"sampler max_rows"}),
    "rollout.max_step_tokens": Row(49, {"sampler max_step_tokens"}),
    "rollout.share_prefixes": Row(True, {"sampler share_prefixes"}),
    "rollout.cache_gib": Row(0.25, {"sampler cache_gib"}),
    "reward.function": Row("other_reward.py:words", {"inputs", "reward function", "rewards", "validation scores"}),
    "reward.workers": Row(3, {"reward workers"}),
    "reward.timeout_s": Row(8.0, {"reward timeout_s"}),
    "reward.memory_gib": Row(6.0, {"reward memory_gib"}),
    "reward.on_error": Row("skip", {"reward on_error", "rewards", "validation scores", "warnings"}),
    "reward.max_failed_steps": Row(2, {"error", "checkpoints", "validation steps"}, {"reward.function": "no_reward.py:words"}),
    "reward.turns": [
        Row("memory_gain", {"turn rewards", "reward metrics", "warnings"}),
        Row("memory_gain", {"turn rewards", "reward metrics"}, TURNS),
    ],
    "rl.steps": Row(3, {"steps", "rates", "checkpoints", "validation steps"}),
    "rl.prompts_per_step": Row(3, {"questions", "rewards"}),
    "rl.group_size": Row(4, {"seeds", "rewards"}),
    "rl.updates_per_step": Row(1, {"updates", "rates", "update sizes"}),
    "rl.epochs": Row(1, {"updates", "rates", "micro-batches"}),
    "rl.baseline": Row("mean", {"advantages"}, {"rl.normalize_std": False}),
    "rl.normalize_std": Row(False, {"advantages"}),
    "rl.credit": Row("final_only", {"turn advantages"}),
    "rl.outcome_weight": Row(0.4, {"turn advantages"}, TURNS),
    "rl.turn_return": Row("to_go", {"turn advantages"}, TURNS),
    "rl.turn_discount": Row(0.5, {"turn advantages"}, TURNS | {"rl.turn_return": "to_go"}),
    "rl.loss": Row("ppo", {"weights"}),
    "rl.clip_low": Row(0.3, {"weights"}, {"rl.loss": "ppo"}),
    "rl.clip_high": Row(0.01, {"weights"}),
    "rl.dual_clip": Row(None, {"weights"}),
    "rl.kl_coef": [Row(0.5, {"weights"}), Row(0.0, {"weights", "reference", "frozen start"})],
    "rl.kl_estimator": Row("k3", {"weights"}),
    "rl.entropy_coef": Row(0.2, {"weights"}),
    "rl.aggregation": Row("seq_mean", {"weights"}),
    "rl.aggregation_tokens": Row(70, {"weights"}),
    "rl.mismatch": Row("mask", {"weights"}),
    "rl.mismatch_bound": Row(1.1, {"weights"}),
    "rl.drop_flat_groups": Row(False, {"update sizes"}, {"rl.dynamic_rounds": 0}),
    "rl.dynamic_rounds": Row(0, {"seeds", "questions", "reward metrics", "update sizes"}),
    "rl.denominator": Row("kept", {"updates", "update sizes", "rates"}),
    "rl.overlong_buffers": [Row({"memory": 2, "answer": 2}, {"penalties"}), Row({"memory": 3, "answer": 4}, {"mean penalties"})],
    "rl.overlong_penalty": Row(0.25, {"penalties"}),
    "rl.overlong_filter": Row(["answer"], {"update sizes"}),
    "rl.reference": Row("device", {"reference"}),
    "rl.micro_batch_tokens": Row(150, {"micro-batches"}),
    "warm_start.quote_steps": Row(2, START, GENERATED),
    "warm_start.teach_steps": Row(1, START, GENERATED),
    "warm_start.flaw": Row(1.0, START, GENERATED | {"warm_start.flaw": 0.0, "warm_start.batch_size": 9}),
    "warm_start.batch_size": Row(4, START, GENERATED),
    "optim.lr": Row(0.01, {"AdamW lr", "rates"}),
    "optim.min_lr_ratio": Row(0.5, {"rates"}),
    "optim.warmup_updates": Row(2, {"rates"}),
    "optim.beta1": Row(0.7, {"AdamW betas", "weights"}),
    "optim.beta2": Row(0.9, {"AdamW betas", "weights"}),
    "optim.weight_decay": Row(0.5, {"AdamW weight_decay", "weights"}),
    "optim.grad_clip": Row(100.0, {"DeepSpeed gradient_clipping", "weights"}),
    "engine.zero_stage": Row(1, {"DeepSpeed zero_optimization.stage"}),
    "engine.persistence_threshold": Row(8, {"DeepSpeed zero_optimization.stage3_param_persistence_threshold"}),
    "engine.offload_optimizer": Row(False, {"DeepSpeed zero_optimization.offload_optimizer"}),
    "engine.offload_params": Row(True, {"DeepSpeed zero_optimization.offload_param"}),
    "checkpoint.every": Row(2, {"checkpoints"}, {"checkpoint.keep_last": 9}),
    "checkpoint.keep_last": Row(2, {"checkpoints"}),
    "checkpoint.keep_best": Row(True, {"best"}),
    "validation.every": Row(1, {"validation steps"}),
    "validation.path": Row("tasks/other_validation.jsonl", {"validation questions"}),
    "validation.samples": Row(4, {"validation questions", "validation readings"}),
    "validation.repeats": Row(3, {"validation seeds", "validation readings"}),
    "validation.temperature": Row(1.1, {"validation decoding"}),
    "validation.top_p": Row(0.8, {"validation decoding"}),
    "log.rollouts": Row(2, {"logged rollouts", "tracker rollouts"}),
    "log.tensorboard": Row(True, {"tracker tensorboard"}),
    "log.flat_steps": Row(2, {"warnings", "tracker flat_steps"}, {"reward.function": "flat_reward.py:words"}),
    "log.wandb_project": Row("other", {"tracker wandb_project", "checked wandb_project"}),
    "report.lengths": Row([3, 66], {"report lengths"}, MINIATURE),
    "report.samples": Row(4, {"report lengths"}, MINIATURE),
    "report.samples_long": Row(2, {"report lengths"}, MINIATURE),
    "report.max_rows": Row(34, {"report rows"}, MINIATURE),
}
ELSEWHERE = {
    "model.miniature": test_wiring_values.test_the_miniatures_name_chooses_its_start,  # the others have other prompts
    "resume": test_wiring_values.test_resume_reaches_the_folder,  # it needs a second run
    "data.allow_files": test_wiring_values.test_files_outside_the_datas_folder_are_read_with_leave_alone,  # without it, no run
}

# What a change of one part may change in others. Every road ends at the weights and what is computed with them.
FOLLOWS: dict[str, set[str]] = {
    "weights": {"learning"},
    "learning": {"warnings"},
    "rates": {"logged rates", "weights"},
    "start": {"weights"},
    "frozen start": {"weights"},
    "adapters": {"weights"},
    "advantages": {"turn advantages"},
    "turn advantages": {"weights"},
    "turn rewards": {"turn advantages", "reward metrics"},
    "penalties": {"mean penalties"},
    "mean penalties": {"penalties", "advantages"},
    "update sizes": {"micro-batches", "weights"},
    "rewards": {"reward metrics", "advantages", "questions", "seeds", "updates", "update sizes", "rates", "penalties"},
    "prompts": {"rollout metrics", "micro-batches", "weights"},
    "documents": {"questions", "seeds", "prompts"},
    "questions": {"documents", "rewards"},
    "caps": {"prompts", "rewards"},
    "seeds": {"prompts", "rewards"},
    "steps": {"weights", "questions", "updates", "logged rollouts"},
    "logged rollouts": {"advantages", "turn advantages", "penalties"},
    "validation caps": {"validation prompts", "validation scores"},
    "validation scores": {"warnings"},
    "validation steps": {"validation questions", "validation scores"},
    "validation seeds": {"validation documents", "validation prompts", "validation scores"},
    "validation questions": {"validation documents", "validation seeds", "validation prompts", "validation scores"},
    "validation documents": {"validation questions", "validation seeds", "validation prompts", "validation scores"},
    "report lengths": {"report documents"},
}


def consequences(parts: set[str]) -> set[str]:
    """The parts, and all that may follow from them."""
    found: set[str] = set()
    waiting = set(parts)
    while waiting:
        part = waiting.pop()
        found.add(part)
        waiting |= FOLLOWS.get(part, set()) - found
    return found


def record(run: RecordedRun) -> dict[str, Any]:
    """What the run's settings reached, in named parts."""
    found: dict[str, Any] = {"run folder": run.folder.name} | run.process
    for prefix, requests in zip(BOTH, (run.requests(), run.requests(validation=True)), strict=True):
        found |= {f"{prefix}{name}": part for name, part in of_requests(run, requests).items()}
    found |= {f"sampler {name}": value for name, value in run.sampler.options.items() if name != "attention"}
    found |= {f"reward {name}": value for name, value in run.rewards.arguments.items()}
    found |= of_policy(run) | of_logs(run)
    agent = saved_agent(run)
    found |= {f"agent {name}": value for name, value in vars(agent).items()} | {"agent options": agent.options_dict()}
    return found | {f"tracker {name}": value for name, value in run.tracker.options.items()}


def saved_agent(run: RecordedRun) -> AgentConfig:
    """The agent in the trained model's folder, which names the user's file and does not run it by itself."""
    folder = run.folder / "model"
    named = yaml.safe_load((folder / FILE_NAME).read_text())["function"]
    with pytest.raises(ValueError, match=f"--agent.function {named}"):
        load_agent(folder)
    return load_agent(folder, function=named)


def of_requests(run: RecordedRun, requests: list) -> dict[str, Any]:
    prompts = [run.text_of(request.prompt_ids) for request in requests]
    params = [request.params for request in requests]
    return {
        "prompts": prompts,
        "questions": [question for question, _ in groupby(map(run.question_of, prompts))],
        "documents": len(prompts),
        "seeds": [p.seed for p in params],
        "decoding": {(p.temperature, p.top_p, p.top_k, p.min_p) for p in params},
        "caps": {p.max_new_tokens for p in params},
    }


def of_policy(run: RecordedRun) -> dict[str, Any]:
    """The policy, its optimizer and its reference."""
    engine, reference = run.engine, run.trainer.reference
    found = {f"AdamW {name}": value for name, value in engine.settings.items()}
    zero = engine.config["zero_optimization"]
    found |= {f"DeepSpeed zero_optimization.{name}": value for name, value in zero.items()}
    found |= {f"DeepSpeed {name}": value for name, value in flatten(engine.config | {"zero_optimization": None}).items()}
    frozen = getattr(reference, "frozen", getattr(reference, "model", None))
    return found | {
        "adapters": [(layer.rank, layer.alpha) for layer in engine.module.modules() if isinstance(layer, LoraLinear)],
        "attention of the sampler": run.sampler.options["attention"].name,
        "attention of training": {name for _, name in engine.forwards},
        "dtype": [engine.module.dtype, run.sampler.model.dtype],
        "frozen start": {} if frozen in (None, engine.module) else dict(frozen.named_parameters()),
        "micro-batches": [size for size, _ in engine.forwards],
        "rates": engine.rates,
        "recomputed layers": engine.module.checkpoint_layers,
        "reference": type(reference).__name__,
        "start": engine.start,
        "weights": run.weights(),
    }


def of_logs(run: RecordedRun) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in run.lines("metrics.jsonl"):
        for name, value in line.items():
            found.setdefault(part_of(name), []).append(value)
    rollouts, validations = run.lines("rollouts.jsonl"), run.lines("validation.jsonl")
    reports = [json.loads(path.read_text())["summary"] for path in sorted(run.folder.glob("report_*.json"))]
    return found | {
        "best": (run.folder / "best").exists(),
        "checkpoints": sorted(path.name for path in (run.folder / "checkpoints").iterdir()),
        "inputs": (run.folder / "inputs.json").read_text(),
        "rewards": {line["step"]: line["group_rewards"] for line in rollouts},
        "penalties": [line["penalty"] for line in rollouts],
        "advantages": [line["advantage"] for line in rollouts],
        "turn rewards": [turn["reward"] for line in rollouts for turn in line["turns"] if turn["reward"]],
        "turn advantages": [[turn["advantage"] for turn in line["turns"]] for line in rollouts],
        "logged rollouts": len(rollouts),
        "report lengths": [[(entry["length"], entry["n"]) for entry in report] for report in reports],
        "report rows": [sampler.options["max_rows"] for sampler in run.report_samplers],
        "report documents": [of_requests(run, sampler.requests)["questions"] for sampler in run.report_samplers],
        "validation steps": [line["step"] for line in validations],
        "validation scores": [line["reward"] for line in validations[:1]],
        "validation readings": [line["n"] for line in validations[:1]],
    }


def part_of(metric: str) -> str:
    """The part of `record` that a number of metrics.jsonl belongs to."""
    if metric.startswith(("loss/", "rollout/logprob", "rollout/mismatch", "optim/grad")):
        return "learning"
    section = metric.partition("/")[0]
    named = {"step": "steps", "reward/penalty": "mean penalties", "optim/lr": "logged rates"}
    sections = {"reward": "reward metrics", "rollout": "rollout metrics", "optim": "updates", "update": "update sizes"}
    return named.get(metric) or sections[section]


def differ(one: Any, other: Any) -> bool:
    """Whether two parts differ by more than rounding."""
    if type(one) is not type(other):
        return True
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(differ(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) != len(other) or any(map(differ, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype != other.dtype or not torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    return one != pytest.approx(other, rel=1e-3, abs=1e-6) if isinstance(one, float) else one != other


@pytest.fixture(scope="module")
def run_with(tmp_path_factory):
    """run_with(settings): the record of a run with BASE and these settings; those of equal settings are made once."""
    distributed.init("cpu")
    inputs, known, patch = tmp_path_factory.mktemp("inputs"), {}, pytest.MonkeyPatch()
    make_inputs(inputs)

    def run_with(settings: dict[str, Any]) -> dict[str, Any]:
        if repr(settings) not in known:
            known[repr(settings)] = record(recorded_run(patch, tmp_path_factory.mktemp("runs"), BASE | settings, inputs))
        return known[repr(settings)]

    yield run_with
    distributed.shutdown()


@pytest.mark.parametrize("name", flatten(TrainConfig().to_dict()))
def test_a_setting_changes_what_it_says_and_nothing_else(run_with, name):
    assert name in TABLE.keys() | ELSEWHERE.keys(), f"{name} is new: add a row to TABLE with another value and what it changes"
    rows = TABLE.get(name, [])
    for row in rows if isinstance(rows, list) else [rows]:
        before, after = run_with(row.given), run_with(row.given | {name: row.value})
        changed = {part for part in before.keys() | after.keys() if differ(before.get(part), after.get(part))}
        assert changed >= row.changes, f"{name} {row.value} does not change {sorted(row.changes - changed)}"
        others = changed - consequences(row.changes)
        assert not others, f"{name} {row.value} also changes {sorted(others)}"


def test_the_base_has_every_setting_off_its_default():
    defaults = flatten(TrainConfig().to_dict())
    miniature = {name for name in MINIATURE if name not in BASE}
    known = BASE.keys() | miniature | ONLY_DEFAULT
    assert defaults.keys() == known, "give a new setting a value in BASE that is not its default, or name it in ONLY_DEFAULT"
    assert not [name for name, value in (MINIATURE | BASE).items() if value == defaults[name] and name not in ONLY_DEFAULT]


def test_every_row_is_a_settings():
    assert TABLE.keys() | ELSEWHERE.keys() == flatten(TrainConfig().to_dict()).keys()
