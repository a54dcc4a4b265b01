"""One rank of ``torch.distributed.pipelining`` in the pipeline benchmark: the feed-forward workload.

Reads a run's name from each line of its input, trains one step, and answers with a line.  The thread that
computes has its share of the CPU; those that communicate are left free, as in TensorFlow's workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.workloads import CLASSES, FEED_FORWARD, ROWS, SEED, labels, numbers

ANSWER = "DONE"
# Stages on each rank, by the name of the run.
STAGES = {"torch_gpipe": 1, "torch_1f1b": 1, "torch_zbv": 2}
SERIAL = "torch_serial"


def main() -> None:
    """Serves steps until its input ends."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "devices", "port", "microbatches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--group", required=True)
    options = parser.parse_args()
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", address, world_size=options.devices, rank=options.rank)
    steps = {name: _pipeline(torch, options, name) for name in STAGES}
    steps[SERIAL] = _serial(torch, options) if options.rank == 0 else (lambda: None)
    _confine(options)
    print(f"{ANSWER} torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        steps[line.strip()]()
        print(ANSWER, flush=True)
    os._exit(0)  # the others may have gone already: nothing to take leave of


def _confine(options: argparse.Namespace) -> None:
    """This thread computes, also backward; all others, which communicate, get no quota."""
    confine.enter(options.group, options.rank, confine.threads() - {threading.get_native_id()})


def _layers(torch: Any) -> list[Any]:
    depth, width = FEED_FORWARD
    torch.manual_seed(SEED)
    nn = torch.nn
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return [*inner, nn.Linear(width, CLASSES)]


def _batch(torch: Any, microbatches: int) -> tuple[Any, Any]:
    rows = ROWS["feed_forward"] * microbatches
    return torch.from_numpy(numbers(rows, FEED_FORWARD[1])), torch.from_numpy(labels(rows)).long()


def _serial(torch: Any, options: argparse.Namespace) -> Callable[[], None]:
    """The whole batch on one rank."""
    model = torch.nn.Sequential(*_layers(torch))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = _batch(torch, options.microbatches)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def cut(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage: equal parts, the output layer with the last."""
    inner = layers - 1
    first, after = inner * stage // stages, inner * (stage + 1) // stages
    return range(first, layers if stage == stages - 1 else after)


def _pipeline(torch: Any, options: argparse.Namespace, name: str) -> Callable[[], None]:
    from torch.distributed import pipelining

    rank, devices, microbatches = options.rank, options.devices, options.microbatches
    layers, count = _layers(torch), STAGES[name] * devices
    # The second stage of each rank is on the way back of a V.
    mine = [rank, count - 1 - rank][: STAGES[name]]
    modules = [torch.nn.Sequential(*(layers[i] for i in cut(len(layers), count, stage))) for stage in mine]
    on = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(module, stage, count, on)
        for module, stage in zip(modules, mine, strict=True)
    ]
    loss = torch.nn.functional.cross_entropy
    if name == "torch_zbv":
        schedule = pipelining.ScheduleZBVZeroBubble(stages, microbatches, loss)
    else:
        kind = pipelining.Schedule1F1B if name == "torch_1f1b" else pipelining.ScheduleGPipe
        schedule = kind(stages[0], microbatches, loss)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], 0.01)
    x, y = _batch(torch, microbatches)
    inputs = (x,) if 0 in mine else ()
    targets = {"target": y} if count - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **targets)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
