"""`memrl prompts import`: write a prompt file from a copy of the original's repository."""

import sys
from dataclasses import dataclass
from pathlib import Path

from memrl.utils.command_line import Command, argument, check_out


@dataclass(kw_only=True)
class Import(Command):
    """Read the prompts that the original's checkpoints were trained with out of its code, without running it."""

    path: Path = argument("path", type=Path, metavar="PATH", help="folder of the repository, or a Python file of it with prompts")
    out: Path | None = None
    """Prompt file to write; standard output if not given."""

    def run(self) -> None:
        from memrl.prompts.import_original import describe, import_prompts, prompt_file
        from memrl.utils.files import write_whole

        if self.out is not None:
            check_out(self.out, suffixes=(".yaml", ".yml"))
            if self.out.exists():
                raise ValueError(f"--out {self.out}: is there already; delete it or choose another name")
        pieces = import_prompts(self.path)
        root = self.path if self.path.is_dir() else self.path.parent
        text = prompt_file(pieces, root)
        if self.out is None:
            sys.stdout.write(text)
            return
        write_whole(self.out, text)
        print(f"{self.out}:", *describe(pieces, root), sep="\n  ")
        if "document" not in pieces:
            print("  found no prompt that shows the whole document; this file serves the memory agent only")
