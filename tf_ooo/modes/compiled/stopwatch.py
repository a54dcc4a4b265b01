"""Seconds of parts of a step, the main stream's regions and the layers' dW, run on the user's own device."""

from __future__ import annotations

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import runtime
from grappler_passes.graph.node_input import split_input
from tf_ooo.compat import nests, tf_functions, xla_flags, xla_functions, xla_nodes
from tf_ooo.modes.compiled.calls import Parts
from tf_ooo.modes.compiled.outline import CALL_PREFIX, call_of
from tf_ooo.modes.compiled.regions import (
    VIEWS,
    FlatStep,
    GraphDef,
    Port,
    Region,
    has_static_borders,
    is_pure,
    region_of,
)
from tf_ooo.planning.model.schedule import Task

# They name or place a node; they do not say what it computes.
_OF_PLACE = frozenset({"_class", "_output_shapes", "_XlaHasReferenceVars"})
# In one launch of a compiled function, which takes longer to start than a small kernel takes.
_ROUNDS, _FEW_ROUNDS = 50, 5
_LONG_S = 1e-3
_SAMPLES, _SAMPLING_S = 5, 0.5
_SIDE_STREAM = 1
_CHAIN = 64
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True)
class Piece:
    """Holds what one task computes: one region of the main stream, or one for each gradient of a dW.

    ``kind`` is equal for pieces that take equally long: the same ops on the same shapes.
    """

    task: Task
    regions: tuple[Region, ...]
    kind: str


def piece_of(step: FlatStep, parts: Parts, task: Task) -> Piece | None:
    """Return the piece of a task, or None where nothing of it can be timed; F is of the next step.

    What has state (variables that are read, counters) is left out of a piece and stands before it.
    """
    regions = parts.regions.get(task.stage, ()) if task.kind == "dW" else _of_main(step, parts, task)
    return Piece(task, tuple(regions), kind_of(step, regions)) if regions else None


def _of_main(step: FlatStep, parts: Parts, task: Task) -> list[Region]:
    names = parts.forward.get(task.stage, ()) if task.kind == "F" else parts.tasks.ops.get(task, ())
    wanted = {name for name in names if step.has(parts.graph, name)}
    ordered = (name for name in parts.graph.ops if name in wanted)
    chosen = tuple(name for name in ordered if is_pure(step, name) and has_static_borders(step, name))
    if all(step.nodes[name].op in VIEWS for name in chosen):
        return []
    region = region_of(step, chosen, chosen)
    return [region] if any(map(step.is_float, region.outputs)) else []


def kind_of(step: FlatStep, regions: Sequence[Region]) -> str:
    """Return a digest of ops, attributes, shapes, constants and what reads what."""
    digest = hashlib.sha256()
    for region in regions:
        names: dict[Port, str] = {}
        for port in region.inputs:
            info = step.info(port)
            names[port] = f"in{len(names)}"
            digest.update(repr((names[port], info and (info.dtype, info.shape))).encode())
        for port, value in region.constants.items():
            names[port] = f"constant {np.asarray(value).tolist()}"
        for number, op in enumerate(region.ops):
            digest.update(_op_text(step.nodes[op], number, names).encode())
        digest.update(repr([names.get(port) for port in region.outputs]).encode())
    return digest.hexdigest()


def _op_text(node: node_def_pb2.NodeDef, number: int, names: dict[Port, str]) -> str:
    reads = [names.get(port, "") for port in map(split_input, node.input) if port[1] >= 0]
    for port in range(32):
        names.setdefault((node.name, port), f"op{number}:{port}")
    attributes: Mapping[str, Any] = node.attr
    said = [
        (key, attributes[key].SerializeToString(deterministic=True))
        for key in sorted(attributes)
        if key not in _OF_PLACE and not key.startswith("_ooo")
    ]
    return repr((node.op, reads, said))


@dataclass(frozen=True)
class Timing:
    """``seconds`` of one round, the median; ``spread_s``: the median distance from it."""

    seconds: float
    spread_s: float = 0.0


def time_piece(step: FlatStep, main: Piece, aside: Piece | None = None, about_s: float = 0.0) -> Timing:
    """Time one round, which may take about so long; ``aside``: a dW beside it, in calls on a side stream.

    Inputs are random numbers of the shapes that the step has.  A round begins when the one before has ended;
    what a round and its launch cost without a piece is measured too and taken off.

    Raises tf.errors.OpError: XLA cannot compile or run it; ValueError: nothing of it is left to time.
    """
    rounds = _FEW_ROUNDS if about_s > _LONG_S else _ROUNDS
    graph_def, specs, fetches = piece_graph(step, main, aside)
    runtime.register_functions(graph_def)
    run = xla_functions.repeated_function(graph_def, specs, fetches, rounds)
    timing = _sampled(run, [_values(spec) for spec in specs.values()])
    rest_s = max(0.0, timing.seconds - _empty_s(rounds))
    return Timing(rest_s / rounds, timing.spread_s / rounds)


