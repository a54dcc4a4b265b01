"""One rank of ``torch.distributed.pipelining`` whose layers wait; a CSV file, or torch, has the order."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.emulated.costs import ROWS, WIDTH
from benchmarks.processes import answer
from benchmarks.runners.torch_csv import Told
from tf_ooo.demo.waits import prefer

_SEED = 1
Seconds = tuple[float, float, float]  # of F, dO and dW


def main(
    address: str, rank: int, devices: int, port: int, microbatches: int, steps: int,
    seconds: list[Seconds], ways: dict[str, Told],
) -> None:  # fmt: skip
    """Answer until the process is ended."""
    torch.set_num_threads(1)
    preferred = prefer()  # and with it all threads that are started from here
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=devices, rank=rank)
    losses = dict.fromkeys(ways, 0.0)

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

    file = Path(f"{address}.{rank}.csv")
    tasks: dict[str, Callable[..., Any]] = {
        name: partial(turn, name, _step(rank, microbatches, [_Layer(of) for of in seconds], told, file))
        for name, told in ways.items()
    }
    about = {"torch": str(torch.__version__), "preferred": preferred}
    answer(address, rank, tasks | {"losses": all_losses, "about": lambda: about})


def _step(
    rank: int, microbatches: int, layers: list[nn.Module], told: Told, file: Path
) -> Callable[[], float]:
    """Return a training step, which returns the loss on the rank that has the last stage."""
    count, device = len(told.stages), torch.device("cpu")
    bounds = {stage: of for stage, of in enumerate(told.stages) if told.ranks[stage] == rank}
    held = {stage: layers[first : last + 1] for stage, (first, last) in bounds.items()}
    stages = [PipelineStage(nn.Sequential(*of), stage, count, device) for stage, of in held.items()]
    kind = schedules._PipelineScheduleRuntime
    if told.torch_class:
        kind = schedules.get_schedule_class(told.torch_class)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], microbatches, nn.functional.mse_loss)
    if told.csv:
        file.write_text(told.csv)
        schedule._load_csv(str(file))
    optimizer = torch.optim.SGD([layer.weight for of in held.values() for layer in of], 0.01)
    torch.manual_seed(_SEED)
    x, y = torch.randn(2, ROWS * microbatches, WIDTH)
    inputs, targets = [x] * (0 in held), y if count - 1 in held else None

    def step() -> float:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*inputs, target=targets, losses=losses)
        optimizer.step()
        return sum(map(float, losses)) / microbatches

    return step


class _Wait(torch.autograd.Function):  # type: ignore[misc]
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


class _Layer(nn.Module):  # type: ignore[misc]
    """Waits for F, for dO on the way to its input, and for dW on the way to its weight."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, output_grad_s, weight_grad_s = self.seconds
        weight = _Wait.apply(self.weight, 0.0, weight_grad_s)
        return torch.tanh(_Wait.apply(x, forward_s, output_grad_s) * weight)
