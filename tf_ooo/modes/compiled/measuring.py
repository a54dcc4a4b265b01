"""Measures the gains of dW beside regions of the main stream, on the user's device within a time budget.

The pairs of largest calculated gain are measured first.  Pairs beyond the budget keep calculated gains,
scaled by the ratio that the measured pairs had.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import runtime
from grappler_passes.compat.graph_protos import split_input
from tf_ooo.compat import nests, tf_functions, xla
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.costs.table import GainTable
from tf_ooo.modes.compiled.calls import Parts, StepToPlan
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
from tf_ooo.planning.building.joint import calculated_gains
from tf_ooo.planning.model.problem import Problem
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
    """Holds the computation of one task: one region of the main stream, or one per gradient of a dW.

    ``kind`` is equal for pieces that take equally long: the same ops on the same shapes.
    """

    task: Task
    regions: tuple[Region, ...]
    kind: str


def piece_of(step: FlatStep, parts: Parts, task: Task) -> Piece | None:
    """Return the piece of a task, or None if no part of it can be timed; F is of the next step.

    Ops with state (reads of variables, counters) are left out of a piece and stand before it.
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
    """Return a digest of ops, attributes, shapes, constants and connections."""
    digest = hashlib.sha256()
    for region in regions:
        names: dict[Port, str] = {}
        for port in region.inputs:
            info, names[port] = step.info(port), f"in{len(names)}"
            digest.update(repr((names[port], info and (info.dtype, info.shape))).encode())
        names |= {port: f"constant {value.tolist()}" for port, value in region.constants.items()}
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
    """Holds ``seconds`` of one round, the median, and ``spread_s``, the median distance from it."""

    seconds: float
    spread_s: float = 0.0


def time_piece(step: FlatStep, main: Piece, aside: Piece | None = None, about_s: float = 0.0) -> Timing:
    """Time one round of about ``about_s``; ``aside``: a dW beside it, in calls on a side stream.

    Inputs are random numbers of the step's shapes.  A round begins when the one before has ended; the cost of
    a round and its launch without a piece is measured, too, and taken off.

    Raises tf.errors.OpError: XLA cannot compile or run it; ValueError: nothing of it is left to time.
    """
    rounds = _FEW_ROUNDS if about_s > _LONG_S else _ROUNDS
    graph_def, specs, fetches = piece_graph(step, main, aside)
    runtime.register_functions(graph_def)
    run = xla.repeated_function(graph_def, specs, fetches, rounds)
    timing = _sampled(run, [_values(spec) for spec in specs.values()])
    rest_s = max(0.0, timing.seconds - _empty_s(rounds))
    return Timing(rest_s / rounds, timing.spread_s / rounds)


def piece_graph(step: FlatStep, main: Piece, aside: Piece | None) -> tuple[Any, dict[str, Any], list[str]]:
    """Return (GraphDef, specs of its inputs, tensors to compute): the main piece inline, the other in calls.

    Raises ValueError: no floating-point result.
    """
    graph_def = GraphDef(versions=step.graph_def.versions, library=step.graph_def.library)
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
    """Return numbers near one; for integers, which may be indices, small ones."""
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
    """Return the seconds of a launch whose rounds do nothing."""
    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="same", op="Identity", input=["given_0:0"])
    node.attr["T"].type = tf.float32.as_datatype_enum
    run = xla.repeated_function(graph_def, {"given_0:0": tf.TensorSpec(())}, ["same:0"], rounds)
    return _sampled(run, [tf.constant(1.0)]).seconds


def launch_s() -> float | None:
    """Return the extra seconds of a small kernel outside of CUDA graphs; None if XLA's flags are fixed.

    A chain of kernels is compiled twice, with and without CUDA graphs.
    """
    if xla.why_flags_are_fixed() is not None:
        return None
    with xla.added(()):
        captured = _chain()
    with xla.added((_NO_GRAPHS,)):
        one_by_one = _chain()
    longer_s = one_by_one.seconds - captured.seconds
    return max(0.0, longer_s / _CHAIN) if longer_s > one_by_one.spread_s + captured.spread_s else 0.0


def _chain() -> Timing:
    def run(x: Any) -> Any:
        for _ in range(_CHAIN):
            (x,) = xla.barrier([x * 0.5 + 1.0])
        return x

    compiled = tf_functions.plain_function(run, [tf.TensorSpec((256,))], compiled=True)
    return _sampled(compiled, [tf.ones((256,))])


_LOG = logging.getLogger("tf_ooo")
_SAY_EVERY_S = 5.0
Pair = tuple[str, int]


class MeasuredGains:
    """Holds the table of a step's gains, which are measured at the first call.

    No further piece is begun after ``budget_s``.  Only with ``delay`` may dW run beside the next step's
    forward pass, and only then is that measured.
    """

    def __init__(
        self, budget_s: float, on_measured: Callable[[GainTable], None] | None = None, delay: bool = False
    ) -> None:
        self.budget_s, self._on_measured, self.delay = budget_s, on_measured, delay
        self._known: dict[tuple[str, ...], GainTable] = {}

    def __call__(self, what: StepToPlan, layers: Sequence[LayerCosts]) -> GainTable:
        """Return the table; steps of other batch sizes have the same layers, and get the same one."""
        key = tuple(layer.name for layer in what.parts.graph.layers)
        if key not in self._known:
            self._known[key] = _Measuring(what, layers, self.budget_s, self.delay).table()
            if self._on_measured is not None:
                self._on_measured(self._known[key])
        return self._known[key]


