"""Finds the seconds of each op: measured by TensorFlow's profiler while training runs, else from shapes.

At most three of the first fifty steps are traced: later the executor makes no events for cheap ops.  On a GPU
an op takes the seconds of its kernels; on a CPU it takes its thread's, each second divided among the threads
that compute.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from grappler_passes.graph import sizes
from grappler_passes.graph.training_graph import Tasks, TrainingGraph, backward_tasks, forward_layers
from tf_ooo.compat import nests, tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.costs.analytic import FREE_OPS, analytic_ops
from tf_ooo.costs.devices import DeviceModel, device
from tf_ooo.costs.from_graph import graph_costs, places
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OOOError, OptionsError
from tf_ooo.units import Places, count_text

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


MOST_STEPS = 3
# This is TensorFlow's grammar for node names, and for op types ("_MklMatMul" and the like are private ones).
_EVENT = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_.\\/>-]*):(_?[A-Za-z]\w*)")
_GPU_PLANE = "/device:GPU"
# These threads run tf.data's functions.
_INPUT_THREADS = "tf_data"


@dataclass(frozen=True)
class OpProfile:
    """Holds for each op that ran its median seconds per step, and its type.

    ``overhead_s``: starting and stopping the profiler and reading the trace.  ``core_s``: for ops on a CPU,
    the seconds of all busy cores together.
    """

    seconds: Mapping[str, float]
    types: Mapping[str, str]
    steps: int
    step_s: float
    overhead_s: float
    core_s: Mapping[str, float] = field(default_factory=dict)


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StepProfiler:
    """Traces the next 1 to 3 steps run through it; ``profile`` then holds the result."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
            raise OptionsError(f"steps must be 1 to {MOST_STEPS}, got {steps!r}")
        self.steps = steps
        self.profile: OpProfile | None = None
        self._events: list[TracedEvent] = []
        self._stack = contextlib.ExitStack()
        self._done = 0
        self._overhead_s = 0.0

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, wait for it, return its result.  BackendError: the profiler is in use."""
        if self.profile is not None:
            return step(*args, **kwargs)
        if not self._done:
            started = time.perf_counter()
            self._stack.enter_context(tf_profiler.traced_events(self._events))
            self._overhead_s = time.perf_counter() - started
        try:
            with tf_profiler.mark_step(self._done):
                outputs = step(*args, **kwargs)
                nests.synchronize(outputs)
        except BaseException as error:
            self._done = 0
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        self._done += 1
        if self._done == self.steps:
            self.profile = self._finish()
        return outputs

    def run_anyway(self, step: Callable[[], Any], failed: Callable[[OOOError], None]) -> Any:
        """Run one step exactly once, even if it cannot be traced: ``failed`` is told why."""
        once = functools.cache(step)
        try:
            return self.run(once)
        except OOOError as error:
            failed(error)
            return once()

    def close(self) -> None:
        """End a trace that got too few steps; its events are dropped."""
        self._stack.close()
        self._events.clear()
        self._done = 0

    def _finish(self) -> OpProfile:
        started = time.perf_counter()
        self._stack.close()
        profile = read_profile(self._events)
        self._events.clear()
        return replace(profile, overhead_s=self._overhead_s + time.perf_counter() - started)


def profile_ops(step: Callable[[], Any], steps: int = MOST_STEPS) -> OpProfile:
    """Run ``step``, a whole training step, once without and ``steps`` times with the profiler."""
    profiler = StepProfiler(steps)
    nests.synchronize(step())
    while profiler.profile is None:
        profiler.run(step)
    return profiler.profile


def read_profile(events: Iterable[TracedEvent]) -> OpProfile:
    """Sum up a trace in which every step is marked.  CostError if it has no step or no op."""
    events = list(events)
    steps = (event for event in events if event.label.partition("#")[0] == tf_profiler.STEP_MARK)
    marks = sorted((step.begin_s, step.duration_s) for step in steps)
    if not marks:
        raise CostError("the profile has no step in it")
    # Ops run one after the other, and overlap a little.
    return _summed_up(events, marks, lambda threads, parts: 1.0 / threads)


def read_side_by_side(events: Iterable[TracedEvent]) -> OpProfile:
    """Read one execution whose ops run on several devices side by side, all events of one host.

    An op counts as if it had the cores to itself.  CostError if there is no op.
    """
    events = list(events)
    begin_s = min((event.begin_s for event in events), default=0.0)
    end_s = max((event.begin_s + event.duration_s for event in events), default=0.0)
    return _summed_up(events, [(begin_s, end_s - begin_s)], _undisturbed)


def _summed_up(events: list[TracedEvent], marks: list[tuple[float, float]], rate: _Rate) -> OpProfile:
    # Functions of tf.data may have ops with the same names as ours.
    own = [event for event in events if not event.line.startswith(_INPUT_THREADS)]
    ops = [(match[1], match[2], event) for event in own if (match := _EVENT.fullmatch(event.label))]
    on_gpu = {name for name, _, event in ops if event.plane.startswith(_GPU_PLANE)}
    op_events = [event for _, _, event in ops]
    pool = tf_profiler.pool_work(events)
    share_s = _seconds_at(rate, op_events, pool)
    core_s = _seconds_at(_of_cores, op_events, pool)
    sums, core_sums = ([defaultdict[str, float](float) for _ in marks] for _ in range(2))
    types: dict[str, str] = {}
    for (name, op_type, event), seconds, of_cores_s in zip(ops, share_s, core_s, strict=True):
        # If an op has kernels on a GPU, the CPU's event only launches them.
        if name in on_gpu and not event.plane.startswith(_GPU_PLANE):
            continue
        if (number := _step_of(event, marks)) is not None:
            sums[number][name] += seconds
            types[name] = op_type
            if name not in on_gpu:
                core_sums[number][name] += of_cores_s
    if not types:
        raise CostError(
            "the profile has no op in it: the step runs no TensorFlow graph, or one compiled by XLA, "
            "or it ran too often before"
        )
    step_s = statistics.median(duration for _, duration in marks)
    return OpProfile(medians(sums), types, len(marks), step_s, 0.0, medians(core_sums))


def medians(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each op's median over the steps in which it ran."""
    names = sorted({name for of_step in sums for name in of_step})
    return {name: statistics.median(s[name] for s in sums if name in s) for name in names}


