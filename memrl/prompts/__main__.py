"""`python -m memrl.prompts`: prompt files from the original's repository."""

import sys
from pathlib import Path

from memrl.data.commands.options import Parser, check_out
from memrl.prompts.import_original import describe, import_prompts, prompt_file
from memrl.utils.command_line import user_errors
from memrl.utils.files import write_whole


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m memrl.prompts", description="Make prompt files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    importing = commands.add_parser(
        "import",
        help="the original MemAgent's prompts, from a copy of its repository",
        description="Reads the prompts that the original's checkpoints were trained with out of its code, without running it.",
    )
    importing.add_argument("path", type=Path, metavar="PATH", help="the repository's folder, or a Python file of it with prompts")
    importing.add_argument("--out", type=Path, metavar="FILE", help="the prompt file to write (default: standard output)")
    options = parser.parse_args(arguments)
    with user_errors():
        if options.out is not None:
            check_out(options.out, suffixes=(".yaml", ".yml"))
            if options.out.exists():
                raise ValueError(f"--out {options.out}: is there already; delete it or choose another name")
        pieces = import_prompts(options.path)
        root = options.path if options.path.is_dir() else options.path.parent
        text = prompt_file(pieces, root)
        if options.out is None:
            sys.stdout.write(text)
            return 0
        write_whole(options.out, text)
    print(f"{options.out}:", *describe(pieces, root), sep="\n  ")
    if "document" not in pieces:
        print("  no prompt of a reader who sees the whole document was found: this file serves the memory agent alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
