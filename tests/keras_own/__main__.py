"""``python -m tests.keras_own``: a table of Keras' own tests, stock and as a pipeline of two devices."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "trainers": "trainers",
    "callbacks": "callbacks",
    "rnn": "layers/rnn",
    "normalization": "layers/normalization",
    "regularization": "layers/regularization",
}
MISSING = ["missing", True, False, "the test did not end"]
KINDS = ("as stock", "refused", "differs")


def outcomes_of(folder: Path, way: str) -> dict[str, list]:
    """Runs the tests of a folder in a process of their own."""
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.json"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_OOO_KERAS_OWN": way}
        environment |= {"TF_OOO_KERAS_OWN_RESULTS": str(results)}
        options = "-q --continue-on-collection-errors -p tests.keras_own.plugin -p no:cacheprovider -W ignore"
        command = [sys.executable, "-m", "pytest", *options.split(), "--tb=short", f"--rootdir={temporary}"]
        run = subprocess.run(
            [*command, *files_of(folder)], cwd=temporary, env=environment, capture_output=True, text=True
        )
        if not results.exists():
            raise SystemExit(f"no results of {folder}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        return json.loads(results.read_text())


def files_of(folder: Path) -> list[str]:
    """Leaves out tests of other frameworks' data loaders, which are not installed."""
    left_out = ("torch", "grain", "orbax")
    return [str(f) for f in sorted(folder.rglob("*_test.py")) if not any(n in f.name for n in left_out)]


def kind_of(outcome: list) -> str:
    passed, _, refused, _ = outcome
    if refused:
        return "refused"
    return "as stock" if passed == "passed" else "differs"


def main() -> None:
    """Tests that stock Keras does not pass here, and those that call no ``fit``, are left out."""
    source = Path(importlib.util.find_spec("keras").origin).parent / "src"
    if not (source / "trainers/trainer_test.py").exists():
        raise SystemExit("the installed Keras comes without its tests")
    reasons: dict[str, list[str]] = defaultdict(list)
    print(f"| Folder | Tests that train | {' | '.join(KINDS)} |\n|{'---|' * 5}")
    for name in sys.argv[1:] or FOLDERS:
        stock, ours = (outcomes_of(source / FOLDERS[name], way) for way in ("stock", "pipeline"))
        train = [test for test, (passed, fits, *_) in stock.items() if passed == "passed" and fits]
        kinds = {test: kind_of(ours.get(test, MISSING)) for test in train}
        counts = Counter(kinds.values())
        print(f"| {name} | {len(train)} | {' | '.join(str(counts[kind]) for kind in KINDS)} |", flush=True)
        for test, kind in kinds.items():
            if kind != "as stock":
                reasons[f"{kind}: {ours.get(test, MISSING)[3]}"].append(test.rpartition("/")[2])
    for reason, tests in sorted(reasons.items(), key=lambda each: -len(each[1])):
        print(f"\n{reason}\n  {', '.join(tests)}")


if __name__ == "__main__":
    main()