# A rate says what a second counts for an op while threads run ops and others work on parts of one.
_Rate = Callable[[int, int], float]


def _at_work(threads: int, parts: int) -> float:
    """Return the threads at work: one whose op is divided among others counts half, because it computes a
    part itself or waits for them (Eigen does either, oneDNN waits)."""
    return max(threads, parts) + min(threads, parts) / 2


def _of_cores(threads: int, parts: int) -> float:
    """Return an op's share in the seconds of all cores together."""
    return min(_at_work(threads, parts), usable_cores()) / threads


def _undisturbed(threads: int, parts: int) -> float:
    """Return the part of a second in which a thread runs: if threads outnumber cores, each waits in turn."""
    return min(1.0, usable_cores() / _at_work(threads, parts))


def _seconds_at(
    rate: _Rate, events: list[TracedEvent], within_ops: Sequence[TracedEvent] = ()
) -> list[float]:
    """Return each event's seconds at that rate; ``within_ops``: when threads worked on parts of ops."""
    on_cpu = [(event, True) for event in events if not event.plane.startswith(_GPU_PLANE)]
    changes: list[tuple[float, int, str, bool]] = []
    for event, runs_op in (*on_cpu, *((part, False) for part in within_ops)):
        changes.append((event.begin_s, 1, event.line, runs_op))
        changes.append((event.begin_s + event.duration_s, -1, event.line, runs_op))
    under_way: Counter[str] = Counter()  # by thread: an op may call a function of other ops
    within: Counter[str] = Counter()
    share_s, before_s, got = 0.0, 0.0, {}
    for now_s, change, line, runs_ops in sorted(changes):
        threads = sum(count > 0 for count in under_way.values())
        parts = sum(count > 0 for count in within.values())
        share_s += rate(threads, parts) * (now_s - before_s) if threads else 0.0
        got[now_s], before_s = share_s, now_s
        (under_way if runs_ops else within)[line] += change
    return [
        got[e.begin_s + e.duration_s] - got[e.begin_s] if not e.plane.startswith(_GPU_PLANE) else e.duration_s
        for e in events
    ]