def piece_graph(step: FlatStep, main: Piece, aside: Piece | None) -> tuple[Any, dict[str, Any], list[str]]:
    """(GraphDef, specs of its inputs, tensors to compute): the main piece inline, the other in calls.

    Raises ValueError: no floating-point result.
    """
    import tensorflow as tf

    graph_def = GraphDef(versions=step.graph_def.versions)
    graph_def.library.CopyFrom(step.graph_def.library)
    names: dict[Port, str] = {}
    fetches: list[str] = []
    side = [(region, True) for region in (aside.regions if aside is not None else ())]
    for number, (region, streamed) in enumerate([*side, *((region, False) for region in main.regions)]):
        for port in region.inputs:
            names.setdefault(port, f"given_{len(names)}")
        name, inputs = f"{CALL_PREFIX}_timed_{number}", [f"{names[port]}:0" for port in region.inputs]
        function, node = call_of(step, name, region, inputs, _SIDE_STREAM if streamed else None)
        graph_def.library.function.append(function)
        graph_def.node.append(node)
        results = enumerate(region.outputs)
        fetches += [f"{name}:{output}" for output, port in results if step.is_float(port)]
    if not fetches:
        raise ValueError(f"{main.task}: no floating-point result to wait for")
    infos = {name: step.known(port) for port, name in names.items()}
    specs = {f"{name}:0": tf.TensorSpec(info.shape, info.dtype) for name, info in infos.items()}
    return graph_def, specs, fetches


def _values(spec: Any) -> Any:
    """Return numbers of about one; small whole numbers, which may be indices."""
    import tensorflow as tf

    if spec.dtype.is_bool:
        return tf.ones(spec.shape, tf.bool)
    if spec.dtype.is_integer:
        numbers = tf.random.stateless_uniform(spec.shape, (1, 2), 0, 8, tf.int32)
    else:
        numbers = tf.random.stateless_uniform(spec.shape, (1, 2), 0.5, 1.0)
    return tf.cast(numbers, spec.dtype)


def _sampled(run: Callable[..., Any], given: Sequence[Any]) -> Timing:
    """Time whole launches, after one that compiles and one that warms up."""
    for _ in range(2):
        nests.synchronize(run(*given))
    taken: list[float] = []
    while len(taken) < _SAMPLES and sum(taken) < _SAMPLING_S:
        started = time.perf_counter()
        nests.synchronize(run(*given))
        taken.append(time.perf_counter() - started)
    middle_s = statistics.median(taken)
    return Timing(middle_s, statistics.median(abs(time_s - middle_s) for time_s in taken))


@functools.cache
def _empty_s(rounds: int) -> float:
    """Return seconds of a launch whose rounds do nothing."""
    import tensorflow as tf

    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="same", op="Identity", input=["given_0:0"])
    node.attr["T"].type = tf.float32.as_datatype_enum
    run = xla_functions.repeated_function(graph_def, {"given_0:0": tf.TensorSpec(())}, ["same:0"], rounds)
    return _sampled(run, [tf.constant(1.0)]).seconds


def launch_s() -> float | None:
    """Seconds that a small kernel takes longer outside of CUDA graphs; None where XLA's flags are fixed.

    A chain of kernels is compiled twice, as XLA does it and without graphs.
    """
    if xla_flags.why_flags_are_fixed() is not None:
        return None
    with xla_flags.added(()):
        captured = _chain()
    with xla_flags.added((_NO_GRAPHS,)):
        one_by_one = _chain()
    longer_s = one_by_one.seconds - captured.seconds
    return max(0.0, longer_s / _CHAIN) if longer_s > one_by_one.spread_s + captured.spread_s else 0.0


def _chain() -> Timing:
    import tensorflow as tf

    def run(x: Any) -> Any:
        for _ in range(_CHAIN):
            (x,) = xla_nodes.barrier([x * 0.5 + 1.0])
        return x

    return _sampled(
        tf_functions.plain_function(run, [tf.TensorSpec((256,))], compiled=True), [tf.ones((256,))]
    )