class _Measuring:
    def __init__(self, what: StepToPlan, layers: Sequence[LayerCosts], budget_s: float, delay: bool) -> None:
        self._piece = functools.cache(functools.partial(piece_of, what.step, what.parts))
        self.step, self.layers, self.budget_s = what.step, layers, budget_s
        saved_s = calculated_gains(Problem(tuple(layers), options={"delay": delay}))
        self._pieces: dict[Pair, tuple[Piece, Piece]] = {}  # (region, dW)
        for pair in saved_s:
            kind, _, layer = pair[0].partition(":")
            main, aside = self._piece(Task(kind, int(layer))), self._piece(Task("dW", pair[1]))
            if main is not None and aside is not None:
                self._pieces[pair] = main, aside
        self.calculated_s = {pair: saved_s[pair] for pair in self._pieces}
        self._timings: dict[tuple[str, str], Timing | None] = {}
        self._started = self._said = time.monotonic()
        self._built = 0

    def table(self) -> GainTable:
        lost_s = launch_s() if self.budget_s else None
        saved_s: dict[Pair, float] = {}
        failed: set[Pair] = set()
        todo = in_order(self.calculated_s)
        for pair in todo:
            if not self._has_time(pair):  # another may be of kinds that are known
                continue
            if (pair_saves_s := self._saved_s(pair)) is None:
                failed.add(pair)
            else:
                saved_s[pair] = pair_saves_s
            self._say(len(saved_s) + len(failed), len(todo))
        rest, factor = self._calculated(saved_s, failed)
        notes = self._notes(saved_s, rest, factor, failed)
        for note in notes:
            _LOG.info("%s", note)
        tasks = (Task(kind, layer) for kind in ("F", "dO", "dW") for layer in range(len(self.layers)))
        alone = {task: self._timings.get((piece.kind, "")) for task in tasks if (piece := self._piece(task))}
        alone_s = {str(task): timing.seconds for task, timing in alone.items() if timing is not None}
        return GainTable(
            {**saved_s, **rest}, xla.device_name(), tuple(notes), alone_s, frozenset(rest), lost_s
        )

    def _has_time(self, pair: Pair) -> bool:
        """Return whether a pair's missing measurements fit in the time if they take as long as others."""
        elapsed_s = time.monotonic() - self._started
        main, aside = self._pieces[pair]
        keys = (main.kind, ""), (aside.kind, ""), (main.kind, aside.kind)
        missing = sum(key not in self._timings for key in keys)
        return not missing or elapsed_s + missing * elapsed_s / max(1, self._built) <= self.budget_s

    def _saved_s(self, pair: Pair) -> float | None:
        """Return the seconds of both alone, less side by side; 0 within the noise; None: not measurable."""
        main, aside = self._pieces[pair]
        main_alone, aside_alone, together = self._timed(main), self._timed(aside), self._timed(main, aside)
        if main_alone is None or aside_alone is None or together is None:
            return None
        saved_s = main_alone.seconds + aside_alone.seconds - together.seconds
        noise_s = main_alone.spread_s + aside_alone.spread_s + together.spread_s
        return saved_s if abs(saved_s) > 2 * noise_s else 0.0

    def _timed(self, main: Piece, aside: Piece | None = None) -> Timing | None:
        key = (main.kind, "" if aside is None else aside.kind)
        if key not in self._timings:
            tasks = [piece.task for piece in (main, aside) if piece is not None]
            about_s = sum(getattr(self.layers[task.stage], SECONDS[task.kind]) for task in tasks)
            try:
                self._timings[key] = time_piece(self.step, main, aside, about_s)
            except Exception as error:  # one that cannot be timed must not stop the others
                _LOG.debug("%s beside %s is not timed", main.task, aside and aside.task, exc_info=error)
                self._timings[key] = None
            self._built += 1
        return self._timings[key]

    def _calculated(
        self, saved_s: Mapping[Pair, float], failed: set[Pair]
    ) -> tuple[dict[Pair, float], float]:
        """Scale the calculated gains of unmeasured pairs by the measured ones; return them and the factor."""
        of_measured_s = sum(self.calculated_s[pair] for pair in saved_s)
        factor = min(1.0, max(0.0, sum(saved_s.values()) / of_measured_s)) if of_measured_s else 1.0
        rest = self.calculated_s.keys() - saved_s.keys() - failed
        return {pair: self.calculated_s[pair] * factor for pair in rest}, factor

    def _say(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_S:
            self._said, elapsed_s = now, now - self._started
            _LOG.info("measuring gains: %d of %d pairs, %.0f of %.0f s", done, of, elapsed_s, self.budget_s)

    def _notes(
        self, saved_s: Mapping[Pair, float], rest: Mapping[Pair, float], factor: float, failed: set[Pair]
    ) -> list[str]:
        took_s = time.monotonic() - self._started
        notes = [
            f"gains: {len(saved_s)} pairs of dW and main stream measured on {xla.device_name()} "
            f"({self._built} pieces compiled, {took_s:.0f} of {self.budget_s:.0f} s)"
        ]
        if rest:
            scaled = f", times {factor:.2f} as the measured ones gained" if saved_s else ""
            notes.append(f"gains: {len(rest)} pairs calculated, there was no time to measure them{scaled}")
        if failed:
            notes.append(f"gains: {len(failed)} pairs cannot be timed and count as no gain")
        if not any(seconds > 0 for seconds in (*saved_s.values(), *rest.values())):
            notes.append("gains: no dW saves time beside the main stream here, all stay on it")
        return notes


def in_order(calculated_s: Mapping[Pair, float]) -> list[Pair]:
    """Return the most promising pair of each dW, then the second of each, and so on; long gains first."""
    long_first = sorted(calculated_s, key=lambda pair: (-calculated_s[pair], pair))
    seen: Counter[int] = Counter()
    rank = {}
    for pair in long_first:
        rank[pair] = seen[pair[1]]
        seen[pair[1]] += 1
    return sorted(long_first, key=rank.__getitem__)
