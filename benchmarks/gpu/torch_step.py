"""Time the training steps of the same networks in PyTorch, compiled and in CUDA graphs, on a GPU."""

import argparse
import datetime
import functools
import time
from collections.abc import Callable

import torch
import torchvision
from torch import nn

from benchmarks.cases import PYTORCH, Measured, Way, WayRun
from benchmarks.gpu.run_hlo import alone, keep, shared_options

_CLASSES, _TURNS, _STEPS, _WARM = 10, 15, 30, 5
_MODE = "reduce-overhead"


def densenet(growth: int) -> nn.Module:
    """Build DenseNet-121 for images of 32 x 32, as examples/paper/densenet.py does."""
    model = torchvision.models.DenseNet(growth, num_init_features=2 * growth, num_classes=_CLASSES)
    first, blocks = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False), list(model.features)[4:]
    model.features = nn.Sequential(first, *blocks)  # no pooling yet
    return model


class Lstm(nn.Module):  # type: ignore[misc]
    """Two layers, by cuDNN, and a linear layer on the last step."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(width, width, depth, batch_first=True), nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


_MOBILE = functools.partial(torchvision.models.mobilenet_v3_large, width_mult=0.5)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "densenet121-k12": (functools.partial(densenet, 12), (3, 32, 32)),
    "densenet121-k24": (functools.partial(densenet, 24), (3, 32, 32)),
    "mobilenetv3l-a0.5": (functools.partial(_MOBILE, num_classes=_CLASSES), (3, 224, 224)),
    "resnet50": (functools.partial(torchvision.models.resnet50, num_classes=_CLASSES), (3, 224, 224)),
    "lstm-2x512": (functools.partial(Lstm, 2, 512), (16, 512)),
}


def step_of(network: str, rows: int) -> Callable[[], None]:
    """Return a compiled step on a batch that stays the same."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as XLA does
    torch.backends.cudnn.benchmark = True
    build, shape = NETWORKS[network]
    model, x = build().cuda(), torch.randn(rows, *shape, device="cuda")
    if len(shape) == 3:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    y = torch.randint(0, _CLASSES, (rows,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)
    forward = torch.compile(model, mode=_MODE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def run(step: Callable[[], None], count: int = _STEPS) -> float:
    """Train so many steps, and return the seconds of one."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / count


def main() -> None:
    """Read the command line, time the step and keep a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=32)
    shared_options(parser)
    asked = parser.parse_args()
    began = datetime.datetime.now(datetime.UTC)
    step = step_of(asked.network, asked.batch)
    run(step, _WARM)
    with alone(asked.together, asked.processes):
        turns_s = [run(step) for _ in range(_TURNS)]
    way = f"torch.compile {_MODE}"
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    runs = {way: WayRun(turns_s, about=about)}
    keep(asked, f"{asked.network}_b{asked.batch}_torch", (Way(way, PYTORCH),), Measured(runs), began)


if __name__ == "__main__":
    main()
