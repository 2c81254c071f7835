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
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jsonargparse.typing
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

if TYPE_CHECKING:
    PositiveInt = int
else:
    PositiveInt = jsonargparse.typing.PositiveInt

set_parsing_settings(docstring_parse_attribute_docstrings=True)

PACKAGED_CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# Types in words, by the names that jsonargparse gives them in its messages.
_TYPES = {
    "Path": "a path",
    "PositiveInt": "a whole number of at least 1",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list such as [1,2]",
}


class HelpFormatter(DefaultHelpFormatter):
    """Help texts that name types in words, and do not repeat the choices that are shown already."""

    def _expand_help(self, action) -> str:
        text = re.sub(r"type: Literal\[[^]]*\], ", "", super()._expand_help(action))
        return text.replace("<class 'Path'>", "path").replace("type: Path", "type: path").replace("PositiveInt", "int above 0")


class Parser(ArgumentParser):
    """A jsonargparse parser that answers a mistake with one line instead of the whole usage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=HelpFormatter, **kwargs)

    def parse_args(self, *args, **kwargs) -> Namespace:
        settings = super().parse_args(*args, **kwargs)
        for name, default in vars(self.get_defaults()).items():
            if isinstance(default, Namespace) and settings[name] is None:  # "rl:" with every line below commented out
                self.error(f"the section {name!r} is empty; give it a setting or remove its line")
        return settings

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        _, is_missing, names = message.partition("the following arguments are required: ")
        if is_missing:
            written = {action.dest: (action.option_strings or [str(action.metavar)])[-1] for action in self._actions}
            message = f"missing: {', '.join(written.get(name, name) for name in names.split(', '))}"
        fail(f"{plain_message(message)} (see {self.prog} --help)")


def plain_message(message: str) -> str:
    """jsonargparse's message as one line in words, such as `rl.steps is 'three'; it must be a whole number`."""
    message = re.sub(r'Parser key "([^"]+)"', r"\1", " ".join(message.split()))
    wrong = re.fullmatch(r"(\S+): (.*?)(?:Got|Given) value: (.*)", message)
    if wrong is None:
        return re.sub(r"(\S+): Not of type (\w+): (\S+) .*", lambda m: f"{m[1]} is {m[3]!r}; it must be {_TYPES[m[2]]}", message)
    choices = re.search(r"Literal\[(.*?)\]", wrong[2])
    types = re.findall(r"<class '(?:[\w.]+\.)?(\w+)'>", wrong[2].partition("Errors:")[0])
    words = [_TYPES.get(str(name), str(name)) for name in types if name != "NoneType"]
    return f"{wrong[1]} is {wrong[3]!r}; it must be {f'one of {choices[1]}' if choices else ' or '.join(words)}"


def argument(*names: str, default: Any = MISSING, **how: Any) -> Any:
    """A field of options that is not `--field VALUE`: `names` and `how` are given to argparse's `add_argument`."""
    metadata = {"names": names, "how": how if default is MISSING else {**how, "default": default}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_options(
    kinds: Sequence[type],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str | None = None,
    usage: str | None = None,
    config: bool = False,
) -> list[Any]:
    """One instance of each dataclass of options in `kinds`, from the command line.

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
        arguments = [find_config(word) if before == "--config" else word for before, word in pairs]
    for kind in kinds:
        special = [item for item in fields(kind) if "how" in item.metadata]
        for item in special:
            parser.add_argument(*item.metadata["names"], **item.metadata["how"])
        parser.add_class_arguments(kind, as_group=len(kinds) > 1, skip={item.name for item in special})
    settings = parser.instantiate(parser.parse_args(arguments)).as_dict()
    return [kind(**{item.name: settings[item.name] for item in fields(kind)}) for kind in kinds]


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


def dispatch(prog: str, description: str, commands: Mapping[str, tuple[str, str]], arguments: Sequence[str] | None) -> int:
    """Run the command that the first argument names; only its module is imported.

    Args:
        commands: for each name a function (arguments, prog) -> exit code, as `module:function` in `memrl.commands`, and its help.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands:
        main = pkgutil.resolve_name(f"memrl.commands.{commands[arguments[0]][0]}")
        return main(arguments[1:], f"{prog} {arguments[0]}")
    names = ", ".join(commands)
    if not arguments:
        fail(f"give a command: {names} (see {prog} --help)")
    if arguments[0] not in ("-h", "--help"):
        fail(f"there is no command {arguments[0]!r}; the commands are {names} (see {prog} --help)")
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items())
    print(f"usage: {prog} COMMAND ...\n\n{description}\n\ncommands:\n{listed}\n\n{prog} COMMAND --help explains one of them.")
    return 0


def find_config(name: str) -> str:
    """The path of a settings file: `name` itself, or if there is no such file the packaged one (`tiny`, `configs/tiny.yaml`)."""
    if os.path.exists(name):
        return name
    packaged = PACKAGED_CONFIGS / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return str(packaged) if os.path.isfile(packaged) else name


def check_out(path: Path, inputs: Iterable[Path] = (), suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if `path` is in no folder, is one of `inputs`, or does not end in one of `suffixes` (if given)."""
    if any(path.resolve() == source.resolve() for source in inputs):
        raise ValueError(f"--out {path}: is an input file too; choose another name")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"--out {path}: has to end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")


def fail(message: str) -> NoReturn:
    """Print one line on standard error and exit with code 2: the input is wrong, and nothing was lost.

    Under torchrun only the first rank of each machine prints it.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


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
