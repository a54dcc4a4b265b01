"""Defines the parts of a report, and functions that note, log or save them."""

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
    """Is the base of a report's parts, each made by the code that knows all of it."""


@dataclass(frozen=True)
class Trained(Part):
    """Says what is trained, how, on which devices, and since when.

    Attributes:
        mode: the mode's name.
        model, environment, date: the model's name; versions and device; when the report was begun.
        ranks: how many train together.
        batch_rows: rows of one step (data_parallel: of this rank's); None: not known.
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
        undecided: progress while both are timed; ``""`` once it is decided.
        how_to_record: if stock was kept without a plan, the option with which there is something to record.
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
        """Describe a graph and the layer rows that the mode gives."""
        return cls(graph.counts(), dict(graph.unclassified), dict(graph.mixed), layers)


@dataclass(frozen=True)
class Rewritten(Part):
    """Says how the graph was changed.

    Attributes:
        moved_ops: ops of the tasks that wait for an added edge; ``added_edges`` counts the edges.
        rewritten_graph: the GraphDef handed to TensorFlow.
        plan_notes: notes that are true while this graph runs.
        compiled_tasks: says which ops XLA compiles, and which it does not; empty: none.
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
            other, with measured seconds; None if no seconds are known.
        costs: seconds of each op and costs of each layer, to save and plan with; None until measured.
        predicted_step_s: seconds if all ops ran one after the other, as measured in one step; None until
            then.  Where TensorFlow runs ops side by side the step takes less.
        limits: sentences that say why the step is not shorter.
    """

    planned: Schedule | None = None
    timeline: Timeline | None = None
    costs: CostTable | None = None
    predicted_step_s: float | None = None
    limits: Sequence[str] = ()
    plan_seconds: float | None = None


@dataclass(frozen=True)
class Timed(Part):
    """Holds the times of steps, and of the steps with which they are compared.

    Attributes:
        steps_s: seconds of single steps as they run; of the first stock steps if stock is kept without a
            comparison.
        baselines_s: seconds of single steps of each baseline, by name: ``"stock Keras"``, ``"one device"``;
            the headline uses the first.  ``no_baseline``: why there are none.
        stock_step_s, measured_step_s: median seconds of the timed stock and rewritten steps.
        step_noise_s: the distance from the median within which three of four timed steps are, for the noisier
            order.
        in_turns: whether steps of the baseline and those that run took turns.
        decided_interval: 95% interval of stock's seconds over the rewritten step's, by the test that decided;
            None if there was no test.
        compared_steps: steps of the test, including warm-up; all of them trained.
        compared: jit_compile=True: the medians of all ways to compile the step; those of the best and stock
            also from the second timing.
        first_steps_s: with several devices, seconds of the first steps, on one device and in the same
            micro-batches; whole batches mostly take less.
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
        predicted_peak_bytes: most bytes alive at once if ops run one at a time, on the fullest device; None
            if ``unknown_size_ops`` tensors have no known size.  If a graph leaves the rows of a batch open,
            for batches of ``peak_rows``, as in training.
        stock_predicted_peak_bytes: the same for the order that TensorFlow would choose; with a limit only.
        memory_limit_bytes: the limit; pipeline: the least of all devices; None: no limit.
            ``memory_limits_bytes``: the limits of the used devices, in order.  ``memory_limit_from``: who
            asked for it, or reports it.
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
        measured_timeline: from TensorFlow's profiler, with ``timeline=``; else None, and ``not_measured``
            says why.  ``measured_against_plan``: a few lines on how it differs from the plan.
    """

    measured_timeline: Timeline | None = None
    measured_against_plan: Sequence[str] = ()
    not_measured: str = ""


@dataclass(frozen=True)
class Ways(Part):
    """Compares ways to compile the step, with jit_compile=True.

    Attributes:
        way: the name of the way that is kept.
        compiled: the figures of each compiled module.
        gains: the :class:`tf_ooo.costs.table.GainTable` that was measured, to save and edit.
    """

    way: str = ""
    compiled: Mapping[str, Section] = field(default_factory=dict)
    gains: GainTable | None = None


class SlowerWarning:
    """Says once that less is faster, and what would be better; takes it back if more steps deny it."""

    def __init__(self) -> None:
        self.advise: Callable[[Gain], str] | None = None  # None: nothing is said, or it was said already
        self._said = ""

    def look(self, report: Report, gain: Gain | None) -> None:
        """Look at the gain so far; warn, or take the warning back."""
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
    """Note, and log in one line, that the stock step runs.

    ``expected``: there is no reason to warn.  ``logged``: it was logged before, as an unsupported TensorFlow
    is once in a process.
    """
    report.put(Outcome(True, reason, how_to_record=how_to_record))
    level = logging.INFO if expected or reason.startswith("measured") else logging.WARNING
    if not logged and releases.is_news(reason):
        _LOG.log(level, "keeping the stock step: %s", reason)


def note_unused(report: Report, given: Sequence[str]) -> None:
    """Note, and log in one line, the options ``given`` for XLA, which does not compile the step."""
    if given:
        note = f"{', '.join(given)}: no effect without jit_compile=True"
        report.note(note, log=logging.WARNING)


def save_timeline(report: Report, folder: Any, prefix: str = "") -> tuple[Path, Path] | None:
    """Write ``report.html``, ``trace.json`` and measured gains; log if a folder cannot be written."""
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
