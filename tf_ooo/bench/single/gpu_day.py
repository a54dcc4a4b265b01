"""``tf-ooo bench gpu-day``: everything to find out on a GPU machine, in three commands."""

from __future__ import annotations

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
from typing import TextIO

import click

from tf_ooo.bench.shared.options import FOLDER, POSITIVE
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.bench.single.networks import NETWORKS, SMALL

BEST = (("densenet121-k12", 32), ("mobilenetv3l-a0.5", 32))
_SINGLE, _OVERLAP = ("-m", "tf_ooo", "bench", "single"), ("-m", "tf_ooo", "bench", "single-overlap")
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
    name = " ".join((network, f"batch {batch}", *(text for text in more if text != "--data")))
    what = (*_SINGLE, "--networks", network, "--batches", str(batch))
    return Part(name, (*what, "--make-s", f"{limit_s * 0.6:.0f}", *more), limit_s)


def _overlap(network: str, batch: int, limit_s: float, *more: str) -> Part:
    what = (*_OVERLAP, "--network", network, "--batch", str(batch), *more)
    return Part(f"overlap {network}", what, limit_s, "overlap")


def parts(command: int) -> list[Part]:
    """What a command does, what decides most first."""
    first = {network for network, _ in BEST}
    rest = [name for name in NETWORKS if name not in SMALL and name not in first]
    if command == 1:
        targets = [_bench(network, batch, 200, "--all-ways") for network, batch in BEST]
        return [*targets, *(_overlap(*best, 85) for best in BEST)]
    if command == 2:
        network, batch = BEST[0]
        return [
            _bench(network, batch, 240, "--ways", "xla", "fit", "auto"),
            Part("tests", ("-m", "pytest", "-q", *_FILES, "-k", _TESTS), 200, ""),
            _bench(network, 32, 200, "--quick", "--size", "224"),
            _bench(network, batch, 150, "--quick", "--data", "real"),
            *(_bench(name, 32, 150, "--quick", "--rounds", "5") for name in rest),
        ]
    return [
        _bench(network, batch, 150, "--quick", "--rounds", "5")
        for batch in (128, 16, 64, 256)
        for network in (*sorted(first), *rest)
    ]


def dry(command: int) -> list[Part]:
    """The same kinds of parts, as small as they can be."""
    small = (*_SINGLE, "--batches", "2", "--rounds", "1", "--steps", "1", "--networks")
    if command == 1:
        ways = Part("lstm-small", (*small, "lstm-small", "--all-ways"), 600)
        return [ways, _overlap("lstm-small", 2, 200, "--steps", "1")]
    if command == 2:
        tests = ("-m", "pytest", "-q", *_FILES, "-k", "(TestMemoryLimit and runs) or TestMeasured")
        real = (*small, "densenet-small", "--quick", "--data", "real", "--size", "9")
        return [
            Part("lstm-small fit", (*small, "lstm-small", "--ways", "xla", "fit", "auto"), 400),
            Part("tests", tests, 200, ""),
            Part("densenet-small real", real, 400),
        ]
    return [Part("lstm-small", (*small, "lstm-small", "--quick"), 300)]


def run(out: Path, command: int, todo: Sequence[Part], budget_s: float) -> list[Row]:
    """Runs the parts until the budget is spent; returns what became of each."""
    out.mkdir(parents=True, exist_ok=True)
    done: list[Row] = []
    rows: dict[str, list[Row]] = {}
    end_s = time.monotonic() + budget_s
    with (out / f"log_{command}.txt").open("w") as log:
        for part in todo:
            left_s = end_s - time.monotonic()
            if left_s < 30:
                done.append({"part": part.name, "result": "not run: the time is spent"})
            else:
                print(f"===== {part.name}", file=log, flush=True)
                done.append(_run(part, min(part.limit_s, left_s), rows, log))
                click.echo(f"{part.name}: {done[-1]['result']}")
            for name, of_parts in rows.items():
                write_rows(out / f"{name}_{command}.json", of_parts)
            write_rows(out / f"parts_{command}.json", done)
    return done


def _run(part: Part, limit_s: float, rows: dict[str, list[Row]], log: TextIO) -> Row:
    """What became of a part; adds its rows."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        more = ("--json", str(file)) if part.rows else ()
        result = _result([sys.executable, *part.arguments, *more], limit_s, log)
        if file.exists():  # also of a part that was stopped
            rows.setdefault(part.rows, []).extend(json.loads(file.read_text()))
    return {"part": part.name, "result": result, "seconds": round(time.monotonic() - started_s)}


def _result(command: list[str], limit_s: float, log: TextIO) -> str:
    """Runs a command, no longer than the limit; how it ended."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:.0f} s"
    finally:  # its workers, too: they would go on compiling
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "done" if code == 0 else f"failed with {code}, see the log"


@click.command("gpu-day")
@click.option("--out", type=FOLDER, required=True, help="Folder for the results.")
@click.option("--command", type=click.IntRange(1, 3), default=1, show_default=True,
              help="Which third of the list.")  # fmt: skip
@click.option("--minutes", type=POSITIVE, default=9.5, show_default=True, help="All parts together.")
@click.option("--dry", "small", is_flag=True, help="Tiny networks, single steps; without a GPU too.")
def gpu_day(out: Path, command: int, minutes: float, small: bool) -> None:
    """What to find out on a GPU machine, in three commands.

    Each of them takes ten minutes at most.  Each part is a process with a limit of its own; one that
    fails is noted and the next runs.  The folder has few files, written after each part: rows_N.json,
    overlap_N.json, parts_N.json, log_N.txt.
    """
    run(out, command, dry(command) if small else parts(command), minutes * 60)
