"""One rank of ``torch.distributed.pipelining``: trains the feed-forward network, a step for each line.

The thread that computes has its share of the CPU; those that communicate are left free, as in TensorFlow's
workers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.machine import confine
from benchmarks.models import PIPELINE, SEED
from benchmarks.processes import requests
from benchmarks.runners.torch import ANSWER, SERIAL, Rank, cut

_NETWORK = PIPELINE["feed_forward"]
# The class, the stages of each rank, and whether the second one is on the way back of a V.
_SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "interleaved_zb": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2, True),
}


def main(rank: Rank) -> None:
    """Serve steps until the input ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{rank.port}", world_size=rank.devices, rank=rank.rank)
    steps = {name: _serial(rank) if name == SERIAL else _pipeline(rank, name) for name in rank.schedules}
    # This thread computes, also backward; all others, which communicate, get no quota.
    confine.enter(rank.group, rank.rank, confine.threads() - {threading.get_native_id()})
    print(ANSWER, torch.__version__, flush=True)
    for line in sys.stdin:
        steps[line.strip()]()
        print(ANSWER, flush=True)
    os._exit(0)  # the others may have gone already: nothing to take leave of


def _layers() -> list[nn.Module]:
    torch.manual_seed(SEED)
    widths = _NETWORK.settings["widths"]  # that of the inputs, too
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in widths]
    return [*inner, nn.Linear(widths[-1], _NETWORK.classes)]


def _batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _NETWORK.data(_NETWORK.batch * microbatches)
    return torch.from_numpy(x), torch.from_numpy(y)


def _serial(rank: Rank) -> Callable[[], None]:
    """Return a step of the whole batch, on the first rank; the others do nothing."""
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = _batch(rank.microbatches)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step if rank.rank == 0 else lambda: None


def _pipeline(rank: Rank, name: str) -> Callable[[], None]:
    kind, chunks, in_v = _SCHEDULES[name]
    layers, count = _layers(), chunks * rank.devices
    mine = [rank.rank, count - 1 - rank.rank] if in_v else list(range(rank.rank, count, rank.devices))
    modules = [nn.Sequential(*(layers[i] for i in cut(len(layers), count, stage))) for stage in mine]
    stages = [
        pipelining.PipelineStage(module, stage, count, torch.device("cpu"))
        for module, stage in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages if chunks > 1 else stages[0], rank.microbatches, nn.functional.cross_entropy)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], 0.01)
    x, y = _batch(rank.microbatches)
    inputs = (x,) if 0 in mine else ()
    targets = {"target": y} if count - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **targets)
        optimizer.step()

    return step


if __name__ == "__main__":
    main(*requests(Rank))
