"""Everything to find out on a GPU machine, in three commands of at most ten minutes.

``python -m tf_ooo.bench.gpu_day --out DIR --command 1`` (then 2, 3).  Each part is a process with a limit
of its own; one that fails is noted and the next runs.  DIR has few files, written after each part, so a
command may be stopped at any time: ``rows_N.json``, ``overlap_N.json``, ``parts_N.json``, ``log_N.txt``.
``--dry`` does the same with tiny networks and single steps, on a machine without a GPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_ooo.bench.single.networks import NETWORKS, SMALL

BEST = (("densenet121-k12", 32), ("mobilenetv3l-a0.5", 32))
_TESTS = "TestHlo or TestMemoryLimit or TestMeasured or TestTwoUpdates or (TestNumbers and convolutions)"
_FILES = ("tests/graph/test_xla.py", "tests/graph/test_xla_gains.py", "tests/graph/test_xla_steps.py")


@dataclass(frozen=True)
class Part:
    """One process: arguments of Python, limit in seconds, and the file of rows that it writes."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    rows: str = "rows"


def _bench(network: str, batch: int, limit_s: float, *more: str) -> Part:
    name = " ".join((network, f"batch {batch}", *(text for text in more if text != "--data"))).strip()
    what = ("-m", "tf_ooo", "bench", "single", "--networks", network, "--batches", str(batch))
    return Part(name, (*what, "--make-s", f"{limit_s * 0.6:.0f}", *more), limit_s)


def _overlap(network: str, batch: int) -> Part:
    what = ("-m", "tf_ooo.bench.single.overlap", "--network", network, "--batch", str(batch))
    return Part(f"overlap {network}", what, 85, "overlap")


def parts(command: int) -> list[Part]:
    """What a command does, what decides most first."""
    first = {network for network, _ in BEST}
    rest = [name for name in NETWORKS if name not in SMALL and name not in first]
    if command == 1:
        targets = [_bench(network, batch, 200, "--all-ways") for network, batch in BEST]
        return [*targets, *(_overlap(*best) for best in BEST)]
    if command == 2:
        tests = Part("tests", ("-m", "pytest", "-q", *_FILES, "-k", _TESTS), 200, "")
        real = [_bench(network, batch, 150, "--quick", "--data", "real") for network, batch in BEST[:1]]
        large = _bench(BEST[0][0], 32, 200, "--quick", "--size", "224")
        others = [_bench(network, 32, 150, "--quick", "--rounds", "5") for network in rest]
        auto = [_bench(network, batch, 240, "--ways", "xla", "fit", "auto") for network, batch in BEST[:1]]
        return [*auto, tests, large, *real, *others]
    return [
        _bench(network, batch, 150, "--quick", "--rounds", "5")
        for batch in (128, 16, 64, 256)
        for network in (*sorted(first), *rest)
    ]


def dry(command: int) -> list[Part]:
    """The same kinds of parts, as small as they can be."""
    few = ("--rounds", "1", "--steps", "1")
    small = ("-m", "tf_ooo", "bench", "single", "--batches", "2", *few, "--networks")
    if command == 1:
        overlap = (
            "-m",
            "tf_ooo.bench.single.overlap",
            "--network",
            "lstm-small",
            "--batch",
            "2",
            "--steps",
            "1",
        )
        return [
            Part("lstm-small", (*small, "lstm-small", "--all-ways"), 600),
            Part("overlap lstm-small", overlap, 200, "overlap"),
        ]
    if command == 2:
        tests = ("-m", "pytest", "-q", *_FILES, "-k", "(TestMemoryLimit and runs) or TestMeasured")
        real = (*small, "densenet-small", "--quick", "--data", "real", "--size", "9")
        fits = (*small, "lstm-small", "--ways", "xla", "fit", "auto")
        return [
            Part("lstm-small fit", fits, 400),
            Part("tests", tests, 200, ""),
            Part("densenet-small real", real, 400),
        ]
    return [Part("lstm-small", (*small, "lstm-small", "--quick"), 300)]


def run(out: Path, command: int, todo: Sequence[Part], budget_s: float) -> list[dict[str, Any]]:
    """Runs the parts until the budget is spent; returns what became of each."""
    out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    rows: dict[str, list[Any]] = {}
    end_s = time.monotonic() + budget_s
    with (out / f"log_{command}.txt").open("w") as log:
        for part in todo:
            left_s = end_s - time.monotonic()
            if left_s < 30:
                done.append({"part": part.name, "result": "not run: the time is spent"})
                continue
            print(f"===== {part.name}", file=log, flush=True)
            done.append(_run(part, min(part.limit_s, left_s), rows, log))
            print(f"{part.name}: {done[-1]['result']}", flush=True)
            for name, found in rows.items():
                (out / f"{name}_{command}.json").write_text(json.dumps(found, indent=1) + "\n")
            _write(out, command, done)
    _write(out, command, done)
    return done


def _write(out: Path, command: int, done: list[dict[str, Any]]) -> None:
    (out / f"parts_{command}.json").write_text(json.dumps(done, indent=1) + "\n")


def _run(part: Part, limit_s: float, rows: dict[str, list[Any]], log: Any) -> dict[str, Any]:
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        more = ("--json", str(file)) if part.rows else ()
        process = subprocess.Popen(
            [sys.executable, *part.arguments, *more], stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
            result = "done" if code == 0 else f"failed with {code}, see the log"
        except subprocess.TimeoutExpired:
            result = f"took longer than {limit_s:.0f} s"
        finally:  # its workers, too: they would go on compiling
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if file.exists():  # also of a part that was stopped
            rows.setdefault(part.rows, []).extend(json.loads(file.read_text()))
    return {"part": part.name, "result": result, "seconds": round(time.monotonic() - started_s)}


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--command", type=int, choices=(1, 2, 3), default=1, help="which third of the list")
    parser.add_argument("--minutes", type=float, default=9.5, help="all parts together")
    parser.add_argument("--dry", action="store_true", help="tiny networks, single steps")
    options = parser.parse_args(arguments)
    todo = dry(options.command) if options.dry else parts(options.command)
    run(options.out, options.command, todo, options.minutes * 60)


if __name__ == "__main__":
    main()
