"""Changes one place of a module at a time and looks whether its quick tests notice: ``make mutants``.

cosmic-ray makes the mutants; a seed picks some of all.  They are tried in copies of the working tree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path

from forks import Run, copy_tree, finished, forget_compiled
from sampling import Mutant, mutants_of, sample
from targets import TESTS

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "mutants"
GOAL = 0.9
# A mutant that takes so many times as long as the module itself, and some seconds, is stuck.
_TIMES_AS_LONG, _MORE_S = 6, 20
_UNCHANGED_LIMIT_S = 600
# Imported once.  Nothing of ours is, and nothing runs: a forked process needs threads of its own.
_BEFORE_FORKING = ("tensorflow", "keras", "numpy", "rustworkx", "hypothesis", "pytest")


def main() -> int:
    options = _options()
    modules = options.only or list(TESTS)
    everything = [mutant for module in modules for mutant in mutants_of(ROOT, module)]
    if options.again:
        rows = json.loads((OUT / "survivors.json").read_text())
        mutants = [Mutant(module, tuple(start), *rest) for module, start, *rest in rows]
    else:
        mutants = sample(everything, options.n, options.seed)
    print(f"{len(mutants)} of {len(everything)} mutants, seed {options.seed}", flush=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in _BEFORE_FORKING:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        first, *others = [Path(folder) / f"tree{number}" for number in range(options.jobs)]
        copy_tree(ROOT, first)
        limits_s = _unchanged(sorted({mutant.module for mutant in mutants}), first)
        for module in modules:
            forget_compiled(first / module)
        for tree in others:
            copy_tree(first, tree)
        outcomes = _changed(mutants, [first, *others], limits_s)
    survivors = [mutant for mutant in mutants if outcomes[mutant] == "passed"]
    _keep(survivors, not options.again)
    print(_table(outcomes))
    return 0 if len(survivors) <= (1 - GOAL) * len(mutants) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which of them")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", nargs="+", choices=list(TESTS), help="modules; default: all")
    parser.add_argument("--again", action="store_true", help="the survivors of the last run, once more")
    return parser.parse_args()


def _unchanged(modules: list[str], tree: Path) -> dict[str, float]:
    """The time limit of each module's tests, which have to pass as it is.  Leaves them compiled."""
    limits_s: dict[str, float] = {}
    makers = [partial(_whole_run, module) for module in modules]
    for module, (run, outcome) in zip(modules, finished(iter(makers), [tree]), strict=True):
        seconds = time.monotonic() - run.started
        if outcome != "passed":
            sys.exit(f"{module}: its tests fail as it is\n{run.log.read_text()}")
        print(f"{module}: tests take {seconds:.1f} s", flush=True)
        limits_s[module] = _TIMES_AS_LONG * seconds + _MORE_S
    return limits_s


def _whole_run(module: str, tree: Path) -> Run:
    return Run(tree, TESTS[module], _UNCHANGED_LIMIT_S, keeps_compiled=True)


def _changed(mutants: list[Mutant], trees: list[Path], limits_s: dict[str, float]) -> dict[Mutant, str]:
    outcomes: dict[Mutant, str] = {}
    mutant_in: dict[Path, Mutant] = {}

    def makers() -> Iterator[Callable[[Path], Run]]:
        for mutant in mutants:

            def make(tree: Path, mutant: Mutant = mutant) -> Run:
                (tree / mutant.module).write_text(mutant.code((ROOT / mutant.module).read_text()))
                mutant_in[tree] = mutant
                return Run(tree, TESTS[mutant.module], limits_s[mutant.module])

            yield make

    for run, outcome in finished(makers(), trees):
        mutant = mutant_in.pop(run.tree)
        source = (ROOT / mutant.module).read_text()
        (run.tree / mutant.module).write_text(source)
        outcomes[mutant] = outcome
        if outcome == "passed":
            print(f"survived, {mutant.operator}:\n{mutant.diff(source)}", flush=True)
    return outcomes


def _keep(survivors: list[Mutant], whole: bool) -> None:
    """The diffs to read; and which mutants they were, for ``--again``."""
    OUT.mkdir(parents=True, exist_ok=True)
    diffs = [mutant.diff((ROOT / mutant.module).read_text()) for mutant in survivors]
    (OUT / "survivors.diff").write_text("\n".join(diffs) + "\n")
    if whole:
        (OUT / "survivors.json").write_text(json.dumps([astuple(mutant) for mutant in survivors]))


def _table(outcomes: dict[Mutant, str]) -> str:
    """Markdown; a mutant that runs into its limit counts as killed."""
    counts = {module: Counter[str]() for module in TESTS}
    for mutant, outcome in outcomes.items():
        counts[mutant.module][outcome] += 1
    counts = {module: count for module, count in counts.items() if count}
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    lines = ["| Module | Mutants | Killed | of these by the time limit | Survived |", "|---|---|---|---|---|"]
    for module, count in rows:
        killed = count.total() - count["passed"]
        lines.append(f"| {module} | {count.total()} | {killed} | {count['timeout']} | {count['passed']} |")
    return "\n".join([*lines, f"\n{1 - rows[-1][1]['passed'] / max(1, len(outcomes)):.1%} killed"])


if __name__ == "__main__":
    sys.exit(main())
