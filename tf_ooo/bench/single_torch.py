"""The same networks in PyTorch, compiled with CUDA graphs: a process of ``tf-ooo bench single``.

Reads the lines that :mod:`tf_ooo.bench.single_worker` reads.  Says why where PyTorch, a GPU or, for
ResNet and MobileNet, torchvision is missing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

NAME = "pytorch"
CLASSES = 100


def why_not(network: str) -> str | None:
    """Why PyTorch cannot run it here; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch  # type: ignore[import-not-found]

    if not torch.cuda.is_available():
        return "PyTorch has no GPU here"
    if network.startswith(("resnet", "mobilenet")) and importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    return None


def densenet(torch: Any, blocks: tuple[int, ...], growth: int) -> Any:
    """DenseNet-BC for images of 32x32."""
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
    for number, count in enumerate(blocks):
        for _ in range(count):
            parts.append(Dense(channels))
            channels += growth
        if number < len(blocks) - 1:
            parts += [*convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head, nn.Linear(channels, CLASSES))


def make(network: str, count: int) -> Any:
    """A compiled step.  The encoder and the LSTM take their inputs as (batch, length, width)."""
    import torch

    nn = torch.nn
    shape: tuple[int, ...]
    if network.startswith("densenet"):
        blocks = (6, 12, 32, 32) if "169" in network else (6, 12, 24, 16)
        model, shape = densenet(torch, blocks, int(network.rpartition("k")[2])), (3, 32, 32)
    elif network.startswith("encoder"):
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, "gelu", batch_first=True)
        body = nn.TransformerEncoder(layer, 6)
        model, shape = _FirstOf(torch, body, 512), (128, 512)
    elif network.startswith("lstm"):
        body = nn.LSTM(512, 512, 2, batch_first=True)
        model, shape = _FirstOf(torch, body, 512), (16, 512)
    else:
        import torchvision  # type: ignore[import-not-found]

        alpha = {"width_mult": float(network.rpartition("a")[2])} if network.startswith("mobile") else {}
        name = "mobilenet_v3_large" if alpha else network
        model, shape = getattr(torchvision.models, name)(num_classes=CLASSES, **alpha), (3, 224, 224)
    model = model.cuda()
    x, y = torch.randn(count, *shape).cuda(), torch.randint(0, CLASSES, (count,)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    forward = torch.compile(model, mode="max-autotune")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return step


def _FirstOf(torch: Any, body: Any, width: int) -> Any:  # noqa: N802 - makes a module
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, torch.nn.Linear(width, CLASSES)

        def forward(self, x: Any) -> Any:
            out = self.body(x)
            return self.head((out[0] if isinstance(out, tuple) else out)[:, 0])

    return Module()


def main() -> None:
    """As in :mod:`tf_ooo.bench.single_worker`."""
    request = json.loads(sys.argv[1])
    reason = why_not(request["network"])
    if reason is not None:
        print("ANSWER " + json.dumps({"ready": [], "said": {NAME: reason}, "device": "cpu"}), flush=True)
        return
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in TensorFlow
    step = make(request["network"], request["batch"])
    for _ in range(5):
        step()
    ready = {"ready": [NAME], "said": {NAME: torch.__version__}, "device": torch.cuda.get_device_name()}
    print("ANSWER " + json.dumps(ready), flush=True)
    for line in sys.stdin:
        count = int(line.rpartition(" ")[2])
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        found = {
            "step_s": (time.perf_counter() - started) / count,
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        print("ANSWER " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
