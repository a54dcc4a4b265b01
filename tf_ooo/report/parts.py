"""The parts of a report, each made in one place by whoever knows it, and put into the report as a whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tf_ooo.report.sections import LayerPipeSection, LayerRow, PipelineSection, Section

if TYPE_CHECKING:
    from tf_ooo.costs.gains import GainTable
    from tf_ooo.costs.table import CostTable
    from tf_ooo.planning.model.schedule import Schedule
    from tf_ooo.planning.simulation.timeline import Timeline


@dataclass(frozen=True)
class Part:
    """What whoever makes it knows of a training."""


@dataclass(frozen=True)
class Trained(Part):
    """What is trained, with what and on what, and since when.

    Attributes:
        mode: its name.
        model, environment, date: the model's name, versions and device, when the report was begun.
        ranks: how many train together.
        batch_rows: of one step (data_parallel: of this rank's); None: not known.
    """

    mode: str = "single_device"
    model: str = ""
    environment: str = ""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    ranks: int = 1
    batch_rows: int | None = None


@dataclass(frozen=True)
class Outcome(Part):
    """Which step runs, and why.

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
    """What the step consists of.

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


@dataclass(frozen=True)
class Rewritten(Part):
    """What was done to the graph.

    Attributes:
        moved_ops: ops of the tasks that wait for an added edge; ``added_edges`` counts the edges.
        rewritten_graph: the GraphDef handed to TensorFlow.
        plan_notes: those of the notes that are true as long as this graph runs.
    """

    moved_ops: int = 0
    added_edges: int = 0
    rewritten_graph: Any = None
    plan_notes: Sequence[str] = ()


@dataclass(frozen=True)
class PlannedOrder(Part):
    """The plan, to draw.

    Attributes:
        planned: the schedule.
        timeline: the schedule, simulated with the costs; on one device its tasks one after the other, in
            seconds that were measured; None where no seconds are known.
        plan_seconds: from the graph's arrival to the rewritten one.
    """

    planned: Schedule | None = None
    timeline: Timeline | None = None
    plan_seconds: float | None = None


@dataclass(frozen=True)
class Predicted(Part):
    """What a step costs.

    Attributes:
        predicted_step_s: seconds if all ops ran one after the other, as measured in one step; None until
            then.  Where TensorFlow runs ops side by side the step takes less.
        costs: seconds of each op and costs of each layer, to save and plan with; None until measured.
        limits: what keeps the step from being shorter, each in words, by the plan.
    """

    predicted_step_s: float | None = None
    costs: CostTable | None = None
    limits: Sequence[str] = ()


@dataclass(frozen=True)
class Timed(Part):
    """Steps that were timed.

    Attributes:
        steps_s: seconds of single steps as they run; of the first stock steps, where stock is kept without a
            comparison.
        stock_step_s, measured_step_s: median seconds of the timed stock and rewritten steps.
        step_noise_s: distance of timed steps from their median that three of four keep, the larger of the two
            orders'.
        in_turns: whether steps of the baseline and those that run took turns.
        decided_interval: where stock's seconds over the rewritten step's are, by the test that decided, in
            95% of cases; None where there was none.
        compared_steps: of the test, those that warmed up included; all of them trained.
        compared: jit_compile=True: the medians of all ways to compile the step, of the best and stock also
            when they were timed again.
    """

    steps_s: Sequence[float] = ()
    stock_step_s: float | None = None
    measured_step_s: float | None = None
    step_noise_s: float | None = None
    in_turns: bool = False
    decided_interval: tuple[float, float] | None = None
    compared_steps: int = 0
    compared: str = ""


@dataclass(frozen=True)
class Baselines(Part):
    """What the steps that run are compared with.

    Attributes:
        baselines_s: seconds of single steps by name: ``"stock Keras"``, ``"one device"``; the first is what
            the headline says.
        first_steps_s: of several devices: seconds of steps at the start, on one of them and in the same
            micro-batches, where there is nothing else to compare with; whole batches take less, mostly.
        alone_s: data_parallel: seconds of single steps of this rank without the others.
        no_baseline: why there is nothing to compare with.
    """

    baselines_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    first_steps_s: Sequence[float] = ()
    alone_s: Sequence[float] = ()
    no_baseline: str = ""


@dataclass(frozen=True)
class Peaks(Part):
    """How many bytes a step needs.

    Attributes:
        predicted_peak_bytes: most bytes alive at once if ops run one at a time, on the device where that
            is most; None where ``unknown_size_ops`` tensors have no known size.  Where a graph leaves open
            how many rows a batch has, of batches of ``peak_rows``, as they were in training.
        stock_predicted_peak_bytes: the same for the order that TensorFlow would choose; with a limit only.
    """

    predicted_peak_bytes: int | None = None
    peak_rows: int | None = None
    unknown_size_ops: int = 0
    stock_predicted_peak_bytes: int | None = None


@dataclass(frozen=True)
class MemoryLimits(Part):
    """How many bytes a step may need.

    Attributes:
        memory_limit_bytes: pipeline: of each device, the least; None: no limit.  ``memory_limits_bytes``: of
            each device that is used, in their order.  ``memory_limit_from``: who asked for it, or reports it.
    """

    memory_limit_bytes: int | None = None
    memory_limits_bytes: Sequence[int] = ()
    memory_limit_from: str = ""


@dataclass(frozen=True)
class Recorded(Part):
    """When the tasks of one step really ran.

    Attributes:
        measured_timeline: with ``timeline=``: by TensorFlow's profiler; else None, and ``not_measured`` says
            why.
        measured_against_plan: how that differs from the plan, a few lines.
    """

    measured_timeline: Timeline | None = None
    measured_against_plan: Sequence[str] = ()
    not_measured: str = ""


@dataclass(frozen=True)
class Ways(Part):
    """Ways to compile the step, with jit_compile=True.

    Attributes:
        way: which of several is kept.
        compiled: what XLA made of each.
        gains: the :class:`tf_ooo.costs.gains.GainTable` that was measured, to save and edit.
    """

    way: str = ""
    compiled: Mapping[str, Section] = field(default_factory=dict)
    gains: GainTable | None = None


@dataclass(frozen=True)
class ModeParts(Part):
    """What the mode adds; empty in other modes."""

    pipeline: PipelineSection = field(default_factory=PipelineSection)
    layerpipe: LayerPipeSection = field(default_factory=LayerPipeSection)
