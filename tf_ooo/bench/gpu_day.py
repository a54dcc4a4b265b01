"""Everything to find out on a GPU machine, in one command: ``python -m tf_ooo.bench.gpu_day --out DIR``.

Each part is a process of its own with a time limit; a part that fails is noted and the next one runs.
What is there so far is in DIR after every part, so the command may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tf_ooo.bench.single_networks import NETWORKS, SMALL

BEST = (("densenet121-k12", 32), ("mobilenetv3l-a0.5", 32))


def parts(out: Path, quick: bool) -> list[tuple[str, list[str], int]]:
    """(name, arguments of Python, limit in seconds), what decides most first."""
    overlap = [
        (
            f"overlap {network}",
            ["-m", "tf_ooo.bench.single_overlap", "--network", network, "--batch", str(batch), "--json",
             str(out / f"overlap_{network}.json")],
            400,
        )
        for network, batch in BEST
    ]  # fmt: skip
    bench = ["-m", "tf_ooo", "bench", "single"]
    targets = [
        (
            f"target {network}",
            [*bench, "--networks", network, "--batches", str(batch), "--json",
             str(out / f"target_{network}.json"), "--picture", str(out / f"target_{network}.png")],
            900,
        )
        for network, batch in BEST
    ]  # fmt: skip
    if quick:
        return [*targets[:1], *overlap[:1]]
    first = {network for network, _ in BEST}
    rest = [n for n in NETWORKS if n not in SMALL and n not in first] + sorted(first)
    others = [
        (
            f"{network} batch {batch}",
            [*bench, "--networks", network, "--batches", str(batch), "--rounds", "5", "--json",
             str(out / f"{network}_b{batch}.json")],
            900,
        )
        for batch in (32, 128, 16, 64, 256)
        for network in rest
    ]  # fmt: skip
    return [*targets, *overlap, *others]


def run(out: Path, quick: bool, budget_s: float) -> list[dict[str, object]]:
    """Runs the parts until the budget is spent; returns what became of each."""
    out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, object]] = []
    end_s = time.monotonic() + budget_s
    for name, arguments, limit_s in parts(out, quick):
        left_s = end_s - time.monotonic()
        if left_s < 60:
            done.append({"part": name, "result": "not run: the time is spent"})
            continue
        started_s = time.monotonic()
        log = out / (name.replace(" ", "_") + ".log")
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    [sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT,
                    timeout=min(limit_s, left_s), check=False,
                ).returncode  # fmt: skip
                result = "done" if code == 0 else f"failed with {code}, see {log.name}"
            except subprocess.TimeoutExpired:
                result = f"took longer than {min(limit_s, left_s):.0f} s"
        done.append({"part": name, "result": result, "seconds": round(time.monotonic() - started_s)})
        print(f"{name}: {result}", flush=True)
        (out / "parts.json").write_text(json.dumps(done, indent=1) + "\n")
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=28.0, help="all parts together")
    parser.add_argument("--quick", action="store_true", help="one network")
    options = parser.parse_args(arguments)
    run(options.out, options.quick, options.minutes * 60)


if __name__ == "__main__":
    main()
