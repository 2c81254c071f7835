"""The command `memrl`: its list, help that loads nothing heavy, mistakes in one line, packaged settings, no DeepSpeed to read."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from memrl.__main__ import COMMANDS, DATA, PROMPTS, main
from memrl.commands import train
from memrl.utils.bounds import bounded
from memrl.utils.command_line import PACKAGED_CONFIGS, Command, argument, find_config, parse_options
from tests.tiny_folder import make_folder

REPO = Path(__file__).resolve().parent.parent
EVERY_COMMAND = [(name,) for name in COMMANDS]
EVERY_COMMAND += [("data", name) for name in DATA] + [("prompts", name) for name in PROMPTS]


def run_script(code: str, folder: Path = REPO, *arguments: str) -> subprocess.CompletedProcess:
    script = f"import sys\nsys.path.insert(0, {str(REPO)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", script, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_help_of_every_command_loads_nothing_heavy():
    script = f"""
from memrl.__main__ import main
for command in {[(), *EVERY_COMMAND]!r}:
    try:
        main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
print(*sys.modules)
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: memrl") == len(EVERY_COMMAND) + 1
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "memrl" in loaded and not loaded & {"torch", "transformers", "deepspeed", "matplotlib", "pyarrow", "openai"}


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_help_names_no_types_in_pythons_notation(command, capsys):
    try:
        main([*command, "--help"])
    except SystemExit:
        pass
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: memrl {' '.join(command)}")
    assert not any(word in printed for word in ("<class", "Literal[", "subcommand"))


def test_the_list_names_every_command(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, text] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a command: train, infer, eval, data, report, trace, curves, prompts (see memrl --help)"),
        (["trian"], "there is no command 'trian'; the commands are train, "),
        (["--version"], "there is no command '--version'"),
        (["data"], "give a command: hotpotqa, "),
        (["prompts", "export"], "there is no command 'export'; the commands are import (see memrl prompts --help)"),
        (["train", "--rl.steps", "three"], "rl.steps is 'three'; it must be a whole number (see memrl train --help)"),
        (["train", "--rl.dual_clip", "x"], "rl.dual_clip is 'x'; it must be a number"),
        (["train", "--rl.credit", "all"], "rl.credit is 'all'; it must be one of 'broadcast', 'final_only', 'split'"),
        (["train", "--data.shuffle", "maybe"], "data.shuffle is 'maybe'; it must be true or false"),
        (["trace", "x", "--out", "y", "--last", "0"], "last is 0; it must be at least 1"),
        (["data", "filter", "a", "b", "--limit", "-1"], "limit is -1; it must be at least 1, or null"),
        (["infer", "a", "-q", "b", "--model", "c", "--temperature", "nan"], "temperature is 'nan'; it must be a number"),
        (["infer", "a", "-q", "b", "--model", "c", "--temperature", ".nan"], "temperature is nan; it must be at least 0"),
        (["report", "a"], "the following arguments are required: out (see memrl report --help)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_in_words_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1


@dataclass(kw_only=True)
class Sum(Command):
    """Add whole numbers."""

    numbers: list[int] = argument("numbers", type=int, nargs="+", help="numbers to add")
    times: int = bounded(1, at_least=1)
    """Multiply the sum by this."""
    names: list[str] = argument("--names", type=str, nargs="+", default=[], help="names to print")

    def run(self) -> None:
        if self.names == ["interrupt"]:
            raise KeyboardInterrupt
        if self.names == ["wrong"]:
            raise ValueError("the name\nis wrong")
        print(sum(self.numbers) * self.times, *self.names)


def test_a_command_is_its_options_and_its_work(capsys):
    assert Sum.main(["1", "2", "--times", "3", "--names", "a", "b"], "sum") == 0
    assert capsys.readouterr().out == "9 a b\n"
    assert Sum.main(["1", "--names", "interrupt"], "sum") == 130
    with pytest.raises(SystemExit, match="2"):
        Sum.main(["1", "--names", "wrong"], "sum")
    assert capsys.readouterr().err == "error: the name is wrong\n"
    (first,), (second,) = (parse_options([Sum], ["1"], prog="sum") for _ in range(2))
    assert first == second and first.names is not second.names
    with pytest.raises(SystemExit):
        Sum.main(["--help"], "sum")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("usage: sum", "Add whole numbers.", "numbers to add", "Multiply the sum by this."))


def test_settings_files_are_found_here_first_and_then_in_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny.yaml", "configs/tiny.yaml", "configs/tiny"):
        assert find_config(name) == str(PACKAGED_CONFIGS / "tiny.yaml")
    assert find_config("memagent_0.5b") == str(PACKAGED_CONFIGS / "memagent_0.5b.yaml")
    assert find_config("configs/ablations/gspo.yaml") == str(PACKAGED_CONFIGS / "ablations" / "gspo.yaml")
    for name in ("", "nothing", "x" * 5000, "{rl: {steps: 3}}"):
        assert find_config(name) == name
    with pytest.raises(SystemExit):
        train.parse(["--config", "nothing.yaml"])
    assert capsys.readouterr().err == f"error: --config: there is no file '{tmp_path}/nothing.yaml' (see memrl train --help)\n"
    (tmp_path / "tiny.yaml").write_text("seed: 77\n")
    assert find_config("tiny.yaml") == "tiny.yaml"
    assert train.parse(["--config", "tiny.yaml"]).seed == 77
    assert train.parse(["--config=tiny", "--config=memagent_0.5b"]).run_dir == "runs/memagent_0.5b"
    assert train.parse([]) == train.parse(["--config", "configs/tiny.yaml"])


def test_reading_and_measuring_need_no_deepspeed(tmp_path):
    folder = make_folder(tmp_path / "model")
    script = f"""
sys.modules["deepspeed"] = None  # importing it fails from now on
from memrl.__main__ import main
assert main(["data", "needle", "--chunks", "2", "--out", "text.txt"]) == 0
options = ["--model", {str(folder)!r}, "--device", "cpu"]
assert main(["infer", "text.txt", "-q", "name ?", *options, "--json", "answers.json"]) == 0
assert main(["eval", *options, "--lengths", "1", "--samples", "2", "--out", "results"]) == 0
sys.exit(main(["train", "--run_dir", "run"]))
"""
    done = run_script(script, tmp_path)
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "answers.json").is_file() and (tmp_path / "results" / "summary.json").is_file()
    assert done.stderr.splitlines()[-1].startswith("error: training needs DeepSpeed: install ")
    assert not (tmp_path / "run").exists()


def test_windows_is_refused_with_the_way_out():
    done = run_script("sys.platform = 'win32'\nimport memrl")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: memrl runs on Linux and macOS; on Windows use WSL"
