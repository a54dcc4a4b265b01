"""Do the side streams' kernels run beside the main stream's?  Reads TensorFlow's profiler of a few steps.

``python -m tf_ooo.bench.single.overlap --network densenet121-k12 --batch 32 --json FILE``; needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_ooo.bench.single.networks import NETWORKS
from tf_ooo.bench.single.worker import OURS, device, make, run
from tf_ooo.compat import tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent


def overlap_of(events: Sequence[TracedEvent]) -> dict[str, Any]:
    """Busy seconds of each GPU stream, and seconds in which two or more are busy at once.

    ``events`` are of GPU planes; a line is a stream.
    """
    streams: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.plane.startswith("/device:GPU") and event.line.startswith("Stream"):
            streams.setdefault(event.line, []).append((event.begin_s, event.begin_s + event.duration_s))
    merged = {line: _merged(spans) for line, spans in streams.items()}
    edges = sorted(
        [(begin, 1) for spans in merged.values() for begin, _ in spans]
        + [(end, -1) for spans in merged.values() for _, end in spans]
    )
    busy_s = beside_s = 0.0
    running, since = 0, 0.0
    for moment, change in edges:
        busy_s += (moment - since) * (running >= 1)
        beside_s += (moment - since) * (running >= 2)
        running, since = running + change, moment
    return {
        "streams_s": {line: sum(end - begin for begin, end in spans) for line, spans in merged.items()},
        "kernels": {line: len(spans) for line, spans in streams.items()},
        "busy_s": busy_s,
        "overlapped_s": beside_s,
    }


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Profiles stock XLA and ours; writes one row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="densenet121-k12", choices=sorted(NETWORKS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["xla", "early", "joint"], choices=["xla", *OURS])
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    made, said, modules = make(options.network, options.batch, options.ways)
    rows = []
    for name, step in made.items():
        events: list[TracedEvent] = []
        with tf_profiler.traced_events(events):
            run(step, options.steps)
        row = {"workload": f"{options.network} batch {options.batch}", "schedule": name, "device": device()}
        compiled = modules[name].to_dict() if name in modules else None
        rows.append({**row, "note": said[name], "compiled": compiled, **overlap_of(events)})
        print(json.dumps(rows[-1]), flush=True)
    for name in set(options.ways) - made.keys():
        print(f"{name}: not run: {said[name]}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
