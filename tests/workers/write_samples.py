"""Writes a small data set, and kills itself at a given moment of it: `write_samples.py PATH MOMENT NUMBER`.

MOMENT: "make" (at sample NUMBER), "finish", "write_table" (at row group NUMBER), "sync", "recipe", "replace", "after" (the file
is there, the journal still is), "slow" (never, but slowly), "full" (never, but no file can have more than NUMBER bytes).
"""

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memrl.data import dataset_writer as writing
from memrl.types import Sample

COUNT = 12


def make(index: int) -> Sample:
    evidence = [{"title": f"t{i}", "begin": i, "end": i + 1} for i in range(index % 3)]
    metadata = {"depths": [index % 7 / 7], "evidence": evidence, **({"late": index} if index > 5 else {})}
    match = "all" if index % 2 else "any"
    return Sample(f"s{index}", "Who?", f"document {index} \u00e9\n" * index, ("Ed", "Al"), match, metadata)


def write(path, maker=make, count=COUNT, **recipe):
    writing.write_samples(path, maker, count, {"seed": 1, **recipe}, "test")


def die(*ignored, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def arm(path: str, moment: str, number: int) -> None:
    if moment == "finish":
        writing._finish = die
    elif moment == "write_table":
        from memrl.data import columns

        class Writer(columns.pq.ParquetWriter):
            written = 0

            def write_table(self, table):
                if self.written == number:
                    die()
                self.written += 1
                super().write_table(table)

        columns.GROUP_BYTES = 1
        columns.pq.ParquetWriter = Writer
    elif moment == "sync":
        writing.sync_path = die
    elif moment == "recipe":
        writing.write_whole = die
    elif moment == "replace":
        writing.os.replace = die
    elif moment == "after":
        replace = os.replace

        def replace_and_die(source, target):
            replace(source, target)
            if str(target) == path:
                die()

        os.replace = replace_and_die
    elif moment == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


def main(path: str, moment: str, number: int) -> None:
    def maker(index):
        if moment == "make" and index == number:
            die()
        time.sleep(0.005 * (moment == "slow"))
        return make(index)

    arm(path, moment, number)
    errors = contextlib.nullcontext()
    if moment == "full":  # the only one that ends with an error; the import takes longer than the rest
        from memrl.utils.command_line import user_errors

        errors = user_errors()
    with errors:
        write(Path(path), maker, number if moment == "slow" else COUNT)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
