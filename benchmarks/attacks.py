"""Attack every reader and command with named and generated hostile input, and measure how each ends.

    python benchmarks/attacks.py [--seed 0] [--count 200] [--only WORDS] [--named forked|real|none] [--quick] [--json FILE]

An attack damages a folder of good inputs and runs a command of `memrl` there. It fails if there is a traceback or more than one
line of error, 10 s of CPU time or 1 GiB of memory are passed, an input file was changed, code from the folder ran or a key is
shown. The table counts by reader. Exit code 1 if any attack failed.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.attack_cases import generated, make_world
from benchmarks.attack_named import named
from benchmarks.attack_runner import Outcome, Runner, import_commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=220, help="of generated attacks")
    parser.add_argument("--only", default="", help="only attacks whose reader or name holds this")
    parser.add_argument("--named", choices=["forked", "real", "none"], default="forked", help="real: each as a fresh process")
    parser.add_argument("--quick", action="store_true", help="an eighth of the named attacks; none that trains")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    options = parser.parse_args()
    import_commands()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        world, work = Path(folder, "world"), Path(folder, "work")
        world.mkdir()
        work.mkdir()
        make_world(world, with_run=not options.quick)
        forked = Runner(world, work)
        (work / "real").mkdir()
        first = Runner(world, work / "real", real=True) if options.named == "real" else forked
        chosen = [] if options.named == "none" else list(named(options.quick))
        todo = [(first, attack) for attack in chosen[:: 8 if options.quick else 1]]
        todo += [(forked, attack) for attack in generated(options.seed, options.count, options.quick)]
        for runner, attack in todo:
            if options.only not in f"{attack.reader}: {attack.name}":
                continue
            outcome = runner.run(attack)
            outcomes.append(outcome)
            if outcome.failures:
                print(
                    f"FAILED {outcome.reader}: {outcome.name}: {'; '.join(outcome.failures)}\n  {outcome.said[-1500:]}",
                    flush=True,
                )
    print_table(outcomes)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(any(outcome.failures for outcome in outcomes))


def print_table(outcomes: list[Outcome]) -> None:
    print("| reader | attacks | refused | slowest, s of CPU | most memory, MiB | of these beyond the start | failures |")
    print("|---|---|---|---|---|---|---|")
    for reader in [*dict.fromkeys(outcome.reader for outcome in outcomes), "all"]:
        rows = [outcome for outcome in outcomes if reader in (outcome.reader, "all")]
        if rows:
            slowest, most, more = (max(getattr(row, name) for row in rows) for name in ("cpu_s", "mib", "more_mib"))
            figures = f"{slowest:.1f} | {most:.0f} | {more:.0f}"
            refused, failed = sum(row.code == 2 for row in rows), sum(bool(row.failures) for row in rows)
            print(f"| {reader} | {len(rows)} | {refused} | {figures} | {failed} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
