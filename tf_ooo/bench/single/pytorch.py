"""The same networks in PyTorch, compiled with CUDA graphs: a process of ``tf-ooo bench single``.

Reads the lines that :mod:`tf_ooo.bench.single.worker` reads.  Says why where PyTorch or, for ResNet and
MobileNet, torchvision is missing.  Without a GPU small networks run, as a check of the machinery.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from tf_ooo.bench.shared.processes import answer, requests, serve
from tf_ooo.bench.single.cases import AskedWays, Case
from tf_ooo.bench.single.inputs import arrays
from tf_ooo.bench.single.networks import CLASSES, SMALL, spec_of

with suppress(ImportError):  # why_not says so
    import torch
    from torch import nn

NAME = "pytorch"


def why_not(network: str) -> str | None:
    """Why PyTorch cannot run it here; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if not torch.cuda.is_available() and network not in SMALL:
        return "PyTorch has no GPU here"
    if spec_of(network)[0] == "application" and importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    return None


def densenet(blocks: tuple[int, ...], growth: int, size: int) -> nn.Module:
    """DenseNet-BC, as :func:`tf_ooo.bench.single.networks.densenet`."""

    def convolution(channels: int, filters: int, kernel: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels, filters, kernel, padding=kernel // 2, bias=False)
        return [nn.BatchNorm2d(channels), nn.ReLU(), conv]

    class Dense(nn.Module):  # type: ignore[misc]
        def __init__(self, channels: int) -> None:
            super().__init__()
            first, second = convolution(channels, 4 * growth, 1), convolution(4 * growth, growth, 3)
            self.body = nn.Sequential(*first, *second)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.body(x)], 1)

    channels = 2 * growth
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    if size >= 128:
        stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        parts = [stem, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    for number, count in enumerate(blocks):
        for _ in range(count):
            parts.append(Dense(channels))
            channels += growth
        if number < len(blocks) - 1:
            parts += [*convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head, nn.Linear(channels, CLASSES))


def encoder(depth: int, width: int, length: int) -> nn.Module:
    """As :func:`tf_ooo.bench.single.networks.encoder`; heads of 64; of any length."""
    layer = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, "gelu", batch_first=True)
    return _one_vector(nn.TransformerEncoder(layer, depth), width, lambda out: out[:, 0])


def rnn(depth: int, width: int, length: int) -> nn.Module:
    """As :func:`tf_ooo.bench.single.networks.rnn`; of any length."""
    lstm = nn.LSTM(width, width, depth, batch_first=True)
    return _one_vector(lstm, width, lambda out: out[0][:, -1])


def application(name: str, size: int, alpha: float | None = None) -> nn.Module:
    """One of torchvision's; of any size."""
    import torchvision

    theirs = {"MobileNetV3Large": "mobilenet_v3_large", "ResNet50": "resnet50", "ResNet101": "resnet101"}
    width = {} if alpha is None else {"width_mult": alpha}
    return getattr(torchvision.models, theirs[name])(num_classes=CLASSES, **width)


KINDS: Mapping[str, Callable[..., Any]] = {
    "densenet": densenet,
    "application": application,
    "encoder": encoder,
    "rnn": rnn,
}


def shape_of(kind: str, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Of one input, channels last."""
    if kind in ("densenet", "application"):
        return (arguments["size"], arguments["size"], 3)
    return (arguments["length"], arguments["width"])


def make(case: Case) -> Callable[[], None]:
    """A compiled step, on the GPU where there is one."""
    kind, arguments = spec_of(case.network, case.size)
    model = KINDS[kind](**arguments)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(on)
    fed = arrays(shape_of(kind, arguments), case.batch, CLASSES, case.data)
    batch = _batch_source(fed, on, constant=case.data == "random")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    # The mode with CUDA graphs and tuned kernels; on a CPU tuning only takes long.
    forward = torch.compile(model, mode="max-autotune" if on == "cuda" else "default")

    def step() -> None:
        x, y = batch()
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def _batch_source(
    fed: Iterator[tuple[np.ndarray, np.ndarray]], on: str, constant: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """What gives the next batch, channels first; ``constant``: always the first, on the device."""

    def following() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = map(torch.from_numpy, next(fed))
        return (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x).to(on), y.to(on)

    kept = following()
    return (lambda: kept) if constant else following


def _one_vector(body: nn.Module, width: int, choose: Callable[[Any], torch.Tensor]) -> nn.Module:
    """The body and a linear layer on the vector that is chosen of its output."""

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, torch.nn.Linear(width, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(choose(self.body(x)))

    return Module()


def run(step: Callable[[], None], count: int) -> dict[str, float]:
    """As :func:`tf_ooo.bench.single.worker.run`."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started_s = time.perf_counter()
    for _ in range(count):
        step()
    if gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - started_s) / count
    return {"step_s": step_s, **({"peak_bytes": torch.cuda.max_memory_allocated()} if gpu else {})}


def main(case: Case) -> None:
    """As in :mod:`tf_ooo.bench.single.worker`; there is one way."""
    reason = why_not(case.network)
    if reason is not None:
        answer({"ready": [], "said": {NAME: reason}, "device": "cpu"})
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in TensorFlow
    step = make(case)
    for _ in range(5):
        step()
    device = torch.cuda.get_device_name() if gpu else "cpu"
    answer({"ready": [NAME], "said": {NAME: torch.__version__}, "device": device})
    serve(lambda line: run(step, int(line.rpartition(" ")[2])))


if __name__ == "__main__":
    main(requests(Case, AskedWays)[0])  # whatever ways are asked for
