"""Published figures of schedules stand beside what the planner predicts: ``python -m benchmarks planner``.

Nothing is trained.  Zero Bubble: arXiv 2401.10241; LayerPipe: arXiv 2108.06629.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import tomllib

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import dense_layer, transformer_activation_bytes, transformer_flop
from tf_ooo.costs.models import MODELS
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "planner.md"
PROCESSORS, _IN_FLIGHT, _BATCH, _WORDS = range(2, 17), 64, 32, 1024
WORKLOADS, _MLP = ("vgg16", "resnet18", "resnet50", "mlp"), (784, 2048, 2048, 2048, 2048, 10)
V_SHAPES = ("zb_v", "v_half", "v_min", "dualpipe_v")


def simulated(schedule: str, problem: Problem) -> Timeline:
    """Simulate the schedule that a policy makes."""
    return simulate(POLICIES[schedule].make(problem), problem.layers, problem.link)


class Gpt(NamedTuple):
    """A model of Zero Bubble, and how many times as fast as 1F1B its authors' schedule was."""

    name: str
    layers: int
    heads: int
    hidden: int
    microbatch: int
    devices: int
    microbatches: int
    published: float

    def layer(self, kept: float | None = None) -> LayerCosts:
        """Return one layer's costs, by its published FLOP; between dO and dW it keeps ``kept`` sbh bytes."""
        f_s, do_s, dw_s = (x / 156e12 for x in transformer_flop(self.hidden, _WORDS, self.microbatch))
        stored = transformer_activation_bytes(self.hidden, self.heads, _WORDS, self.microbatch)
        size = _WORDS * self.microbatch * self.hidden
        costs = LayerCosts(f_s, do_s, dw_s, activation_bytes=stored, output_bytes=2.0 * size)
        return replace(costs, weight_grad_bytes=kept and kept * size)

    def stages(self, equal: bool) -> list[LayerCosts]:
        """Return one for each device; unless ``equal``, the first and the last have a layer less."""
        layer, most = self.layer(32.0), (self.layers + 2) // self.devices
        counts = [most - (n in (0, self.devices - 1) and not equal) for n in range(self.devices)]
        return [replace(layer.scaled(count), output_bytes=layer.output_bytes) for count in counts]

    def timeline(self, schedule: str, layers: Sequence[LayerCosts], link: Link) -> Timeline:
        return simulated(schedule, Problem(tuple(layers), self.devices, self.microbatches, link))

    def gain(self, schedule: str, layers: Sequence[LayerCosts], link: Link) -> float:
        """Return how many times as fast as 1F1B a schedule is, in repeated steps without a barrier."""
        base_s, ours_s = (self.timeline(name, layers, link).steady_step_s for name in ("1f1b", schedule))
        return base_s / ours_s


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ZB_2P, ZB_V = ([Gpt._make([*of[:-2], of[-1] / of[-2]]) for of in _DATA[name]] for name in ("zb_2p", "zb_v"))


def flop_layers(name: str) -> tuple[LayerCosts, ...]:
    """Return layers whose F, dO and dW take their forward GFLOP each; the first one has no dO."""
    dense = (dense_layer(_BATCH, units_in, units_out) for units_in, units_out in pairwise(_MLP))
    layers = []
    for number, work in enumerate(dense if name == "mlp" else MODELS[name](_BATCH)):
        takes, weights = work.flop()[0] / 1e9, float(work.parameters * work.element_bytes)
        of = LayerCosts(takes, takes if number else 0.0, takes, weight_bytes=weights, inputs=work.inputs)
        layers.append(replace(of, activation_bytes=work.activation_bytes, output_bytes=work.output_bytes))
    return tuple(layers)


def layerpipe_gain(layers: tuple[LayerCosts, ...], processors: int) -> float:
    """Return how many times as fast as PipeDream, whose stages are contiguous layers, LayerPipe is."""
    base = simulated("pipedream", Problem(layers, min(processors, len(layers)), _IN_FLIGHT))
    return base.steady_step_s / simulated("layerpipe", Problem(layers, processors, _IN_FLIGHT)).steady_step_s


def tables() -> dict[str, str]:
    """Return all tables as Markdown."""
    import pandas as pd  # which takes a second

    from benchmarks.report.tables import markdown

    settings = {
        "First and last stage shorter": (False, Link()),
        "Equal stages": (True, Link()),
        "Equal, 200 Gbit/s": (True, Link(bytes_per_s=25e9)),
    }
    zb_h2 = [
        {"Model": of.name, "Devices": of.devices, "Published": of.published}
        | {text: of.gain("zb_h2", of.stages(equal), link) for text, (equal, link) in settings.items()}
        for of in ZB_2P
    ]
    # Embedding and head are a layer each.
    v_shapes = [
        {"Model": of.name, "Devices": of.devices, "ZB-V published": of.published}
        | {name: of.gain(name, [of.layer()] * (of.layers + 2), Link()) for name in V_SHAPES}
        for of in ZB_V
    ]
    gains_of = {name: [layerpipe_gain(flop_layers(name), n) for n in PROCESSORS] for name in WORKLOADS}
    gains = pd.DataFrame(gains_of, index=PROCESSORS).rename_axis("Processors")
    means, most = gains.mean(), gains.loc[7:9].max()
    gains.loc["mean; published: 1.25"], gains.loc["7 to 9, most; published: 1.80"] = means, most
    frames = {"zero-bubble": zb_h2, "v-shapes": v_shapes, "layerpipe": gains.reset_index()}
    return {
        name: markdown(pd.DataFrame(of).map(lambda cell: f"{cell:.2f}" if isinstance(cell, float) else cell))
        for name, of in frames.items()
    }


@click.command()
def planner() -> None:
    """Make the tables of docs/benchmarks/planner.md anew."""
    from benchmarks.report.tables import with_tables

    PAGE.write_text(with_tables(PAGE.read_text(), tables()))
