"""A run is its model, its documents and its reward function too: another one of them is another run."""

import json

import pytest

from memrl.agents import AgentConfig
from memrl.config import TrainConfig
from memrl.engine import distributed
from memrl.training.inputs import run_inputs
from memrl.training.same_run import check_same_run
from memrl.utils.files import write_whole
from memrl.utils.user_file import imported_files
from tests.tiny_folder import PROMPTS, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_folder(folder / "model")
    (folder / "tower.txt").write_text("red stone")
    rows = [{"question": "?", "file": "tower.txt", "answers": "red"}, {"question": "?", "context": '"file"', "answers": "x"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("import json\ndef judge(r, a, m):\n    from helper import judge\n    return judge(r)\n")
    (folder / "helper.py").write_text("from package.deep import judge\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "deep.py").write_text("def judge(response):\n    return 1.0\n")
    (folder / "unrelated.py").write_text("raise SystemExit\n")
    return folder


def inputs_of(folder) -> dict[str, str]:
    config = TrainConfig()
    config.model.path, config.data.path = str(folder / "model"), str(folder / "data.jsonl")
    config.reward.function = f"{folder / 'reward.py'}:judge"
    return run_inputs(AgentConfig(PROMPTS, 8, memory_tokens=4, answer_tokens=3, question_tokens=6), config)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model/model.safetensors", "weights"),
        ("model/config.json", "weights"),
        ("model/tokenizer.json", "tokenizer"),
        ("model/chat_template.jinja", "tokenizer"),
        ("model/generation_config.json", "tokenizer"),
        ("tower.txt", "documents"),
        ("reward.py", "reward"),
        ("helper.py", "reward_modules"),
        ("package/deep.py", "reward_modules"),
        ("unrelated.py", None),
        ("model/README.md", None),
    ],
)
def test_one_changed_byte_of_any_input_is_another_run_and_the_input_is_named(folder, tmp_path, name, part):
    before, file = inputs_of(folder), folder / name
    content = file.read_bytes() if file.exists() else None
    try:
        file.write_bytes((content or b"text")[:-1] + b"\t")  # of the same size
        after = inputs_of(folder)
    finally:
        file.unlink() if content is None else file.write_bytes(content)
    assert [key for key in before if before[key] != after[key]] == [part] * (part is not None)
    write_whole(tmp_path / "config.yaml", "{}")
    write_whole(tmp_path / "inputs.json", json.dumps(before))
    settings = TrainConfig().to_dict()
    check_same_run(tmp_path, settings | {"inputs": before})
    if part is not None:
        with pytest.raises(ValueError, match=rf"other settings \(inputs\.{part}: {before[part]} -> {after[part]}\)"):
            check_same_run(tmp_path, settings | {"inputs": after})


def test_a_run_of_an_earlier_version_goes_on_and_says_what_is_not_compared(folder, tmp_path, capsys):
    inputs = inputs_of(folder)
    write_whole(tmp_path / "config.yaml", "{}")
    write_whole(tmp_path / "inputs.json", json.dumps({name: inputs[name] for name in ("prompts", "data", "reward")}))
    check_same_run(tmp_path, TrainConfig().to_dict() | {"inputs": inputs})
    [line] = capsys.readouterr().err.splitlines()
    assert "did not record these inputs: documents, reward_modules, tokenizer, weights; they are not compared" in line
    write_whole(tmp_path / "inputs.json", "{}")  # no version wrote that
    with pytest.raises(ValueError, match=r"inputs\.prompts: None -> "):
        check_same_run(tmp_path, TrainConfig().to_dict() | {"inputs": inputs})


def test_a_reward_function_beside_memrl_does_not_make_memrl_an_input(tmp_path):
    (tmp_path / "memrl").mkdir()
    (tmp_path / "memrl" / "__init__.py").write_text("")
    (tmp_path / "reward.py").write_text("import memrl\nimport os, numpy, missing\n")
    assert imported_files(tmp_path / "reward.py") == []


def test_one_rank_of_a_machine_reads_for_all_of_it(monkeypatch):
    monkeypatch.setattr(distributed, "gather_lists", lambda items: [("0", "here"), *items] if items != [("0", "here")] else items)
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.once_per_machine(lambda: pytest.fail("read twice")) == "here"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert distributed.once_per_machine(lambda: "here") == "here"
