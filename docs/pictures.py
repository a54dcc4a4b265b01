"""Makes the pictures of the pages that are planned, not measured: python docs/pictures.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import tf_ooo
from tf_ooo.planning.pictures.style import COLOURS, TEXT_COLOURS

IMAGES = Path(__file__).with_name("images")
LAYER = tf_ooo.LayerCosts(1e-3, 1e-3, 1e-3, 1e-4, weight_bytes=8_000_000, output_bytes=500_000)
SLOW_LINK = tf_ooo.Link(bytes_per_s=6e9)


def main() -> None:
    """All of them."""
    for name, draw in (("do_and_dw", two_gradients), ("who_waits", who_waits)):
        figure, axes = plt.subplots(figsize=(9, 3.2))
        draw(axes)
        axes.set_axis_off()
        figure.savefig(IMAGES / f"{name}.png", bbox_inches="tight", dpi=150)
    planned("data_parallel_stock", "in_order", mode="data_parallel", devices=2)
    planned("data_parallel_ours", "reverse_first_k", mode="data_parallel", devices=2)
    planned("one_gpu_stock", "in_order", mode="single_device")
    planned("one_gpu_ours", "multi_stream", mode="single_device")
    planned("layerpipe", "layerpipe", steps=1, mode="layerpipe", devices=3, microbatches=8)


def planned(name: str, schedule: str, steps: int = 2, **problem: object) -> None:
    """Steps of four equal layers, as planned."""
    layers = [LAYER] * 4
    plan = tf_ooo.plan(layers=layers, schedule=schedule, link=SLOW_LINK, **problem)
    tf_ooo.simulate(plan, layers, SLOW_LINK, steps=steps).save_png(IMAGES / f"{name}.png")


def two_gradients(axes: Axes) -> None:
    """Three layers: the forward pass above, dO back below it, a dW that hangs on each dO."""
    for layer in range(3):
        _box(axes, layer, 2, "F", f"layer {layer + 1}: F")
        _box(axes, layer, 1, "dO", f"dO {layer + 1}")
        _box(axes, layer, 0, "dW", f"dW {layer + 1}")
        _arrow(axes, (layer, 1), (layer, 0))
        if layer:
            _arrow(axes, (layer - 1, 2), (layer, 2))
            _arrow(axes, (layer, 1), (layer - 1, 1))
    _box(axes, 3, 1.5, "U", "loss")
    _arrow(axes, (2, 2), (3, 1.5))
    _arrow(axes, (3, 1.5), (2, 1))
    axes.text(3.62, 1, "the chain: each dO waits\nfor the one behind it", va="center")
    axes.text(3.62, 0, "no dO waits for a dW:\nit may run later", va="center")
    axes.set(xlim=(-0.5, 5.3), ylim=(-0.5, 2.5))


def who_waits(axes: Axes) -> None:
    """Two devices, the layers' backward pass: in stock order and with all dO first."""
    stock = (("dO", 1), ("dW", 1), ("dO", 1), ("dW", 1))
    ours = (("dO", 1), ("dO", 1), ("dW", 1), ("dW", 1))
    for row, (label, order, wait) in enumerate((("dW moved", ours, 2), ("stock order", stock, 3))):
        axes.text(-0.1, 2.4 * row + 0.9, label, ha="right", va="center", weight="bold")
        _bars(axes, 2.4 * row + 1.2, 0, order, "device 2")
        _bars(axes, 2.4 * row + 0.4, wait, stock, "device 1")
    axes.set(xlim=(-1.6, 8.2), ylim=(-0.2, 4.4))


def _bars(axes: Axes, y: float, start: float, order: tuple[tuple[str, float], ...], label: str) -> None:
    axes.text(-0.05, y, label, va="center", ha="left", fontsize=8)
    for kind, seconds in order:
        axes.barh(y, seconds, left=start + 0.7, height=0.6, color=COLOURS[kind], edgecolor="white")
        colour = TEXT_COLOURS[kind]
        axes.text(start + 0.7 + seconds / 2, y, kind, ha="center", va="center", color=colour)
        start += seconds


def _box(axes: Axes, x: float, y: float, kind: str, text: str) -> None:
    axes.barh(y, 0.64, left=x - 0.32, height=0.5, color=COLOURS[kind])
    axes.text(x, y, text, ha="center", va="center", color=TEXT_COLOURS[kind])


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "shrinkA": 24, "shrinkB": 24})


if __name__ == "__main__":
    main()