def _step_of(event: TracedEvent, marks: list[tuple[float, float]]) -> int | None:
    """Return the step in which an event began, or None; a GPU's event between two steps is the first's."""
    number = bisect.bisect_right(marks, (event.begin_s, math.inf)) - 1
    if number < 0:
        return None
    start_s, duration_s = marks[number]
    is_late = event.begin_s > start_s + duration_s
    return None if is_late and not event.plane.startswith(_GPU_PLANE) else number


_NAMED = 5


@dataclass(frozen=True)
class OpSeconds:
    """Holds seconds by node name, and their ``source`` as in CostTable."""

    seconds: Mapping[str, float]
    source: str
    notes: tuple[str, ...] = ()


def op_seconds(
    graph_def: graph_pb2.GraphDef,
    on: DeviceModel,
    profile: OpProfile | None = None,
    whose: Places | None = None,
) -> OpSeconds:
    """Return measured seconds, else calculated ones. An op in a loop gets the seconds of all iterations, if
    their number is known. An op that oneDNN merged after planning counts as not measured.

    ``whose`` tells the layers of ops for notes; None: notes have the ops' names.
    """
    whose = whose or Places({})
    # TensorFlow infers no shapes for what goes around a loop: the shapes that enter the loop are taken.
    outputs = sizes.outputs_with_sizes(graph_def, sizes.KnownShapes()) if sizes.has_loops(graph_def) else None
    analytic, times = analytic_ops(graph_def, on, outputs), sizes.iterations_of_ops(graph_def)
    calculated = {name: each_s * times.get(name, 1) for name, each_s in analytic.seconds.items()}
    measured = profile.seconds if profile else {}
    computing = [node.name for node in graph_def.node if node.op not in FREE_OPS]
    known = {**calculated, **measured}
    seconds = {node.name: known[node.name] for node in graph_def.node if node.name in known}
    filled = [n for n in computing if n not in measured and n in calculated]
    # Ops that wait for data take time from the data pipeline, not from the step.
    waiting = {node.name for node in graph_def.node if node.op in sizes.ITERATORS}
    missing = [n for n in computing if n not in known and n not in waiting]
    notes = []
    if profile and filled:
        total_s = sum(calculated[n] for n in filled)
        notes.append(
            f"{len(filled)} of {len(computing)} ops were not measured; their {total_s * 1e3:.3g} ms are "
            f"calculated for {on.name or 'the device given'}: {whose.listed(filled)}"
        )
    if missing:
        reasons = "; ".join(dict.fromkeys(whose.told(analytic.unknown[n]) for n in missing[:_NAMED]))
        more = " ..." if len(missing) > _NAMED else ""
        notes.append(f"{count_text(len(missing), 'op')} counted as taking no time: {reasons}{more}")
    source = "analytic" if not profile else "mixed" if filled else "measured"
    return OpSeconds(seconds, source, tuple(notes))


def step_costs(
    graph_def: graph_pb2.GraphDef,
    graph: TrainingGraph,
    profile: OpProfile | None,
    tasks: Tasks | None = None,
    forward: Mapping[str, int] | None = None,
    factor: float = 1.0,
    on: DeviceModel | None = None,
) -> CostTable:
    """Return the costs of a step's layers, and the seconds of its ops, times ``factor``.

    Ops without measurement are calculated for the device ``on``; None: for a core of a usual CPU. Ops that
    the profile does not show and that no formula knows count as 0, and a note names them: waiting for the
    next batch, ops that oneDNN has merged with another.
    """
    tasks = backward_tasks(graph).ops if tasks is None else tasks
    forward = forward_layers(graph) if forward is None else forward
    seconds = op_seconds(graph_def, on or device("cpu-core"), profile, places(graph, tasks, forward))
    in_graph = {name: seconds.seconds.get(name, 0.0) * factor for name in graph.ops}
    costs = graph_costs(graph, in_graph, tasks, forward)
    notes = (*seconds.notes, *costs.notes)
    return CostTable(costs.layers, source=seconds.source, op_seconds=in_graph, notes=notes)
