"""The grammar that all commands share: options are dataclasses whose field docstrings are the help text.

    @dataclass
    class Check(Command):
        "Read every sample and print what the data set holds."     # the description in --help

        input: Path = argument("input", help="the data set")       # a positional argument
        tokenizer: Path | None = None                              # --tokenizer
        "Count tokens too."

Options are `--name VALUE`, checked against the field's type by jsonargparse. A mistake is one line on standard error and exit
code 2. Modules that define options must not postpone annotations: jsonargparse would import everything under TYPE_CHECKING to
resolve them, and --help would take seconds.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from memrl.utils.bounded_files import parse_yaml, read_yaml
from memrl.utils.bounds import check_options
from memrl.utils.plain_text import printable

set_parsing_settings(docstring_parse_attribute_docstrings=True)

PACKAGED_CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LONGEST_MESSAGE = 2000  # characters
MAX_VALUE, MAX_MARKS = 20_000, 500  # characters, brackets and commas of an option; real ones are lists of twenty lengths
# Types in words, by the names that jsonargparse gives them in its messages.
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list such as [1,2]"}


class HelpFormatter(DefaultHelpFormatter):
    """Help texts that name types in words, and do not repeat the choices that are shown already."""

    def _expand_help(self, action) -> str:
        text = re.sub(r"type: Literal\[[^]]*\], ", "", super()._expand_help(action))
        return text.replace("<class 'Path'>", "path").replace("type: Path", "type: path")


class Parser(ArgumentParser):
    """A jsonargparse parser that answers a mistake with one line, such as `rl.steps is 'three'; it must be a whole number`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = " ".join(message.split())
        if wrong := re.fullmatch(r'Parser key "(\S+)": (.*?)(?:Errors: .*)?(?:Got|Given) value: (.*)', message):
            name, expected, value = wrong.groups()
            choices = re.search(r"Literal\[(.*?)\]", expected)
            types = [words for kind, words in _TYPES.items() if f"<class '{kind}'>" in expected]
            message = f"{name} is {value!r}; it must be {f'one of {choices[1]}' if choices else ' or '.join(types)}"
        if missing := re.fullmatch(r'Parser key "config": File does not exist: (.*)', message):
            message = f"--config: there is no file {missing[1]}"
        fail(f"{message} (see {self.prog} --help)")


