"""One rank of ``torch.distributed.pipelining``: trains the feed-forward network, a step when it is told to.

The thread that computes has its share of the CPU; those that communicate are left free, as in TensorFlow's
workers.
"""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.machine import confine
from benchmarks.models import NETWORKS, SEED
from benchmarks.processes import answer
from benchmarks.runners.torch import SERIAL, cut

_NETWORK = NETWORKS["PIPELINE"]["feed_forward"]
# The class, the stages of each rank, and whether the second one is on the way back of a V.
_SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "interleaved_zb": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2, True),
}


def main(
    group: str, address: str, rank: int, devices: int, port: int, microbatches: int, schedules: list[str]
) -> None:
    """Answer until the process is ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=devices, rank=rank)
    x, y = map(torch.from_numpy, _NETWORK.data(_NETWORK.batch * microbatches))
    steps = {
        name: _serial(rank, x, y) if name == SERIAL else _pipeline(rank, devices, name, microbatches, x, y)
        for name in schedules
    }
    # This thread computes, also backward; all others, which communicate, get no quota.
    confine.Shares(group).enter(rank, confine.threads() - {threading.get_native_id()})
    answer(address, rank, {**steps, "version": lambda: str(torch.__version__)})


def _layers() -> list[nn.Module]:
    torch.manual_seed(SEED)
    widths = _NETWORK.settings["widths"]  # that of the inputs, too
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in widths]
    return [*inner, nn.Linear(widths[-1], _NETWORK.classes)]


def _serial(rank: int, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a step of the whole batch, on the first rank; the others do nothing."""
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step if rank == 0 else lambda: None


def _pipeline(
    rank: int, devices: int, name: str, microbatches: int, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], None]:
    kind, chunks, in_v = _SCHEDULES[name]
    layers, count = _layers(), chunks * devices
    mine = [rank, count - 1 - rank] if in_v else list(range(rank, count, devices))
    modules = [nn.Sequential(*(layers[i] for i in cut(len(layers), count, stage))) for stage in mine]
    stages = [
        pipelining.PipelineStage(module, stage, count, torch.device("cpu"))
        for module, stage in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages if chunks > 1 else stages[0], microbatches, nn.functional.cross_entropy)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], 0.01)
    inputs = (x,) if 0 in mine else ()
    targets = {"target": y} if count - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **targets)
        optimizer.step()

    return step
