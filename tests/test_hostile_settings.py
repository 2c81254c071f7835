"""Every option of every command with absurd values, and absurd settings files: each is taken, or refused in one line, at once."""

import contextlib
import dataclasses
import importlib
import os
import resource
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.__main__ import COMMANDS
from memrl.commands import train
from memrl.commands.infer import InferOptions
from memrl.config import TrainConfig, validate
from memrl.data.ruler import RulerFiles
from memrl.evaluation.methods import MethodOptions
from memrl.evaluation.options import Options
from memrl.reading.open_model import ReaderOptions
from memrl.training.dry_run import dry_run
from memrl.utils import command_line
from memrl.utils.bounded_files import MAX_NODES, parse_yaml, read_yaml
from memrl.utils.command_line import Command, parse_options
from tests.tiny_folder import make_folder
from tests.tiny_run import make_run

NASTY = [
    *(
        "0",
        "-0",
        "-1",
        "1",
        "1.5",
        "1e3",
        "1e29",
        "1e308",
        "1e309",
        "-1e308",
        "5e-324",
        "nan",
        "inf",
        "-inf",
        "0x10",
        "1_0",
        "1:1:1",
    ),
    *("9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 400, "1" + "0" * 18, "1." + "0" * 400 + "1"),
    *(
        "",
        " ",
        "-",
        "--",
        "null",
        "true",
        "[]",
        "[1,2]",
        "{}",
        "{a: 1}",
        "[" * 20_000,
        "{a: " * 20_000,
        "&a [*a]",
        "*a",
        "!!python/object:os.system x",
    ),
    *(
        "\x00",
        "\x1b[31m",
        "a\nb",
        "\udcff",
        "\u202e",
        "é" * 1000,
        "/dev/zero",
        "x" * 100_000,
        "[" + "1," * 50_000 + "1]",
        "%s",
        "${HOME}",
    ),
    "[&a [x,x,x,x,x,x,x,x,x,x], "
    + ", ".join(f"&{new} [{','.join([f'*{old}'] * 10)}]" for old, new in pairwise("abcdefghi"))
    + "]",
]


def names_of(kind: type, prefix: str = "") -> list[str]:
    """The options of a class of options, without its positional arguments."""
    names = []
    for item in dataclasses.fields(kind):
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if dataclasses.is_dataclass(default):
            names += names_of(type(default), f"{item.name}.")
        elif "how" not in item.metadata:
            names.append(prefix + item.name)
    return names


def commands(listed=COMMANDS) -> list[type[Command]]:
    """The classes of the commands below `memrl data`, `report` and so on."""
    found = []
    for target, _ in listed.values():
        if not isinstance(target, str):
            found += commands(target)
        elif target.count(".") == 1:
            module, name = target.removesuffix(".main").split(":")
            found.append(getattr(importlib.import_module(f"memrl.commands.{module}"), name))
    return found


def test_every_command_is_enumerated():
    assert {kind.__name__ for kind in commands()} >= {
        "Hotpotqa",
        "Ruler",
        "Needle",
        "Filter",
        "Check",
        "Convert",
        "Report",
        "Trace",
    }


PARSED = [(TrainConfig, train.DryRun), (InferOptions, ReaderOptions), (Options, ReaderOptions, MethodOptions, RulerFiles)]
PARSED += [(kind,) for kind in commands()]


def options_of(kinds, arguments):
    """Parse and validate; None if that ends in one line on standard error and exit code 2."""
    try:
        found = parse_options(kinds, arguments, prog="test", config=True)
        if kinds[0] is TrainConfig:
            validate(found[0])
        return found
    except SystemExit as stop:
        assert stop.code == 2
    except ValueError as error:  # `user_errors` of the command makes it one line
        assert str(error)
    return None


@pytest.mark.parametrize("share", [1 / 97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", PARSED, ids=lambda kinds: kinds[0].__name__)
def test_every_option_takes_or_refuses_absurd_values_at_once(kinds, share, capsys, monkeypatch):
    # Building a parser takes 100 times longer than parsing, so one parser serves for all values.
    parsers = {}
    build = command_line.Parser
    monkeypatch.setattr(command_line, "Parser", lambda **how: parsers.setdefault("one", _Kept(build, how)))
    required = [f"--{item.name}=x" for kind in kinds for item in dataclasses.fields(kind) if is_required(item)]
    positional = ["x"] * sum(names[0][0] != "-" for kind in kinds for names in named_arguments(kind))
    positional += ["-q", "x"] if kinds[0] is InferOptions else []
    pairs = [(name, value) for kind in kinds for name in names_of(kind) for value in NASTY]
    for name, value in pairs[:: round(1 / share)]:  # 97 and the number of values share no factor, so each value is tried
        began = time.perf_counter()
        others = [word for word in required if not word.startswith(f"--{name}=")]
        options_of(kinds, [*positional, *others, f"--{name}={value}"])
        errors = capsys.readouterr().err
        assert errors.count("\n") <= 1, (name, value[:60], errors[:300])
        assert time.perf_counter() - began < 10, (name, value[:60])


class _Kept:
    """A parser that is built once: what is added to it a second time is there already."""

    def __init__(self, build, how):
        self.parser, self.is_built = build(**how), False

    def __getattr__(self, name):
        if name.startswith("add_") and self.is_built:
            return lambda *args, **kwargs: None
        if name == "parse_args":
            self.is_built = True
        return getattr(self.parser, name)


def is_required(item) -> bool:
    has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    return not has_default and "how" not in item.metadata


def named_arguments(kind) -> list[tuple[str, ...]]:
    return [item.metadata["names"] for item in dataclasses.fields(kind) if "how" in item.metadata]


# ---- settings files

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghi")
)
FILES = {
    "bomb": (BOMB, f"more than {MAX_NODES} values"),
    "alias of itself": ("rl: &a {steps: *a}", f"more than {MAX_NODES} values"),
    "deep": ("[" * 100_000, "is nested too deeply"),
    "deep maps": ("a: {" * 50_000, "is nested too deeply"),
    "deep blocks": ("- " * 50_000, "is nested too deeply"),
    "tag": ("seed: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "twice": ("rl: {steps: 1}\nrl: {steps: 2}", "the key 'rl' stands twice"),
    "base 60": ("seed: 1" + ":1" * 100_000, "a number of 200001 characters"),
    "5000 digits": ("seed: " + "9" * 5000, "a number of 5000 characters"),
    "400 digits": ("seed: " + "9" * 299, "seed is 9999"),
    "400 digits for a float": ("optim: {lr: " + "9" * 299 + "}", "optim.lr is "),
    "no settings": ("- 1", "holds no settings"),
    "text": ("hello", "holds no settings"),
    "date": ("seed: 2001-99-99", "month must be in 1..12"),
    "bytes": (b"\xff\xfe", "is not a YAML file"),
    "zero byte": ("seed: \0", "is not a YAML file"),
    "large": ("#" * 2**21, "is larger than 1 MiB"),
    "inf": ("optim: {lr: .inf}", "optim.lr is inf"),
    "nan": ("optim: {lr: .nan}", "optim.lr is nan"),
    "long list": ("report: {lengths: [" + "1," * 1500 + "1]}", "report.lengths holds 1501 values"),
    "longer list": ("report: {lengths: [" + "1," * 15_000 + "1]}", f"more than {MAX_NODES} values"),
    "number for a section": ("rl: 5", "rl is 5; it must hold settings"),
    "list for a section": ("rl: [5]", "rl"),
    "text for a section": ("rl: steps", "rl"),
    "section for a number": ("seed: {a: 1}", "seed"),
}


@pytest.mark.parametrize("name", FILES)
def test_an_absurd_settings_file_is_refused_in_one_line_at_once(name, tmp_path, capsys):
    content, message = FILES[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.perf_counter()
    with pytest.raises(SystemExit) as stop:
        train.main(["--config", str(path)])
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.count("\n") == 1 and message in errors
    assert time.perf_counter() - began < 10 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_settings_file_that_is_no_regular_file_is_refused(kind, command, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    {"pipe": os.mkfifo, "/dev/zero": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"memrl.commands.{command}").main(["--config", str(path)])
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.count("\n") == 1 and "mine.yaml" in errors


def test_the_agents_settings_of_a_model_folder_are_read_within_bounds(tmp_path):
    for file in (tmp_path / "memrl_agent.yaml", tmp_path / "prompts.yaml"):
        file.write_text(BOMB)
        with pytest.raises(ValueError, match=f"{file.name} is not a YAML file: more than"):
            read_yaml(file)
    from memrl.agents.agent_file import load_agent
    from memrl.prompts import load_prompts

    with pytest.raises(ValueError, match="more than"):
        load_agent(tmp_path)
    with pytest.raises(ValueError, match="more than"):
        load_prompts(tmp_path / "prompts.yaml")


def test_yaml_as_people_write_it_is_read():
    text = "a: &x {b: 1, c: [1.5, true, null, yes]}\nd: {<<: *x, b: 2}\ne: *x\nf: |\n  two\n  lines\n"
    inner = {"b": 1, "c": [1.5, True, None, True]}
    assert parse_yaml(text, "text") == {"a": inner, "d": inner | {"b": 2}, "e": inner, "f": "two\nlines\n"}


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.text(st.sampled_from("ab: {}[],&*-\n\t'\"|>!?#%@`1.~<"), max_size=60))
def test_any_text_is_yaml_or_one_refusal(text):
    try:
        parse_yaml(text, "text")
    except ValueError as error:
        assert str(error).startswith("text is ") and "\n" not in str(error)


# ---- to the first effect


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("absurd") / "model")


EXTREMES = ("0", "-0", "1", "5e-324", "1e30", "1000000", "65536", "1024", str(2**31 - 1), str(2**31), str(2**62), "9" * 20)


READER = [
    name for name in names_of(ReaderOptions) if name not in ("device", "agent.prompts", "threads")
]  # threads: the process's


def test_infer_reads_or_refuses_with_extremes(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("red blue green")
    arguments = [str(tmp_path / "a.txt"), "-q", "name ?", "--model", str(model), "--device", "cpu"]
    for number, name in enumerate(READER):
        for value in EXTREMES[number % 10 :: 10]:
            try:
                code = importlib.import_module("memrl.commands.infer").main([*arguments, f"--{name}={value}"])
            except SystemExit as stop:
                code = stop.code
            captured = capsys.readouterr()
            errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
            assert (code, len(errors)) in ((0, 0), (2, 1)), (name, value, captured.err)
            assert code == 2 or "failed" not in captured.out, (name, value, captured.out)


def test_the_dry_run_plans_or_refuses_with_every_extreme(tmp_path, capsys):
    config, _ = train.parse_all([*make_run(tmp_path, rl={"micro_batch_tokens": 4096}), "--dry_run"], "train")
    for number, name in enumerate(names_of(TrainConfig)):
        section, _, field = name.rpartition(".")
        options = getattr(config, section) if section else config
        before = getattr(options, field)
        for text in EXTREMES[number % 2 :: 2] if isinstance(before, int | float) and not isinstance(before, bool) else ():
            value = float(text)
            setattr(options, field, int(value) if isinstance(before, int) else value)
            try:
                validate(config)
                assert dry_run(config, None, None) in (0, 2)
            except ValueError as error:
                assert len(str(error)) < 1000, name
        setattr(options, field, before)
    for gpus, gib in (("1,1", 5e-324), ("999999", 1e6), ("9" * 400, None), ("1," * 100, None), ("1", 1e300), ("1", float("nan"))):
        with contextlib.suppress(ValueError):
            assert dry_run(config, gpus, gib) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
