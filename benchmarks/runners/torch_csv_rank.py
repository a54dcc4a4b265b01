"""One rank of ``torch.distributed.pipelining`` whose layers wait: trains by torch's schedules or a CSV file."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.emulated.costs import ROWS, WIDTH
from benchmarks.processes import answer
from tf_ooo.demo.waits import prefer

# The class, the stages of each rank, and whether the second one is on the way back of a V.
SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "interleaved_zb": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2, True),
    "dualpipe_v": (pipelining.ScheduleDualPipeV, 2, True),
}
_SEED = 1
Seconds = tuple[float, float, float]  # of F, dO and dW
Plan = tuple[list[tuple[int, int]], str]  # the layers of each stage, and a CSV file's text


def stages_of(rank: int, devices: int, chunks: int, in_v: bool) -> list[int]:
    """Return a rank's stages where torch places them."""
    count = chunks * devices
    return [rank, count - 1 - rank] if in_v else list(range(rank, count, devices))


def main(
    address: str, rank: int, devices: int, port: int, microbatches: int, steps: int,
    seconds: list[Seconds], plans: dict[str, Plan],
) -> None:  # fmt: skip
    """Answer until the process is ended."""
    torch.set_num_threads(1)
    preferred = prefer()  # and with it all threads that are started from here
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=devices, rank=rank)
    losses = dict.fromkeys(plans, 0.0)

    def turn(name: str, step: Callable[[], float]) -> float:
        """Return the seconds of a step, of several in a row."""
        dist.barrier()
        started_s = time.perf_counter()
        for _ in range(steps):
            losses[name] = step()
        dist.barrier()
        return (time.perf_counter() - started_s) / steps

    def all_losses() -> dict[str, float]:
        """Return the last losses, which one rank has of each way."""
        values = torch.tensor(list(losses.values()), dtype=torch.float64)
        dist.all_reduce(values)
        return dict(zip(losses, values.tolist(), strict=True))

    path = Path(f"{address}.{rank}.csv")
    tasks: dict[str, Callable[..., Any]] = {
        name: partial(turn, name, _step(name, rank, devices, microbatches, seconds, plan, path))
        for name, plan in plans.items()
    }
    about = {"torch": str(torch.__version__), "preferred": preferred}
    answer(address, rank, tasks | {"losses": all_losses, "about": lambda: about})


def _step(
    name: str, rank: int, devices: int, microbatches: int, seconds: list[Seconds], plan: Plan, path: Path
) -> Callable[[], float]:
    """Return a training step, which returns the loss, on the rank that has the last stage."""
    (bounds, csv), count = plan, len(plan[0])
    kind, chunks, in_v = SCHEDULES.get(name, (_PipelineScheduleRuntime, 2, False))
    row = csv.split("\n")[rank] if csv else ""
    mine = sorted({int(of.split("F")[0]) for of in row.split(",") if "F" in of}) or stages_of(
        rank, devices, chunks, in_v
    )
    torch.manual_seed(_SEED)
    x, y = torch.randn(2, ROWS * microbatches, WIDTH)
    layers = [_Layer(of) for of in seconds]
    modules = [nn.Sequential(*layers[bounds[stage][0] : bounds[stage][1] + 1]) for stage in mine]
    stages = [
        pipelining.PipelineStage(of, stage, count, torch.device("cpu"))
        for of, stage in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages if chunks > 1 else stages[0], microbatches, nn.functional.mse_loss)
    if csv:
        path.write_text(csv)
        schedule._load_csv(str(path))
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], 0.01)

    def step() -> float:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *((x,) if 0 in mine else ()), **({"target": y, "losses": losses} if count - 1 in mine else {})
        )
        optimizer.step()
        return sum(map(float, losses)) / microbatches

    return step


class _Wait(torch.autograd.Function):
    """The same values; the forward pass waits, and so does the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class _Layer(nn.Module):
    """Waits for F, for dO on the way to its input, and for dW on the way to its weight."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, output_grad_s, weight_grad_s = self.seconds
        weight = _Wait.apply(self.weight, 0.0, weight_grad_s)
        return torch.tanh(_Wait.apply(x, forward_s, output_grad_s) * weight)
