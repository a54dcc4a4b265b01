"""One rank of ``torch.distributed.pipelining`` in the pipeline benchmark: the feed-forward workload.

Reads a run's name from each line of its input, trains one step, and answers with a line.  The thread that
computes has its share of the CPU; those that communicate are left free, as in TensorFlow's workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from tf_ooo.bench.pipeline.pytorch import Rank, cut
from tf_ooo.bench.pipeline.rows import TORCH_SERIAL, TORCH_STAGES
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.processes import answer, requests, serve
from tf_ooo.bench.shared.workloads import FEED_FORWARD, PIPELINE, SEED

_NETWORK = PIPELINE["feed_forward"]


def main(rank: Rank) -> None:
    """Serves steps until its input ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{rank.port}", world_size=rank.devices, rank=rank.rank)
    steps = {name: _pipeline(rank, name) for name in TORCH_STAGES}
    steps[TORCH_SERIAL] = _serial(rank) if rank.rank == 0 else (lambda: None)
    # This thread computes, also backward; all others, which communicate, get no quota.
    confine.enter(rank.group, rank.rank, confine.threads() - {threading.get_native_id()})
    answer(f"torch {torch.__version__}")
    serve(lambda name: steps[name]())
    os._exit(0)  # the others may have gone already: nothing to take leave of


def _layers() -> list[nn.Module]:
    depth, width = FEED_FORWARD
    torch.manual_seed(SEED)
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return [*inner, nn.Linear(width, _NETWORK.classes)]


def _batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _NETWORK.data(_NETWORK.batch * microbatches, SEED)
    return torch.from_numpy(x), torch.from_numpy(y)


def _serial(rank: Rank) -> Callable[[], None]:
    """The whole batch on one rank."""
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = _batch(rank.microbatches)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _pipeline(rank: Rank, name: str) -> Callable[[], None]:
    layers, count = _layers(), TORCH_STAGES[name] * rank.devices
    # The second stage of each rank is on the way back of a V.
    mine = [rank.rank, count - 1 - rank.rank][: TORCH_STAGES[name]]
    modules = [nn.Sequential(*(layers[i] for i in cut(len(layers), count, stage))) for stage in mine]
    on = torch.device("cpu")
    pairs = zip(modules, mine, strict=True)
    stages = [pipelining.PipelineStage(module, stage, count, on) for module, stage in pairs]
    loss = nn.functional.cross_entropy
    if name == "torch_zbv":
        schedule = pipelining.ScheduleZBVZeroBubble(stages, rank.microbatches, loss)
    else:
        kind = pipelining.Schedule1F1B if name == "torch_1f1b" else pipelining.ScheduleGPipe
        schedule = kind(stages[0], rank.microbatches, loss)
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
