"""A model's step, spread over rounds: everything between the plan and the functions that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tf_ooo.modes.layerpipe.accesses import accesses
from tf_ooo.modes.layerpipe.averages import LaterWeights
from tf_ooo.modes.layerpipe.delays import Delays, delays_of
from tf_ooo.modes.layerpipe.divide import divided, with_shared_grads
from tf_ooo.modes.layerpipe.frozen import frozen_weights
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.rounds import Retiming, Rounds
from tf_ooo.modes.layerpipe.stages import Stages
from tf_ooo.modes.layerpipe.ticks import Ticks
from tf_ooo.modes.layerpipe.traced import Traced, trace
from tf_ooo.modes.layerpipe.versions import LaterWeight, with_later_weights

if TYPE_CHECKING:
    import keras

_TIMED = 100


@dataclass(frozen=True)
class SpreadPlan:
    """Says where each part of a model runs; stays for the fits of one model.

    Attributes:
        stages: where the tasks of its layers run.
        devices: full names of the processors.
        layers: the variables of each, as the stages number them.
        op_seconds: of the step's ops, where measured: which op of a dO is worth dividing.
        home: the processor of each variable, by its name in graphs: of weights and their slots that of dW, of
            states that of F.
        step_s: seconds of the rounds in which nothing was traced, the last hundred.
    """

    stages: Stages
    devices: Sequence[str]
    layers: Sequence[Collection[str]] | None = None
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    home: Mapping[str, int] = field(default_factory=dict)
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))


@dataclass(frozen=True)
class Spread:
    """A step over rounds; ``stages``: as they became, ``notes``: what could not be done as planned."""

    traced: Traced
    rounds: Rounds
    delays: Delays
    ticks: Ticks
    stages: Stages
    notes: tuple[str, ...] = ()


def spread(
    model: keras.Model, batch: object, plan: SpreadPlan, options: LayerPipe, data_spec: object = None
) -> Spread:
    """Traces a model's step and spreads it; its variables are on their devices.

    Raises:
        GraphError: the step cannot be spread; says which op is in the way.
        PassError: a pass has made something else than it declares.
    """
    traced = trace(model, batch, plan.layers, data_spec, options.dump_dir)
    trained = _trained(traced)
    again = _read_again(traced, trained)
    traced, stages, notes = divided(traced, plan.stages, plan.op_seconds)
    traced, stages = with_shared_grads(traced, stages)
    placeholders: tuple[LaterWeight, ...] = ()
    if options.weights != "stash":
        traced, placeholders = with_later_weights(traced, trained, stages)
    retiming = Retiming(
        traced,
        stages,
        plan.devices,
        weights=trained,
        given={*traced.arguments, *(weight.name for weight in placeholders)},
        unchanged=frozen_weights(model, traced) - trained.keys(),
        wanted={weight.name: weight.round for weight in placeholders},
    )
    rounds = retiming.rounds()
    delays = delays_of(traced, rounds)
    weights = LaterWeights(traced, rounds, placeholders, options.weights == "ema")
    ticks = Ticks(traced, rounds, delays, weights)
    return Spread(traced, rounds, delays, ticks, stages, (*notes, *again))


def _trained(traced: Traced) -> dict[str, int]:
    """Return the layer of each weight, by its handle."""
    handles = {variable.name: variable.handle for variable in traced.graph.variables}
    return {handles[name]: layer.index for layer in traced.graph.layers for name in layer.variables}


def _read_again(traced: Traced, trained: Collection[str]) -> list[str]:
    """Name backward passes that read their weights again (recomputation): they have changed by then."""
    weights = set(trained)
    places = (
        traced.where.get(access.name, ("", 0))
        for access in accesses(traced.index)
        if access.op == "ReadVariableOp" and access.states & weights
    )
    return [
        f"the backward pass of {traced.graph.layers[layer].name} reads its weights again (recomputation): it "
        "sees later ones than its forward pass, also with weights='stash'"
        for layer in sorted({layer for kind, layer in places if kind in ("dO", "dW")})
    ]