def argument(*names: str, default: Any = MISSING, **how: Any) -> Any:
    """A field of options that is not `--field VALUE`: `names` and `how` are given to argparse's `add_argument`."""
    metadata = {"names": names, "how": how if default is MISSING else {**how, "default": default}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def allow_files_flag() -> Any:
    """The field `allow_files` of options that read a data set; see `memrl.data.rows.TextFiles`."""
    words = "let `file` in the data set name files anywhere, not only below its folder; only for data sets that you trust"
    return argument("--allow_files", action="store_true", default=False, help=words)


def parse_options(
    kinds: Sequence[type],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str | None = None,
    usage: str | None = None,
    config: bool = False,
) -> list[Any]:
    """One instance of each dataclass of options in `kinds`, from the command line; a mistake ends the process.

    Args:
        arguments: None stands for those of this process.
        usage: the rest of the usage line after `prog`; None lists all options there.
        config: add `--config FILE` and `--print_config`.
    """
    parser = Parser(prog=prog, description=description, usage=usage and f"{prog} {usage}")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if config:
        parser.add_argument("--config", action="config", help="YAML file of settings; may be given several times, later ones win")
        arguments = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        pairs = zip(["", *arguments], arguments, strict=False)
        arguments = [_checked_config(word) if before == "--config" else word for before, word in pairs]
    _refuse_absurd(parser, arguments, kinds)
    for kind in kinds:
        special = [item for item in fields(kind) if "how" in item.metadata]
        for item in special:
            parser.add_argument(*item.metadata["names"], **item.metadata["how"])
        parser.add_class_arguments(kind, as_group=len(kinds) > 1, skip={item.name for item in special})
    try:
        parsed = parser.parse_args(arguments)
    except (RecursionError, ArithmeticError) as error:  # "[[[[..." or a number beyond every float as a value
        parser.error(f"a value cannot be read: {error}")
    for name, default in vars(parser.get_defaults()).items():
        if isinstance(default, Namespace) and parsed[name] is None:  # "rl:" with every line below commented out
            parser.error(f"{name} is null; give it a value or remove its line")
        if isinstance(default, Namespace) and not isinstance(parsed[name], Namespace | dict):
            parser.error(f"{name} is {parsed[name]!r}; it must hold settings, NAME: VALUE")
    settings = parser.instantiate(parsed).as_dict()
    options = [kind(**{item.name: settings[item.name] for item in fields(kind)}) for kind in kinds]
    with user_errors():
        for each in options:
            check_options(each)
    return options


@dataclass
class Command:
    """Options of a command that end in its work: the docstring is its description, `run` does it."""

    def run(self) -> None:
        raise NotImplementedError

    @classmethod
    def main(cls, arguments: Sequence[str] | None, prog: str = "memrl") -> int:
        """The exit code: 0, 130 after Ctrl-C; a mistake ends the process with 2."""
        (command,) = parse_options([cls], arguments, prog=prog, description=cls.__doc__)
        try:
            with user_errors():
                command.run()
        except KeyboardInterrupt:
            return 130
        return 0


def find_config(name: str) -> str:
    """The path of a settings file: `name` itself, or if there is no such file the packaged one (`tiny`, `configs/tiny.yaml`)."""
    if os.path.exists(name):
        return name
    packaged = PACKAGED_CONFIGS / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return str(packaged) if os.path.isfile(packaged) else name


def _refuse_absurd(parser: Parser, arguments: Sequence[str], kinds: Sequence[type]) -> None:
    """End the process if a value is too long or nested too deeply for jsonargparse, which reads every one as YAML."""
    own = {name for kind in kinds for item in fields(kind) for name in item.metadata.get("names", ())}  # not read as YAML
    for before, word in zip(["", *arguments], arguments, strict=False):
        name, _, value = word.partition("=") if "=" in word else (before, "", word)
        if not name.startswith("--") or name in own:
            continue
        marks = value.count("[") + value.count("{") + (value.count(",") if value[:1] in "[{" else 0)
        if len(value) > MAX_VALUE or marks > MAX_MARKS:
            parser.error(f"{name[2:]} is too long ({len(value)} characters); shorten it")
        if "&" in value and "*" in value:  # a short one can stand for 10^9 values
            try:
                parse_yaml(value, name[2:])
            except ValueError as error:
                parser.error(str(error))


def _checked_config(name: str) -> str:
    """As `find_config`; a file that is no YAML of settings, or an absurd one, ends the process before jsonargparse reads it."""
    path = find_config(name)
    if os.path.lexists(path):
        with user_errors():
            if not isinstance(read_yaml(path), dict | None):
                raise ValueError(f"{path} holds no settings; write one NAME: VALUE on each line")
    return path


def check_out(path: Path, inputs: Iterable[Path] = (), suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if `path` cannot be written, is one of `inputs`, or does not end in one of `suffixes` (if given)."""
    if any(path.resolve() == source.resolve() for source in inputs):
        raise ValueError(f"{path}: is an input file too; choose another name")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{path}: has to end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written; give the name of a file in a folder that you may write to")


def fail(message: str) -> NoReturn:
    """Print one line on standard error and exit with code 2: the input is wrong, and nothing was lost.

    Under torchrun only the first rank of each machine prints it.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {printable(message, LONGEST_MESSAGE)}", file=sys.stderr, flush=True)
    sys.exit(2)


def warn(message: str) -> None:
    """Print one line on standard error; the command goes on."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what bad input raises (ValueError, missing or unreadable files) into one line and exit code 2.

    MEMRL_TRACEBACK=1 shows where it came from.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("MEMRL_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            fail(f"{error.filename}: {error.strerror}")
        fail(" ".join(str(error).split()) or type(error).__name__)
    except RuntimeError as error:  # of Path.resolve before Python 3.13
        if not str(error).startswith("Symlink loop"):
            raise
        fail(f"{error}: the links lead nowhere")
