"""Plant one-line faults one at a time and count those that the default test suite notices.

    python benchmarks/mutations.py [--only WORDS] [--section wiring|chosen] [--jobs 2] [--out runs/mutations.jsonl]

`mutations.yaml` lists the faults: a file, the text in it and the text that replaces it. Each fault is planted in a copy of the
checkout. Tests that import the faulty file run first, then all others, and the first test that fails decides. At the end these
tests run without any fault: one that fails then has noticed nothing. A fault that no test notices is printed as SURVIVED.
Results are appended to --out as they come; the same command goes on where it was stopped.
The tables at the end are those of docs/testing.md. Exit code 1 if fewer than 90% are noticed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memrl.utils.progress import Progress

FAULTS = Path(__file__).with_suffix(".yaml")
LIMIT_S = 1200  # for all tests; a fault that makes one hang is noticed
BAR = 0.9
HANGS = "hangs"


@dataclass
class Fault:
    """A fault: `original`, which occurs once in `file`, becomes `mutated`. `tests` are tried before all others."""

    name: str
    section: str
    file: str
    original: str
    mutated: str
    tests: list[str] = field(default_factory=list)

    def plant(self, text: str) -> str:
        if text.count(self.original) != 1:
            raise ValueError(
                f"{self.name}: {self.file} holds the original text {text.count(self.original)} times; correct {FAULTS.name}"
            )
        return text.replace(self.original, self.mutated)


def read_faults() -> list[Fault]:
    sections = yaml.safe_load(FAULTS.read_text())
    faults = [Fault(section=section, **entry) for section, entries in sections.items() for entry in entries]
    for fault in faults:
        fault.plant((ROOT / fault.file).read_text())
    return faults


def near_tests(fault: Fault) -> list[str]:
    """The tests named with the fault, then the test files that import its module, those that name it most often first."""
    module = fault.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    names = {module, f"memrl.{module}"} if module.startswith("kernels") else {module}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    counts = {str(path.relative_to(ROOT)): len(pattern.findall(path.read_text())) for path in ROOT.glob("tests/test_*.py")}
    found = sorted((path for path, count in counts.items() if count), key=lambda path: -counts[path])
    return [*fault.tests, *(path for path in found if path not in fault.tests)]


def copy_checkout(folder: Path) -> Path:
    """The files that git knows, and links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    return folder


def run_tests(checkout: Path, options: list[str]) -> tuple[int, str]:
    """pytest's exit code and output; code -1 if it takes longer than LIMIT_S."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=no", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = -1
        output.seek(0)
        return code, output.read()


def failed_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def first_failure(checkout: Path, tests: list[str]) -> str | None:
    """The first test that fails, HANGS if they take too long, None if all pass."""
    code, output = run_tests(checkout, ["-x", "-n", "0", *tests])
    if code in (0, 5):  # 5: no test in the default suite
        return None
    if code == -1:
        return HANGS
    return next(iter(failed_tests(output)), f"exit code {code}: {(output.strip().splitlines() or ['no output'])[-1]}")


def try_fault(fault: Fault, checkout: Path) -> dict:
    path, began = checkout / fault.file, time.monotonic()
    original = path.read_text()
    path.write_text(fault.plant(original))
    try:
        near = near_tests(fault)
        noticed = (first_failure(checkout, near) if near else None) or first_failure(checkout, [])
    finally:
        path.write_text(original)
    return {
        "name": fault.name,
        "section": fault.section,
        "file": fault.file,
        "test": noticed,
        "seconds": time.monotonic() - began,
    }


def try_all(faults: list[Fault], jobs: int) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            free.put(copy_checkout(Path(folder) / f"checkout-{number}"))

        def one(fault: Fault) -> dict:
            checkout = free.get()
            try:
                return try_fault(fault, checkout)
            finally:
                free.put(checkout)

        yield from pool.map(one, faults)


def drop_unsound(results: Iterable[dict], jobs: int) -> None:
    """Count a fault as not noticed if its test fails on the unchanged code too, or if no test is known to have failed."""
    rows = [row for row in results if row["test"] not in (None, HANGS)]
    functions = sorted({function_of(row["test"]) for row in rows if "::" in row["test"]})
    with tempfile.TemporaryDirectory() as folder:
        code, output = run_tests(copy_checkout(Path(folder)), ["-n", str(jobs), *functions])
    if code == -1:
        raise SystemExit("error: the tests that noticed faults do not end on the unchanged code")
    unsound = set(map(function_of, failed_tests(output)))
    for row in rows:
        if "::" not in row["test"] or function_of(row["test"]) in unsound:
            row["test"] = None


def function_of(test: str) -> str:
    return test.partition("[")[0]


def print_tables(results: dict[str, dict], faults: list[Fault]) -> bool:
    """Print a table per section; returns whether each section reaches the bar."""
    reached = True
    for section in dict.fromkeys(fault.section for fault in faults):
        rows = [results[fault.name] for fault in faults if fault.section == section]
        noticed = sum(row["test"] is not None for row in rows)
        print(f"\n{section}: {noticed} of {len(rows)} faults are noticed ({noticed / len(rows):.0%})\n")
        print("| fault | file | test |\n|---|---|---|")
        for row in rows:
            print(f"| {row['name']} | {row['file']} | {row['test'] or 'SURVIVED'} |")
        reached &= noticed >= BAR * len(rows)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    parser.add_argument("--section", help="faults of this section")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at the same time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/mutations.jsonl"), help="results so far, one line each")
    arguments = parser.parse_args()
    faults = [f for f in read_faults() if arguments.only in f.name and arguments.section in (None, f.section)]
    if not faults:
        parser.error("no fault is left; correct --only or --section")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    results = {record["name"]: record for record in map(json.loads, lines)}
    left = [fault for fault in faults if fault.name not in results]
    with Progress("mutations", len(left), "faults") as progress, open(arguments.out, "a") as out:
        for record in try_all(left, arguments.jobs) if left else ():
            results[record["name"]] = record
            print(json.dumps(record), file=out, flush=True)
            progress.advance(
                noticed=sum(r["test"] is not None for r in results.values()),
                survived=sum(r["test"] is None for r in results.values()),
            )
    drop_unsound(results.values(), arguments.jobs)
    raise SystemExit(0 if print_tables(results, faults) else 1)


if __name__ == "__main__":
    main()
