"""What papers published of schedules beside what the planner predicts: ``python -m benchmarks planner``.

Nothing is trained.  Zero Bubble: arXiv 2401.10241; LayerPipe: arXiv 2108.06629.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import click

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import LayerWork, dense_layer, transformer_activation_bytes, transformer_flop
from tf_ooo.costs.models import resnet, vgg16
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "planner.md"
PROCESSORS, _IN_FLIGHT, _BATCH, _WORDS = range(2, 17), 64, 32, 1024


class Gpt(NamedTuple):
    """A model of Zero Bubble, and samples per GPU and second of 1F1B and of the schedule beside it."""

    name: str
    layers: int
    heads: int
    hidden: int
    microbatch: int
    devices: int
    microbatches: int
    published: tuple[float, float]

    def layer(self, kept: float | None = None) -> LayerCosts:
        """One layer's costs, by its published FLOP; between dO and dW it keeps ``kept`` sbh bytes."""
        seconds = [flop / 156e12 for flop in transformer_flop(self.hidden, _WORDS, self.microbatch)]
        size = _WORDS * self.microbatch * self.hidden
        stored = transformer_activation_bytes(self.hidden, self.heads, _WORDS, self.microbatch)
        costs = LayerCosts(
            seconds[0], seconds[1], seconds[2], activation_bytes=stored, output_bytes=2.0 * size
        )
        return replace(costs, weight_grad_bytes=kept and kept * size)

    def stages(self, equal: bool) -> list[LayerCosts]:
        """One for each device; unless ``equal``, the first and the last have a layer less."""
        layer, most = self.layer(32.0), (self.layers + 2) // self.devices
        counts = [most - (n in (0, self.devices - 1) and not equal) for n in range(self.devices)]
        return [replace(layer.scaled(count), output_bytes=layer.output_bytes) for count in counts]

    def timeline(self, schedule: str, layers: Sequence[LayerCosts], link: Link) -> Timeline:
        """Simulate a schedule."""
        problem = Problem(tuple(layers), self.devices, self.microbatches, link)
        return simulate(POLICIES[schedule].make(problem), layers, link)


ZB_2P = (
    Gpt("1.5B", 22, 24, 2304, 6, 8, 24, (11.8, 14.5)),
    Gpt("6.2B", 30, 32, 4096, 3, 8, 24, (3.50, 4.32)),
    Gpt("14.6B", 46, 40, 5120, 1, 16, 48, (1.40, 1.81)),
    Gpt("28.3B", 62, 64, 6144, 1, 32, 96, (0.76, 0.99)),
)
# Three micro-batches for each device are assumed.
ZB_V = (
    Gpt("6.2B", 30, 32, 4096, 3, 16, 48, (3.38, 4.15)),
    Gpt("14.6B", 46, 40, 5120, 1, 24, 72, (1.52, 1.85)),
    Gpt("28.3B", 62, 64, 6144, 1, 32, 96, (0.82, 1.01)),
)


def gains(model: Gpt, layers: Sequence[LayerCosts], schedules: Sequence[str], link: Link) -> list[float]:
    """Return how many times as fast as 1F1B schedules are, in repeated steps without a barrier."""
    base_s = model.timeline("1f1b", layers, link).steady_step_s
    return [base_s / model.timeline(name, layers, link).steady_step_s for name in schedules]


def _zero_bubble() -> Iterator[list[object]]:
    yield [
        "Model",
        "Devices",
        "Published",
        "First and last stage shorter",
        "Equal stages",
        "Equal, 200 Gbit/s",
    ]
    for model in ZB_2P:
        settings = ((False, Link()), (True, Link()), (True, Link(bytes_per_s=25e9)))
        found = [gains(model, model.stages(equal), ["zb_h2"], link)[0] for equal, link in settings]
        yield [model.name, model.devices, model.published[1] / model.published[0], *found]


def _v_shapes() -> Iterator[list[object]]:
    names = ("zb_v", "v_half", "v_min", "dualpipe_v")
    yield ["Model", "Devices", "ZB-V published", *names]
    for model in ZB_V:
        layers = [model.layer()] * (model.layers + 2)  # embedding and head are a layer each
        found = gains(model, layers, names, Link())
        yield [model.name, model.devices, model.published[1] / model.published[0], *found]


def _mlp(batch: int) -> list[LayerWork]:
    widths = (784, 2048, 2048, 2048, 2048, 10)
    pairs = enumerate(zip(widths, widths[1:], strict=False))
    return [dense_layer(batch, a, b, first=not n, inputs=(n - 1,) if n else ()) for n, (a, b) in pairs]


WORKLOADS: dict[str, Callable[[int], Sequence[LayerWork]]] = {
    "vgg16": vgg16, "resnet18": partial(resnet, 18), "resnet50": partial(resnet, 50), "mlp": _mlp,
}  # fmt: skip


def flop_layers(name: str) -> tuple[LayerCosts, ...]:
    """Return layers whose F, dO and dW take their forward GFLOP each; the first one has no dO."""
    layers = []
    for number, work in enumerate(WORKLOADS[name](_BATCH)):
        takes, weights = work.flop()[0] / 1e9, float(work.parameters * work.element_bytes)
        of = LayerCosts(takes, takes if number else 0.0, takes, weight_bytes=weights, inputs=work.inputs)
        layers.append(replace(of, activation_bytes=work.activation_bytes, output_bytes=work.output_bytes))
    return tuple(layers)


def layerpipe_gain(layers: tuple[LayerCosts, ...], processors: int) -> float:
    """Return how many times as fast as PipeDream, whose stages are contiguous layers, LayerPipe is."""
    counts = {"pipedream": min(processors, len(layers)), "layerpipe": processors}
    made = [POLICIES[name].make(Problem(layers, count, _IN_FLIGHT)) for name, count in counts.items()]
    base_s, ours_s = (simulate(schedule, layers).steady_step_s for schedule in made)
    return base_s / ours_s


def _layerpipe() -> Iterator[list[object]]:
    yield ["Processors", *WORKLOADS]
    found = [[layerpipe_gain(flop_layers(name), count) for count in PROCESSORS] for name in WORKLOADS]
    yield from ([str(count), *line] for count, *line in zip(PROCESSORS, *found, strict=True))
    yield ["mean; published: 1.25", *map(fmean, found)]
    yield ["7 to 9, most; published: 1.80", *(max(line[5:8]) for line in found)]


def tables() -> dict[str, str]:
    """Return all tables as Markdown."""
    found = {"zero-bubble": _zero_bubble(), "v-shapes": _v_shapes(), "layerpipe": _layerpipe()}
    return {name: _text(rows) for name, rows in found.items()}


def _text(rows: Iterator[list[object]]) -> str:
    lines = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@click.command()
def planner() -> None:
    """Make the tables of docs/benchmarks/planner.md anew."""
    from benchmarks.report.page import with_tables

    PAGE.write_text(with_tables(PAGE.read_text(), tables()))
