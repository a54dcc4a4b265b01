"""Describes what was done to the graph of a step, fills a report with it, and makes the graph run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from grappler_passes.graph.dependencies import WOULD_CLOSE_A_CYCLE
from grappler_passes.graph.training_graph import TrainingGraph, unknown_sizes
from grappler_passes.passes.base import Note
from grappler_passes.passes.rewrite_plan import CLOSES_A_CYCLE
from tf_ooo.compat import nests
from tf_ooo.compat.func_graphs import OptimizedGraph
from tf_ooo.errors import GraphError
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.report.parts import Rewritten, StepOps
from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerRow
from tf_ooo.rewriting.compile_tasks import COMPILED, LEFT
from tf_ooo.rewriting.task_calls import TaskKey
from tf_ooo.units import Places

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

    from tf_ooo.rewriting.step_graph import StepGraph


@dataclass(frozen=True)
class Orders:
    """Holds the planned order of a step's ops and TensorFlow's own, to check a memory limit with.

    ``open_sizes``: inputs of another size may come without a new trace.
    """

    planned: tuple[str, ...]
    stock: tuple[str, ...]
    stock_peak_bytes: int
    open_sizes: bool


@dataclass(frozen=True)
class CompiledTasks:
    """Holds the ops of each call that XLA compiles, by its name, and how many functions the calls share.

    ``left`` counts the ops of tasks that run by themselves, by the reason; ``why_not`` is what XLA says of
    the first task that it refused.
    """

    calls: Mapping[str, Sequence[str]]
    functions: int
    left: Mapping[str, int]
    why_not: str = ""

    @classmethod
    def of(cls, notes: Iterable[Note]) -> CompiledTasks:
        """Collect what the pass has noted."""
        calls: dict[str, Sequence[str]] = {}
        functions: set[str] = set()
        left: Counter[str] = Counter()
        for note in notes:
            if note.status == COMPILED:
                calls[note.nodes[0]] = note.nodes[1:]
                functions.add(note.reason)
            elif note.status == LEFT:
                left[note.reason.partition(":")[0]] += int(note.nodes[0])
        return cls(calls, len(functions), left)

    @property
    def text(self) -> str:
        """Say how much is compiled, and what is not."""
        ops = sum(map(len, self.calls.values()))
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left.items()))
        said = f"{ops} ops in {len(self.calls)} calls of {self.functions} functions"
        said = f"{said}; op by op: {left}" if left else said
        return f"{said} ({self.why_not})" if self.why_not else said


@dataclass(frozen=True)
class RewriteResult:
    """Holds a rewritten graph, and what was done to it.

    Attributes:
        training_graph: the step as it was classified; the last one if a graph holds several.
        moved_ops: the number of ops in tasks that wait for an added control edge, or run on another stream.
        added_edges: the number of control edges, or barriers, that were added.
        plan_seconds: seconds from the graph's arrival to the rewritten one.
        mixed: ops that compute dO and dW together, each with the reason why they were not taken apart.
        notes: what was left out, for the report.
        orders: given only with a memory limit.
        step: the step before the rewrite, if it may be rewritten again; compiled: what XLA compiles, if any.
        tasks: the tasks of ops, if XLA may be given them later.
    """

    training_graph: TrainingGraph
    schedule: Schedule
    graph_def: graph_pb2.GraphDef
    moved_ops: int
    added_edges: int
    plan_seconds: float
    mixed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    orders: Orders | None = None
    step: StepGraph | None = None
    compiled: CompiledTasks | None = None
    tasks: Mapping[str, TaskKey] = field(default_factory=dict)
    modified: ClassVar[bool] = True  # ops are at least annotated


# Passes note these; a note on what was done as planned is no news.
_SKIPPED, _MIXED = "skipped", "mixed"
_OWN_ORDER = "left in TensorFlow's own order, as "
_EACH_OTHER, _IN_A_LOOP = "they would wait for each other", "a loop or a condition lies between them"


def fill_plan(report: Report, result: RewriteResult | None) -> None:
    """Copy what a rewrite found into the report."""
    if result is None or report.rewritten_graph is result.graph_def:
        return
    clear_plan(report)
    graph, schedule, notes = result.training_graph, result.schedule, result.notes
    report.notes[:] = [*notes, *(note for note in report.notes if note not in notes)]
    unknown = len(unknown_sizes(graph))
    scheduled = set(schedule.tasks)
    layers = [
        replace(LayerRow.of(layer), own_dO=Task("dO", layer.index) in scheduled) for layer in graph.layers
    ]
    report.put(replace(StepOps.of(graph, layers), mixed=dict(result.mixed)))
    report.put(Rewritten(result.moved_ops, result.added_edges, result.graph_def, notes))
    report.change(
        planned=schedule,
        plan_seconds=result.plan_seconds,
        predicted_peak_bytes=None if unknown else schedule.predicted_peak_bytes,
        peak_rows=None,
        unknown_size_ops=unknown,
    )


def told(whose: Callable[[], Places], notes: Iterable[Note], texts: Iterable[str] = ()) -> tuple[str, ...]:
    """Say what passes and plans could not do, for users: each once, with layers instead of ops."""
    said: list[tuple[str, tuple[str, ...]]] = [(text, ()) for text in texts]
    unordered: dict[str, list[str]] = {}
    for note in notes:
        if note.status == _SKIPPED:  # in words without talk of graphs
            circle = note.reason.endswith((CLOSES_A_CYCLE, WOULD_CLOSE_A_CYCLE))
            unordered.setdefault(_EACH_OTHER if circle else _IN_A_LOOP, []).extend(note.nodes)
        elif note.status == _MIXED:
            said.append((f"not taken apart: {note.reason}", note.nodes))
    said += [(_OWN_ORDER + why, tuple(nodes)) for why, nodes in unordered.items()]
    if not said:
        return ()
    places = whose()
    return tuple(dict.fromkeys(places.told(text, names) for text, names in said))


def clear_plan(report: Report) -> None:
    """Clear the plan from the report; what was found in the step stays, and so do notes of others."""
    report.forget(*report.plan_notes)
    report.put(Rewritten())
    report.change(planned=None, timeline=None)


def as_function(
    graph_def: graph_pb2.GraphDef, concrete: Any, captured: Sequence[Any]
) -> Callable[[Any], Any]:
    """Return a function that runs a graph in place of the traced one it was made from, on equal arguments.

    ``captured`` is as in :class:`OptimizedGraph`.  Raises GraphError if the graph is no whole function.
    """
    try:
        function = OptimizedGraph(graph_def, concrete, captured)
    except ValueError as error:
        raise GraphError(f"the optimized graph is no whole function: {error}") from error
    results, packed = nests.Packed(concrete.graph.structured_outputs), nests.Packed
    return lambda given: results.unpack(function(*packed(given).tensors))
