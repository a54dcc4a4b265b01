"""A model's step, spread over rounds: everything between the plan and the functions that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_ooo.layerpipe import compat as mode_compat
from tf_ooo.layerpipe.delays import Delays, delays_of
from tf_ooo.layerpipe.divide import divided, with_shared_grads
from tf_ooo.layerpipe.rates import with_factors
from tf_ooo.layerpipe.rounds import Facts, Rounds, rounds_of
from tf_ooo.layerpipe.stages import Stages
from tf_ooo.layerpipe.ticks import Ticks
from tf_ooo.layerpipe.traced import Traced, trace
from tf_ooo.layerpipe.versions import Now, with_later_weights
from tf_ooo.pipeline.compat import value_of

_WHOLE = ("int32", "int64")


@dataclass(frozen=True)
class Spread:
    """A step over rounds.

    Attributes:
        traced, rounds, delays, ticks: its parts.
        notes: what could not be done as planned.
    """

    traced: Traced
    rounds: Rounds
    delays: Delays
    ticks: Ticks
    notes: tuple[str, ...] = ()


def spread(
    model: Any,
    batch: Any,
    stages: Stages,
    devices: Sequence[str],
    weights: str,
    op_seconds: Mapping[str, float],
    rate_warmup_steps: int | None = None,
) -> Spread:
    """Traces a model's step and spreads it; its variables are on their devices.

    Args:
        model: built, with built optimizers.
        batch: an example.
        stages: where the tasks of its layers run.
        devices: of the processors.
        weights: see ``versions``.
        op_seconds: of the step's ops, where measured: which op of a dO is worth dividing.
        rate_warmup_steps: see ``rates``; None: learning rates are as they are.

    Raises:
        GraphError: the step cannot be spread; says which op is in the way.
    """
    traced = trace(model, batch)
    traced, notes = divided(traced, stages, op_seconds)
    traced, stages = with_shared_grads(traced, stages)
    of_variable = {variable.name: variable.handle for variable in traced.graph.variables}
    trained = {of_variable[name]: layer.index for layer in traced.graph.layers for name in layer.variables}
    late: set[int] = set()
    if rate_warmup_steps is not None:
        traced, late = with_factors(traced, stages, _learning_rate(model, traced))
    now: tuple[Now, ...] = ()
    if weights != "stash":
        traced, now = with_later_weights(traced, trained, stages)
    facts = _facts(traced, trained, now, devices)
    rounds = rounds_of(facts, stages, {one.name: one.round for one in now})
    delays = delays_of(traced, rounds)
    count = value_of(model.optimizer.iterations) if late else None
    ticks = Ticks(
        traced,
        rounds,
        delays,
        now,
        averages=weights == "ema",
        late=late,
        warmup_steps=rate_warmup_steps or 1,
        count=count,
    )
    return Spread(traced, rounds, delays, ticks, notes)


def _facts(traced: Traced, trained: Mapping[str, int], now: Sequence[Now], devices: Sequence[str]) -> Facts:
    handles = frozenset(n for n, tensor in traced.captured.items() if tensor.dtype.name == "resource")
    return Facts(
        index=traced.index,
        where=traced.where,
        weights=trained,
        arguments=frozenset((*traced.arguments, *(one.name for one in now))),
        handles=handles,
        home={name: traced.captured[name].device for name in handles},
        devices=devices,
        shapes=frozenset(
            name
            for name in traced.index.names
            if _is_whole(traced.outputs[name]) and name not in traced.arguments
        ),
    )


def _learning_rate(model: Any, traced: Traced) -> str | None:
    handle = mode_compat.learning_rate_handle(model.optimizer)
    return next((name for name, outside in traced.captured.items() if outside is handle), None)


def _is_whole(infos: Sequence[Any]) -> bool:
    return bool(infos) and all(info.dtype in _WHOLE for info in infos)
