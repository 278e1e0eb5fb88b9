"""The command line of scripts.mutants."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from scripts.mutants.operators import mutants_of
from scripts.mutants.running import Run, read_records, run
from scripts.mutants.tests_of import TESTS

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="plant faults, and go on where --out ends")
    running.add_argument("--out", type=Path, required=True, help="JSON lines")
    running.add_argument("--files", nargs="+", default=list(TESTS), choices=list(TESTS))
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--seconds", type=float, default=540)
    running.add_argument("--shard", default="1/1", help="i/n: every n-th mutant")
    running.add_argument("--only", type=Path, help="file of names or keys, one a line")
    running.add_argument("--again", action="store_true", help="those that survived so far")
    running.add_argument("--all-tests", action="store_true", help="of the file, not of the line")
    running.add_argument("--budget", type=float, default=40, help="seconds of tests a mutant")
    reporting = commands.add_parser("report", help="what survived")
    reporting.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args(words)
    if args.command == "report":
        return report(args.results)
    mutants = [mutant for file in args.files for mutant in mutants_of(ROOT, file)]
    if args.only:
        named = set(args.only.read_text().splitlines())
        mutants = [mutant for mutant in mutants if named & {mutant.name, mutant.key}]
    outcomes = _outcomes([args.out])
    if args.again:
        again = {key for key, record in outcomes.items() if _is_alive(record)}
        mutants = [mutant for mutant in mutants if mutant.key in again]
    elif not args.only:
        mutants = [mutant for mutant in mutants if mutant.key not in outcomes]
    share, shares = (int(word) for word in args.shard.split("/"))
    mutants = mutants[share - 1 :: shares]
    print(f"{len(mutants)} mutants", flush=True)
    asked = Run(ROOT, args.out, args.budget, args.all_tests)
    run(asked, mutants, args.workers, args.seconds)
    return report([args.out])


def equivalents() -> dict[str, str]:
    """Keys of mutants that behave like the program -> why. Checked by hand."""
    reasons = {}
    key = ""
    for line in EQUIVALENT.read_text().splitlines():
        if line.startswith("    "):
            reasons[key] = line.strip()
        elif line and not line.startswith("#"):
            key = line
    return reasons


def _outcomes(paths: list[Path]) -> dict[str, dict]:
    """The last result of every mutant, by key."""
    records = [record for path in paths for record in read_records(path)]
    return {record["key"]: record for record in records if record["kind"] == "mutant"}


def _is_alive(record: dict) -> bool:
    return record["outcome"] in ("survived", "untested")


def report(paths: list[Path]) -> int:
    """Print how many survived in each file, and which. Status 1 if any did."""
    known = equivalents()
    outcomes = _outcomes(paths)
    counts: dict[str, Counter] = {}
    alive = []
    for key, record in outcomes.items():
        kind = "equivalent" if key in known and _is_alive(record) else record["outcome"]
        file = key.partition("::")[0]
        counts.setdefault(file, Counter())[kind] += 1
        if kind in ("survived", "untested"):
            alive.append(record)
    kinds = ("killed", "timeout", "survived", "untested", "equivalent")
    print(f"{'file':50}" + "".join(f"{kind:>11}" for kind in kinds) + f"{'all':>7}")
    total: Counter = Counter()
    for file, count in sorted(counts.items()):
        total += count
        print(_row(file, count, kinds, len(mutants_of(ROOT, file))))
    print(_row("all", total, kinds, sum(total.values())))
    judged = sum(total.values()) - total["equivalent"]
    if judged:
        print(f"{len(alive) / judged:.1%} of {judged} survived")
    for record in sorted(alive, key=lambda record: record["name"]):
        print(f"\n{record['name']} {record['outcome']} {record['chosen']} tests\n  {record['key']}")
    return 1 if alive else 0


def _row(name: str, count: Counter, kinds: tuple[str, ...], total: int) -> str:
    columns = [f"{name:50}"]
    for kind in kinds:
        columns.append(f"{count[kind]:11}")
    columns.append(f"{total:7}")
    return "".join(columns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
