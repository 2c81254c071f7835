"""`train.py --dry_run`: the table, the exit code, the advice, and that it needs neither weights nor a GPU."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memrl.training.dry_run import DEFAULT_GPU_GIB, _changed, find_fixes, longest_tokens, parse_gpus
from memrl.training.memory_plan import GIB, count_sizes, plan_memory, weights_dtype

REPO = Path(__file__).resolve().parent.parent
SEVEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FOURTEEN = SEVEN | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


@pytest.fixture(scope="module")
def train():
    from memrl.commands import train

    return train


@pytest.fixture
def seven(tmp_path) -> Path:
    return model_folder(tmp_path / "7b", SEVEN)


@pytest.fixture
def fourteen(tmp_path) -> Path:
    return model_folder(tmp_path / "14b", FOURTEEN)


def model_folder(path: Path, raw: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    return path


def arguments(folder: Path, config: str, *more: str) -> list[str]:
    return ["--config", str(REPO / "configs" / f"{config}.yaml"), "--model.path", str(folder), "--dry_run", *more]


def verdicts(text: str) -> dict[int, str]:
    return {int(count): rest for count, rest in re.findall(r"^ *(\d+) GPUs?: (.*)$", text, re.M)}


# What is printed


def test_the_table_has_every_component_for_each_number_of_gpus(train, seven, capsys):
    assert train.main(arguments(seven, "memagent_7b")) == 0
    text = capsys.readouterr().out
    assert "7,615,616,512 parameters" in text and "not measured on a GPU" in text
    for part in ("weights", "masters", "Adam moments", "gradients", "replica", "key/value cache", "activations kept"):
        row = next(line for line in text.splitlines() if line.startswith(f"  {part}"))
        assert len(row.split()[-3:]) == 3 and all(re.fullmatch(r"[\d.]+|-", cell) for cell in row.split()[-3:])
    of_gpu = text.partition("CPU memory")[0]
    rows = {line[:40].strip(): line[40:].split() for line in of_gpu.splitlines()}
    # 2, 4, 8 and 4 bytes of 7,615,616,512 weights, shared out.
    assert rows["masters"] == ["28.4", "3.5", "0.9"] and rows["Adam moments"] == ["56.7", "7.1", "1.8"]
    assert rows["replica"] == ["14.2"] * 3 and rows["reference"] == ["-"] * 3  # waits in CPU memory
    assert list(verdicts(text)) == [1, 8, 32]


def test_the_table_is_that_of_the_plan(train, seven, capsys):
    options = arguments(seven, "memagent_7b", "--dry_gpus", "5")
    train.main(options)
    text = capsys.readouterr().out
    config = train.parse(options)
    plan = plan_memory(config, count_sizes_of(config), 5)
    assert verdicts(text) == {5: f"fits: {plan.peak / GIB:.1f} of 79.1 GiB"}
    of_gpu = text.partition("CPU memory")[0]
    rows = {line[:40].strip(): line[40:].strip() for line in of_gpu.splitlines()}
    for part in (plan.always, plan.sampling, plan.backward, plan.step):
        for name, size in part.items():
            assert rows[name] == (f"{size / GIB:.1f}" if size else "-")


def count_sizes_of(config):
    from memrl.model import read_config

    return count_sizes(read_config(config.model.path), weights_dtype(config.model), config.model.lora_rank)


def test_without_a_tokenizer_the_prompt_is_estimated_and_the_output_says_so(train, seven, capsys):
    config = train.parse(arguments(seven, "memagent_7b"))
    train.main(arguments(seven, "memagent_7b"))
    assert f"estimated, since {seven} holds no tokenizer" in capsys.readouterr().out
    # Question, memory, section and new memory, and some words around them.
    limits = 1024 + 1024 + 5000 + 1024
    assert limits + 50 < longest_tokens(config.agent, str(seven), 10**6)[0] < limits + 300


def test_with_a_tokenizer_the_longest_turn_is_the_runs_own(train, tmp_path):
    from memrl.agents.limits import longest_turn
    from memrl.training.inputs import build_agent
    from tests.tiny_folder import make_folder, make_tokenizer

    config = train.parse(arguments(make_folder(tmp_path / "model"), "memagent_7b"))
    longest, source = longest_tokens(config.agent, config.model.path, 10**6)
    assert longest == longest_turn(make_tokenizer(), build_agent(config.agent)) and "folder's tokenizer" in source


def test_the_estimate_of_the_prompt_is_near(train, seven, shared_data):
    from memrl.agents.limits import longest_turn
    from memrl.tokenizer import load_tokenizer
    from memrl.training.inputs import build_agent

    config = train.parse(arguments(seven, "memagent_7b"))
    exact = longest_turn(load_tokenizer(shared_data / "tokenizer" / "qwen2.5-instruct"), build_agent(config.agent))
    assert longest_tokens(config.agent, config.model.path, 10**6)[0] == pytest.approx(exact, rel=0.02)


# Exit codes and refusals


def test_the_exit_code_says_whether_it_fits_anywhere(train, fourteen, capsys):
    assert train.main(arguments(fourteen, "memagent_14b", "--dry_gpus", "1,8")) == 2
    found = verdicts(capsys.readouterr().out)
    assert all(re.match(r"does not fit: [\d.]+ of 79\.1 GiB; it would with ", line) for line in found.values())
    assert train.main(arguments(fourteen, "memagent_14b", "--dry_gpus", "1,16")) == 0
    found = verdicts(capsys.readouterr().out)
    assert found[1].startswith("does not fit") and found[16].startswith("fits")


def test_the_size_of_a_gpu_is_an_option(train, seven, capsys):
    assert train.main(arguments(seven, "memagent_7b", "--dry_gpus", "8", "--gpu_gib", "40")) == 2
    assert " of 40 GiB" in capsys.readouterr().out
    assert train.main(arguments(seven, "memagent_7b", "--dry_gpus", "8", "--gpu_gib", "139")) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dry_gpus", "1,many"], "dry_gpus is '1,many'; it must be at most 64 numbers of GPUs below a million"),
        (["--dry_gpus", "0"], "dry_gpus is '0'"),
        (["--gpu_gib", "-1"], "gpu_gib is -1.0; it must be positive"),
        (["--rollout.cache_gib", "0.1"], "rollout.cache_gib = 0.1 has room for"),
        (["--rl.micro_batch_tokens", "4096"], "rl.micro_batch_tokens is 4096"),
        (["--model.path", "nowhere"], "nowhere does not exist"),
        (["--rl.group_size", "1"], "rl.group_size is 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(train, seven, capsys, more, message):
    with pytest.raises(SystemExit) as ended:
        train.main(arguments(seven, "memagent_7b", *more))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_miniature_has_no_dry_run(train, capsys):
    with pytest.raises(SystemExit):
        train.main(["--dry_run"])
    assert "give --model.path DIR" in capsys.readouterr().err


def test_options_of_the_dry_run_alone_are_refused(train, capsys):
    with pytest.raises(SystemExit):
        train.main(["--gpu_gib", "40"])
    assert "add --dry_run" in capsys.readouterr().err


def test_numbers_of_gpus_are_read_from_text():
    assert parse_gpus("1, 8,32") == [1, 8, 32]
    for text in ("", "1,,2", "2.5", "-1"):
        with pytest.raises(ValueError, match="numbers of GPUs"):
            parse_gpus(text)


# Advice


@pytest.mark.parametrize("config_name", ["memagent_7b", "memagent_14b"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_is_advised_fits_and_less_does_not(train, tmp_path, config_name, count):
    folder = model_folder(tmp_path / "model", SEVEN if "7b" in config_name else FOURTEEN)
    config = train.parse(arguments(folder, config_name))
    sizes, longest = count_sizes_of(config), longest_tokens(config.agent, config.model.path, 10**6)[0]

    def fits(change: dict) -> bool:
        changed = _changed(config, change)
        plan = plan_memory(changed, count_sizes_of(changed), count)
        return plan.peak <= DEFAULT_GPU_GIB * GIB

    before = copy.deepcopy(config)
    fixes = find_fixes(config, sizes, longest, count, DEFAULT_GPU_GIB)
    assert config == before
    if fits({}):
        return
    assert fixes
    for fix in fixes:
        assert fits(fix)
        for key in fix:
            assert not fits({other: value for other, value in fix.items() if other != key})


def test_a_run_that_no_setting_makes_fit_gets_other_advice(train, fourteen, capsys):
    assert train.main(arguments(fourteen, "memagent_14b", "--gpu_gib", "24")) == 2
    assert all("take more GPUs or a smaller model" in line for line in verdicts(capsys.readouterr().out).values())


# The configurations that come with memrl


@pytest.mark.parametrize(
    ("config_name", "raw", "count", "fits"),
    [
        ("memagent_7b", SEVEN, 8, True),
        ("memagent_7b", SEVEN, 1, False),
        ("memagent_7b_lora", SEVEN, 1, True),
        ("memagent_14b", FOURTEEN, 16, True),
        ("memagent_14b", FOURTEEN, 8, False),
    ],
)
def test_a_configuration_fits_where_its_comment_says(train, tmp_path, config_name, raw, count, fits):
    config = train.parse(arguments(model_folder(tmp_path / "model", raw), config_name))
    plan = plan_memory(config, count_sizes_of(config), count)
    assert (plan.peak <= DEFAULT_GPU_GIB * GIB) == fits
    if config_name == "memagent_14b" and not fits:
        assert plan_memory(_changed(config, {"engine.offload_optimizer": True}), count_sizes_of(config), count).peak < 79 * GIB


# What it does not need


def test_help_needs_no_torch_and_the_options_are_no_settings_of_the_run(train, seven):
    code = "import sys, train\ntry:\n    train.main(['--help'])\nfinally:\n    print(sorted({'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert "--dry_run" in done.stdout and done.stdout.endswith("[]\n"), done.stderr
    settings = train.parse(arguments(seven, "memagent_7b", "--gpu_gib", "40")).to_dict()
    assert not {"dry_run", "dry_gpus", "gpu_gib"} & set(settings)
    assert "dry_run" not in yaml.safe_dump(settings)
