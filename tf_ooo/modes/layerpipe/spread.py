"""A model's step, spread over rounds: everything between the plan and the functions that run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grappler_passes.graph.effects import has_side_effects, states_of
from tf_ooo.compat import keras_optimizers, keras_variables
from tf_ooo.errors import BackendError
from tf_ooo.modes.layerpipe.coalesce import Sum, with_sums, with_whole_reads
from tf_ooo.modes.layerpipe.delays import Delays, delays_of
from tf_ooo.modes.layerpipe.divide import divided, with_shared_grads
from tf_ooo.modes.layerpipe.frozen import frozen_weights
from tf_ooo.modes.layerpipe.rates import rate_reads, with_factors
from tf_ooo.modes.layerpipe.rounds import ClassifiedStep, Rounds, rounds_of
from tf_ooo.modes.layerpipe.stages import Stages
from tf_ooo.modes.layerpipe.ticks import Ticks
from tf_ooo.modes.layerpipe.traced import Traced, trace
from tf_ooo.modes.layerpipe.two_versions import TwoVersions
from tf_ooo.modes.layerpipe.versions import Now, with_later_weights
from tf_ooo.tracing.optimizers import optimizers_of

_WHOLE = ("int32", "int64")


@dataclass(frozen=True)
class Spread:
    """A step over rounds.

    Attributes:
        traced, rounds, delays, ticks: its parts.
        stages: where its tasks run, with the dO that are divided.
        notes: what could not be done as planned.
    """

    traced: Traced
    rounds: Rounds
    delays: Delays
    ticks: Ticks
    stages: Stages
    notes: tuple[str, ...] = ()


def refuse_unspreadable(
    model: Any, traced: Traced, rate_warmup_steps: int | None, accumulate_steps: int | None
) -> None:
    """Raises what :func:`spread` would, as far as that needs no plan."""
    if rate_warmup_steps is not None:
        rate_reads(traced, _learning_rate(model, traced))
    if accumulate_steps is not None:
        trained = _trained(traced)
        with_sums(with_whole_reads(traced, trained), trained)


def spread(
    model: Any,
    batch: Any,
    stages: Stages,
    devices: Sequence[str],
    weights: str,
    op_seconds: Mapping[str, float],
    rate_warmup_steps: int | None = None,
    accumulate_steps: int | None = None,
    layers: Sequence[Collection[str]] | None = None,
    data_spec: Any = None,
    dump_dir: Path | None = None,
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
        accumulate_steps: see ``two_versions``; None: each batch has its own update.
        layers: the variables of each, as the stages number them.
        data_spec, dump_dir: see ``trace``.

    Raises:
        GraphError: the step cannot be spread; says which op is in the way.
        PassError: a pass has made something else than it declares.
    """
    traced = trace(model, batch, accumulate_steps is not None, layers, data_spec, dump_dir)
    trained = _trained(traced)
    again = _read_again(traced, trained)
    traced, stages, notes = divided(traced, stages, op_seconds)
    traced, stages = with_shared_grads(traced, stages)
    late: set[int] = set()
    if rate_warmup_steps is not None:
        traced, late = with_factors(traced, stages, _learning_rate(model, traced))
    now: tuple[Now, ...] = ()
    sums: tuple[Sum, ...] = ()
    together = accumulate_steps is not None
    if together:
        traced, sums = with_sums(with_whole_reads(traced, trained), trained)
    if weights != "stash" or together:
        traced, now = with_later_weights(traced, trained, stages)
    optimizer = _of_optimizers(model, traced) if together else set()
    # With one update for several batches: where it is known whether a batch is the last of all.
    count_round = stages.processors - 1 if together else 0
    wanted = {weight.name: weight.round for weight in now}
    wanted |= dict.fromkeys(_counts(traced, optimizer), count_round)
    rounds = rounds_of(_facts(model, traced, trained, now, devices, count_round), stages, wanted)
    delays = delays_of(traced, rounds, dump_dir)
    versions = None
    if accumulate_steps is not None:
        versions = TwoVersions(traced, rounds, now, sums, trained.keys(), optimizer, accumulate_steps)
    count = keras_variables.value_of(model.optimizer.iterations) if late else None
    averages, warmup_steps = weights == "ema", rate_warmup_steps or 1
    ticks = Ticks(traced, rounds, delays, now, averages, late, warmup_steps, count, versions)
    return Spread(traced, rounds, delays, ticks, stages, (*notes, *again))


def _trained(traced: Traced) -> dict[str, int]:
    """The layer of each weight, by its handle."""
    handles = {variable.name: variable.handle for variable in traced.graph.variables}
    return {handles[name]: layer.index for layer in traced.graph.layers for name in layer.variables}


def _read_again(traced: Traced, trained: Collection[str]) -> list[str]:
    """What a backward pass does that reads its weights itself (recomputation): they have changed by then."""
    index = traced.index
    layers = {
        traced.where[name][1]
        for i, name in enumerate(index.names)
        if index.ops[i] == "ReadVariableOp"
        and traced.where.get(name, ("",))[0] in ("dO", "dW")
        and states_of(index, i) & set(trained)
    }
    return [
        f"the backward pass of {traced.graph.layers[layer].name} reads its weights again (recomputation): it "
        "sees later ones than its forward pass, also with weights='stash'"
        for layer in sorted(layers)
    ]


def _facts(
    model: Any,
    traced: Traced,
    trained: Mapping[str, int],
    now: Sequence[Now],
    devices: Sequence[str],
    count_round: int,
) -> ClassifiedStep:
    handles = frozenset(n for n, tensor in traced.captured.items() if tensor.dtype.name == "resource")
    return ClassifiedStep(
        index=traced.index,
        where=traced.where,
        weights=trained,
        arguments=frozenset((*traced.arguments, *(weight.name for weight in now))),
        handles=handles,
        home={name: traced.captured[name].device for name in handles},
        devices=devices,
        shapes=frozenset(
            name
            for name in traced.index.names
            if _is_whole(traced.outputs[name]) and name not in traced.arguments
        ),
        frozen=frozen_weights(model, traced) - trained.keys(),
        count_round=count_round,
    )


def _of_optimizers(model: Any, traced: Traced) -> set[str]:
    """The placeholders of their variables."""
    values = (
        keras_variables.value_of(variable)
        for optimizer in optimizers_of(model)
        for variable in keras_optimizers.state_of(optimizer)
    )
    handles = {id(value.handle) for value in values if value is not None}
    return {name for name, outside in traced.captured.items() if id(outside) in handles}


def _counts(traced: Traced, optimizer: Collection[str]) -> list[str]:
    """The ops that no layer's update has on the optimizers' variables: on the counts of steps."""
    index = traced.index
    return [
        name
        for i, name in enumerate(index.names)
        if name not in traced.where
        and has_side_effects(index.ops[i])
        and states_of(index, i) & set(optimizer)
    ]


def _learning_rate(model: Any, traced: Traced) -> str | None:
    """The placeholder of its variable; None where it has none."""
    if len(optimizers_of(model)) != 1:
        raise BackendError("rate_warmup_steps= needs a model with one optimizer")
    handle = keras_optimizers.learning_rate_handle(model.optimizer)
    return next((name for name, outside in traced.captured.items() if outside is handle), None)


def _is_whole(infos: Sequence[Any]) -> bool:
    return bool(infos) and all(info.dtype in _WHOLE for info in infos)
