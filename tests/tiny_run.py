"""The settings of a training run that takes seconds: a random model, six small documents, four questions a step."""

import json
from pathlib import Path

import yaml

from tests.tiny_folder import PROMPTS, make_folder


def make_run(folder: Path, **sections: dict) -> list[str]:
    """Write model, prompts, documents, reward and settings into `folder`; returns train.py's arguments but for the run folder.

    The reward is one that a random model earns about half of the time: whether its answer has an even number of characters.

    Args:
        sections: settings by section that replace or join those below.
    """
    make_folder(folder / "model")
    prompts = {"memory": PROMPTS.memory, "answer": PROMPTS.answer, "no_memory": PROMPTS.no_memory}
    (folder / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    lines = [
        {"question": "code name ?", "context": " ".join(["red", "stone", "."] * (3 + 2 * i)), "answers": ["red"]}
        for i in range(6)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text("def even(response, answers, metadata):\n    return float(len(response) % 2 == 0)\n")
    settings = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "data.jsonl")},
        "agent": {
            "prompts": str(folder / "prompts.yaml"),
            "chunk_tokens": 8,
            "memory_tokens": 4,
            "answer_tokens": 3,
            "question_tokens": 6,
        },
        "rollout": {"max_rows": 16},
        "reward": {"function": f"{folder / 'reward.py'}:even", "workers": 1},
        "rl": {"steps": 6, "prompts_per_step": 4, "group_size": 4, "updates_per_step": 2, "micro_batch_tokens": 200},
        "optim": {"lr": 5e-3, "warmup_updates": 2},
        "checkpoint": {"every": 2},
        "validation": {"path": str(folder / "data.jsonl")},
    }
    for name, options in sections.items():
        settings[name] = settings.get(name, {}) | options
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", str(folder / "config.yaml")]
