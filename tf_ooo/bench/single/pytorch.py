"""The same networks in PyTorch, compiled with CUDA graphs: a process of ``tf-ooo bench single``.

Reads the lines that :mod:`tf_ooo.bench.single.worker` reads.  Says why where PyTorch or, for ResNet and
MobileNet, torchvision is missing.  Without a GPU small networks run, as a check of the machinery.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tf_ooo.bench.single.inputs import arrays
from tf_ooo.bench.single.networks import CLASSES, SMALL, spec_of

NAME = "pytorch"


def why_not(network: str) -> str | None:
    """Why PyTorch cannot run it here; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch  # type: ignore[import-not-found]

    if not torch.cuda.is_available() and network not in SMALL:
        return "PyTorch has no GPU here"
    if spec_of(network)[0] == "application" and importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    return None


def densenet(torch: Any, blocks: tuple[int, ...], growth: int, size: int) -> Any:
    """DenseNet-BC, as :func:`tf_ooo.bench.single.networks.densenet`."""
    nn = torch.nn

    def convolution(channels: int, filters: int, kernel: int) -> list[Any]:
        conv = nn.Conv2d(channels, filters, kernel, padding=kernel // 2, bias=False)
        return [nn.BatchNorm2d(channels), nn.ReLU(), conv]

    class Dense(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, channels: int) -> None:
            super().__init__()
            first, second = convolution(channels, 4 * growth, 1), convolution(4 * growth, growth, 3)
            self.body = nn.Sequential(*first, *second)

        def forward(self, x: Any) -> Any:
            return torch.cat([x, self.body(x)], 1)

    channels = 2 * growth
    parts: list[Any] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
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


def encoder(torch: Any, depth: int, width: int, length: int) -> Any:
    """As :func:`tf_ooo.bench.single.networks.encoder`; heads of 64."""
    del length
    layer = torch.nn.TransformerEncoderLayer(
        width, width // 64 or 1, 4 * width, 0.0, "gelu", batch_first=True
    )
    return _first_of(torch, torch.nn.TransformerEncoder(layer, depth), width)


def rnn(torch: Any, depth: int, width: int, length: int) -> Any:
    """As :func:`tf_ooo.bench.single.networks.rnn`."""
    del length
    return _first_of(torch, torch.nn.LSTM(width, width, depth, batch_first=True), width)


def application(torch: Any, name: str, size: int, alpha: float | None = None) -> Any:
    """One of torchvision's."""
    import torchvision  # type: ignore[import-not-found]

    del torch, size
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


def make(network: str, count: int, data: str = "random", size: int | None = None) -> Callable[[], None]:
    """A compiled step, on the GPU where there is one."""
    import torch

    kind, arguments = spec_of(network, size)
    model = KINDS[kind](torch, **arguments)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(on)
    source = _source(torch, arrays(shape_of(kind, arguments), count, CLASSES, data), on, data == "random")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    # The mode with CUDA graphs and tuned kernels; on a CPU tuning only takes long.
    forward = torch.compile(model, mode="max-autotune" if on == "cuda" else "default")

    def step() -> None:
        x, y = source()
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def _source(torch: Any, batches: Any, on: str, constant: bool) -> Callable[[], Any]:
    def following() -> Any:
        x, y = next(batches)
        x = torch.from_numpy(x)
        return (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x).to(on), torch.from_numpy(y).to(on)

    kept = following()
    return (lambda: kept) if constant else following


def _first_of(torch: Any, body: Any, width: int) -> Any:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, torch.nn.Linear(width, CLASSES)

        def forward(self, x: Any) -> Any:
            out = self.body(x)
            return self.head(out[0][:, -1] if isinstance(out, tuple) else out[:, 0])

    return Module()


def run(step: Callable[[], None], count: int) -> dict[str, Any]:
    """As :func:`tf_ooo.bench.single.worker.run`."""
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(count):
        step()
    if gpu:
        torch.cuda.synchronize()
    found: dict[str, Any] = {"step_s": (time.perf_counter() - started) / count}
    if gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def main() -> None:
    """As in :mod:`tf_ooo.bench.single.worker`."""
    request = json.loads(sys.argv[1])
    reason = why_not(request["network"])
    if reason is not None:
        print("ANSWER " + json.dumps({"ready": [], "said": {NAME: reason}, "device": "cpu"}), flush=True)
        return
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in TensorFlow
    step = make(request["network"], request["batch"], request["data"], request.get("size"))
    for _ in range(5):
        step()
    device = torch.cuda.get_device_name() if gpu else "cpu"
    print("ANSWER " + json.dumps({"ready": [NAME], "said": {NAME: torch.__version__}, "device": device}))
    sys.stdout.flush()
    for line in sys.stdin:
        print("ANSWER " + json.dumps(run(step, int(line.rpartition(" ")[2]))), flush=True)


if __name__ == "__main__":
    main()
