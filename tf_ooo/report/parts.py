"""Defines the parts of a report, each made in one place; what is noted, logged or saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappler_passes.compat import releases
from tf_ooo.report.sections import LayerRow, Section

if TYPE_CHECKING:
    from grappler_passes.graph.training_graph import TrainingGraph
    from tf_ooo.costs.table import CostTable, GainTable
    from tf_ooo.planning.model.schedule import Schedule
    from tf_ooo.planning.simulation.timeline import Timeline
    from tf_ooo.report.report import Report
    from tf_ooo.report.summary import Gain

_LOG = logging.getLogger("tf_ooo")
# So many steps are measured before anything is said.
ENOUGH = 10


@dataclass(frozen=True)
class Part:
    """A part is made by whoever knows all of it."""


@dataclass(frozen=True)
class Trained(Part):
    """Says what is trained, with what and on what, and since when.

    Attributes:
        mode: its name.
        model, environment, date: the model's name, versions and device, when the report was begun.
        ranks: how many train together.
        batch_rows: how many one step has (data_parallel: this rank's); None: not known.
    """

    mode: str = "single_device"
    model: str = ""
    environment: str = ""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    ranks: int = 1
    batch_rows: int | None = None


@dataclass(frozen=True)
class Outcome(Part):
    """Says which step runs, and why.

    Attributes:
        fell_back: whether the stock step was kept; ``fallback_reason`` says why.
        kept_because: why the rewritten step was kept, other than for its speed.
        undecided: while both are timed, how far that is; ``""`` once it is decided.
        how_to_record: the option with which there is something to record, where stock was kept before there
            was a plan.
    """

    fell_back: bool = False
    fallback_reason: str = ""
    kept_because: str = ""
    undecided: str = ""
    how_to_record: str = ""


@dataclass(frozen=True)
class StepOps(Part):
    """Counts the ops of the step and names its layers.

    Attributes:
        ops: number of ops per kind: F, dO, dW, U, comm, other.
        unclassified: ``{op of the backward pass: why it has no kind}``.
        mixed: ``{op that computes dO and dW together: why it was not separated}``.
        layers: one row per layer: index, name, number of ops of each kind, and what the mode adds.
    """

    ops: Mapping[str, int] = field(default_factory=dict)
    unclassified: Mapping[str, str] = field(default_factory=dict)
    mixed: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[LayerRow] = ()

    @classmethod
    def of(cls, graph: TrainingGraph, layers: Sequence[LayerRow]) -> StepOps:
        """Describe a graph, whose layers are told by the mode."""
        return cls(graph.counts(), dict(graph.unclassified), dict(graph.mixed), layers)


@dataclass(frozen=True)
class Rewritten(Part):
    """Says how the graph was changed.

    Attributes:
        moved_ops: ops of the tasks that wait for an added edge; ``added_edges`` counts the edges.
        rewritten_graph: the GraphDef handed to TensorFlow.
        plan_notes: notes that are true as long as this graph runs.
        compiled_tasks: which ops XLA compiles, and which it does not; empty: none.
    """

    moved_ops: int = 0
    added_edges: int = 0
    rewritten_graph: Any = None
    plan_notes: Sequence[str] = ()
    compiled_tasks: str = ""


@dataclass(frozen=True)
class PlannedStep(Part):
    """Holds the plan, and the costs that it was made with.

    Attributes:
        planned: the schedule; ``plan_seconds``: from the graph's arrival to the rewritten one.
        timeline: the schedule, simulated with the costs, to draw; on one device its tasks one after the
            other, in seconds that were measured; None where no seconds are known.
        costs: seconds of each op and costs of each layer, to save and plan with; None until measured.
        predicted_step_s: seconds if all ops ran one after the other, as measured in one step; None until
            then.  Where TensorFlow runs ops side by side the step takes less.
        limits: what keeps the step from being shorter, each in words.
    """

    planned: Schedule | None = None
    timeline: Timeline | None = None
    costs: CostTable | None = None
    predicted_step_s: float | None = None
    limits: Sequence[str] = ()
    plan_seconds: float | None = None


@dataclass(frozen=True)
class Timed(Part):
    """Holds the times of steps, and of those that they are compared with.

    Attributes:
        steps_s: seconds of single steps as they run; of the first stock steps, where stock is kept without a
            comparison.
        baselines_s: seconds of single steps of what these are compared with, by name: ``"stock Keras"``,
            ``"one device"``; the first is what the headline says.  ``no_baseline``: why there are none.
        stock_step_s, measured_step_s: median seconds of the timed stock and rewritten steps.
        step_noise_s: distance of timed steps from their median that three of four keep, the larger of the two
            orders'.
        in_turns: whether steps of the baseline and those that run took turns.
        decided_interval: where stock's seconds over the rewritten step's are, by the test that decided, in
            95% of cases; None where there was none.
        compared_steps: how many the test had, those that warmed up included; all of them trained.
        compared: jit_compile=True: the medians of all ways to compile the step, of the best and stock also
            when they were timed again.
        first_steps_s: with several devices, seconds of steps at the start, on one of them and in the same
            micro-batches; whole batches take less, mostly.
        alone_s: data_parallel: seconds of single steps of this rank without the others.
    """

    steps_s: Sequence[float] = ()
    baselines_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    no_baseline: str = ""
    stock_step_s: float | None = None
    measured_step_s: float | None = None
    step_noise_s: float | None = None
    in_turns: bool = False
    decided_interval: tuple[float, float] | None = None
    compared_steps: int = 0
    compared: str = ""
    first_steps_s: Sequence[float] = ()
    alone_s: Sequence[float] = ()


@dataclass(frozen=True)
class Memory(Part):
    """Says how many bytes a step needs and may need.

    Attributes:
        predicted_peak_bytes: most bytes alive at once if ops run one at a time, on the device where that
            is most; None where ``unknown_size_ops`` tensors have no known size.  Where a graph leaves open
            how many rows a batch has, of batches of ``peak_rows``, as they were in training.
        stock_predicted_peak_bytes: the same for the order that TensorFlow would choose; with a limit only.
        memory_limit_bytes: pipeline: of each device, the least; None: no limit.  ``memory_limits_bytes``: of
            each device that is used, in their order.  ``memory_limit_from``: who asked for it, or reports it.
    """

    predicted_peak_bytes: int | None = None
    peak_rows: int | None = None
    unknown_size_ops: int = 0
    stock_predicted_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_limits_bytes: Sequence[int] = ()
    memory_limit_from: str = ""


@dataclass(frozen=True)
class Recorded(Part):
    """Says when the tasks of one step really ran.

    Attributes:
        measured_timeline: with ``timeline=``: by TensorFlow's profiler; else None, and ``not_measured`` says
            why.  ``measured_against_plan``: how it differs from the plan, a few lines.
    """

    measured_timeline: Timeline | None = None
    measured_against_plan: Sequence[str] = ()
    not_measured: str = ""


@dataclass(frozen=True)
class Ways(Part):
    """Compares ways to compile the step, with jit_compile=True.

    Attributes:
        way: which of several is kept.
        compiled: what XLA made of each.
        gains: the :class:`tf_ooo.costs.table.GainTable` that was measured, to save and edit.
    """

    way: str = ""
    compiled: Mapping[str, Section] = field(default_factory=dict)
    gains: GainTable | None = None


class SlowerWarning:
    """Says once that less is faster, and what would be better; takes it back when more steps deny it."""

    def __init__(self) -> None:
        self.advise: Callable[[Gain], str] | None = None  # None: nothing is said, or it was said already
        self._said = ""

    def look(self, report: Report, gain: Gain | None) -> None:
        """Look at what is known now."""
        if gain is not None and not gain.slower:  # what was said is of a few steps
            report.forget(self._said)
        if gain is None or not gain.slower or self.advise is None:
            return
        advise, self.advise = self.advise, None
        said = advise(gain)
        _LOG.warning("%s", said)
        # The times are those of now; the first line of the report has later ones.
        self._said = f"slower than {gain.baseline}; {said.removeprefix(f'{gain.text}; ')}"
        report.note(self._said)


def fall_back(
    report: Report, reason: str, logged: bool = False, expected: bool = False, how_to_record: str = ""
) -> None:
    """Notes, and logs in one line, that the stock step runs.

    ``expected``: no reason to warn.  Not logged again where it is ``logged`` already, as an unsupported
    TensorFlow is once in a process.
    """
    report.put(Outcome(True, reason, how_to_record=how_to_record))
    level = logging.INFO if expected or reason.startswith("measured") else logging.WARNING
    if not logged and releases.is_news(reason):
        _LOG.log(level, "keeping the stock step: %s", reason)


def note_unused(report: Report, given: Sequence[str]) -> None:
    """Notes, and logs in one line, the options ``given`` for XLA, which does not compile the step."""
    if given:
        note = f"{', '.join(given)}: no effect without jit_compile=True"
        report.note(note, log=logging.WARNING)


def save_timeline(report: Report, folder: Any, prefix: str = "") -> tuple[Path, Path] | None:
    """Writes ``report.html``, ``trace.json`` and measured gains; logs that a folder cannot be written."""
    try:
        page = report.save_html(Path(folder) / f"{prefix}report.html")
        trace = report.save_trace(Path(folder) / f"{prefix}trace.json")
        if report.gains is not None:
            report.gains.save(Path(folder) / f"{prefix}gains.json")
    except OSError as error:
        _LOG.warning("the report was not written: %s", error)
        return None
    _LOG.info("report: %s, trace: %s", page, trace)
    return page, trace
