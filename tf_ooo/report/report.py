"""Holds what was found, planned and measured for one training step."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.costs.places import KIND_WORDS
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.gain import Gain
from tf_ooo.report.sections import CompiledRow, LayerPipeSection, LayerRow, PipelineSection
from tf_ooo.report.summary_rows import summary_rows
from tf_ooo.report.texts import seconds_text

if TYPE_CHECKING:
    from tf_ooo.costs.gains import GainTable
    from tf_ooo.costs.table import CostTable
    from tf_ooo.planning.model.task import Task
    from tf_ooo.planning.simulation.timeline import Timeline

_LEFT_OUT = (
    "rewritten_graph",
    "planned",
    "costs",
    "gains",
    "timeline",
    "measured_timeline",
    "plan_notes",
)
# In the summary.
_MOST_NOTES = 6
_NOT_PREDICTED = "the step's time is not predicted: "


def not_predicted(reason: str) -> str:
    """A note that says why there are no costs of a step's ops."""
    return _NOT_PREDICTED + reason


@dataclass(repr=False)
class Report:
    """Filled in while training runs; plain values, None where something is not known.

    Its repr is the summary; notebooks show a table.

    Attributes:
        mode: single_device.
        schedule: the policy whose order runs, ``"stock"`` where the stock order runs.
        fell_back: whether the stock step was kept; ``fallback_reason`` says why.
        kept_because: why the rewritten step was kept, other than for its speed.
        undecided: while both are timed, how far that is; ``""`` once it is decided.
        model, environment, date: what was trained, with what and on what, when.
        batch_rows: of one step (data_parallel: of this rank's); None: not known.
        ops: number of ops per kind: F, dO, dW, U, comm, other.
        moved_ops: ops of the tasks that wait for an added edge; ``added_edges`` counts the edges.
        unclassified: ``{op of the backward pass: why it has no kind}``.
        mixed: ``{op that computes dO and dW together: why it was not separated}``.
        predicted_step_s: seconds if all ops ran one after the other, as measured in one step; None until
            then.  Where TensorFlow runs ops side by side the step takes less.
        costs: seconds of each op and costs of each layer, to save and plan with; None until measured.
        gains: jit_compile=True: the :class:`tf_ooo.costs.gains.GainTable` that was measured, to save and
            edit.
        stock_step_s, measured_step_s: median seconds of the timed stock and rewritten steps.
        baselines_s: seconds of single steps of what the steps that run are compared with, by name: ``"stock
            Keras"``, ``"one device"``; the first is what the headline says.
        steps_s: seconds of single steps as they run; of the first stock steps, where stock is kept without a
            comparison.
        decided_interval: where stock's seconds over the rewritten step's are, by the test that decided, in
            95% of cases; None where there was none.
        in_turns: whether steps of the baseline and those that run took turns.
        compared_steps: of the test, those that warmed up included; all of them trained.
        alone_s: data_parallel: seconds of single steps of this rank without the others, ``ranks`` in all.
        no_baseline: why there is nothing to compare with.
        first_steps_s: of several devices: seconds of steps at the start, on one of them and in the same
            micro-batches, where there is nothing else to compare with; whole batches take less, mostly.
        limits: what keeps the step from being shorter, each in words, by the plan.
        step_noise_s: distance of timed steps from their median that three of four keep, the larger of the two
            orders'.
        memory_limit_bytes: pipeline: of each device, the least; None: no limit.  ``memory_limits_bytes``: of
            each device that is used, in their order.  ``memory_limit_from``: who asked for it, or reports it.
        stock_predicted_peak_bytes: the same for the order that TensorFlow would choose; with a limit only.
        predicted_peak_bytes: most bytes alive at once if ops run one at a time, on the device where that
            is most; None where ``unknown_size_ops`` tensors have no known size.  Where a graph leaves open
            how many rows a batch has, of batches of ``peak_rows``, as they were in training.
        plan_seconds: from the graph's arrival to the rewritten one.
        profiling_overhead_s: seconds of the first rewritten step, which traces and plans, and of starting
            and reading the profiler; data_parallel: also of measuring the link and planning, and of the trace
            of a single step; of steps of a baseline that are undone.
        layers: one row per layer: index, name, number of ops of each kind, and what the mode adds.
        notes: what was not done as planned, and why; ``plan_notes`` those of them that are of the plan.
        way, compared: jit_compile=True: which of several ways to compile the step is kept, and the medians of
            all, of the best and stock also when they were timed again.
        compiled: jit_compile=True: what XLA made of each way to compile the step.
        pipeline, layerpipe: what the mode adds; empty in other modes.
        timeline: the planned schedule, simulated with the costs, to draw; on one device its tasks one after
            the other, in seconds that were measured; None where no seconds are known.
        measured_timeline: with ``timeline=``: when the tasks of one step really ran, by TensorFlow's
            profiler; else None, and ``not_measured`` says why.  ``how_to_record``: the option with which
            there is something to record, where stock was kept before there was a plan.
        measured_against_plan: how that differs from the plan, a few lines.
        planned: the schedule that was planned; ``rewritten_graph``: the GraphDef handed to TensorFlow.
    """

    mode: str = "single_device"
    schedule: str = "stock"
    fell_back: bool = False
    fallback_reason: str = ""
    kept_because: str = ""
    undecided: str = ""
    model: str = ""
    environment: str = ""
    batch_rows: int | None = None
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    ops: dict[str, int] = field(default_factory=dict)
    moved_ops: int = 0
    added_edges: int = 0
    unclassified: dict[str, str] = field(default_factory=dict)
    mixed: dict[str, str] = field(default_factory=dict)
    predicted_step_s: float | None = None
    costs: CostTable | None = None
    gains: GainTable | None = None
    stock_step_s: float | None = None
    measured_step_s: float | None = None
    baselines_s: dict[str, list[float]] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    decided_interval: tuple[float, float] | None = None
    in_turns: bool = False
    compared_steps: int = 0
    alone_s: list[float] = field(default_factory=list)
    ranks: int = 1
    no_baseline: str = ""
    first_steps_s: list[float] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    step_noise_s: float | None = None
    predicted_peak_bytes: int | None = None
    peak_rows: int | None = None
    stock_predicted_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_limit_from: str = ""
    memory_limits_bytes: tuple[int, ...] = ()
    unknown_size_ops: int = 0
    plan_seconds: float | None = None
    profiling_overhead_s: float = 0.0
    layers: list[LayerRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plan_notes: list[str] = field(default_factory=list)
    way: str = ""
    compared: str = ""
    compiled: dict[str, CompiledRow] = field(default_factory=dict)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    layerpipe: LayerPipeSection = field(default_factory=LayerPipeSection)
    timeline: Timeline | None = None
    measured_timeline: Timeline | None = None
    measured_against_plan: list[str] = field(default_factory=list)
    not_measured: str = ""
    how_to_record: str = ""
    planned: Schedule | None = None
    rewritten_graph: Any = None

    @property
    def slower(self) -> bool:
        """Return whether the rewritten step was measured and is slower by more than the noise."""
        if self.measured_step_s is None or self.stock_step_s is None:
            return False
        return self.measured_step_s > self.stock_step_s + (self.step_noise_s or 0.0)

    @property
    def running_s(self) -> Sequence[float]:
        """Seconds of single steps of what runs now: those of stock, where it was kept."""
        return next(iter(self.baselines_s.values()), self.steps_s) if self.fell_back else self.steps_s

    @property
    def gain(self) -> Gain | None:
        """The steps as they run beside those of the first baseline; None where one of them is not known."""
        baseline, baseline_s = next(iter(self.baselines_s.items()), ("", []))
        if not baseline_s or not self.steps_s:
            return None
        measured = self.costs is not None and self.costs.source == "measured"
        serial_s = (self.pipeline or self.layerpipe).serial_step_s if measured else 0.0
        return Gain(baseline, baseline_s, self.steps_s, self.decided_interval, self.in_turns, serial_s)

    @property
    def gain_over_first(self) -> Gain | None:
        """The steps as they run beside the first ones, where there is no baseline; None: as :attr:`gain`."""
        if self.baselines_s or not self.first_steps_s or not self.steps_s:
            return None
        same = " with the same micro-batches" if self.pipeline and self.pipeline.microbatches > 1 else ""
        return Gain(f"one device{same}", self.first_steps_s, self.steps_s)

    @property
    def ranks_gain(self) -> Gain | None:
        """Batches of all ranks in a second beside those of one alone; None where one of them is not known."""
        if not self.alone_s or not self.running_s:
            return None
        of_all_s = [self.ranks * alone_s for alone_s in self.alone_s]
        return Gain(f"one rank with all {self.ranks} batches", of_all_s, self.running_s)

    @property
    def headline(self) -> str:
        """Say plainly what was gained: the first line of the summary, of the page and of the repr."""
        gain, ranks_gain = self.gain, self.ranks_gain
        if ranks_gain is None:
            return self._headline(gain)
        ordered = f"; {self._headline(gain)}" if self.fell_back or gain is not None else ""
        return ranks_gain.text + ordered

    def _headline(self, gain: Gain | None) -> str:
        """Say what was gained beside what runs one step at a time, or in the stock order."""
        if self.fell_back:
            return f"no gain: {self.state}" if gain is None else f"no gain: stock kept ({gain.ratio_text})"
        if gain is not None:
            return f"{gain.text}; {self.state}" if self.undecided else gain.text
        if self.no_baseline and self.steps_s:
            first, taken = self.gain_over_first, seconds_text(statistics.median(self.steps_s))
            if first is not None and first.slower:
                return f"{first.text}; not compared with what Keras takes: {self.no_baseline}"
            return f"{taken} a step ({len(self.steps_s)} steps); not compared: {self.no_baseline}"
        return f"no gain measured: {self.no_baseline or self.state}"

    @property
    def state(self) -> str:
        """Say in a few words what runs now."""
        if self.fell_back:
            return f"the stock step runs: {self.fallback_reason}"
        if self.undecided:
            return f"not decided, {self.undecided}"
        if self.planned is None and not self.way:
            stock = self.fallback_reason and f"the stock order runs: {self.fallback_reason}"
            return stock or "nothing has been rewritten yet"
        unmoved = self.mode == "single_device" and not (self.way or self.moved_ops)
        nothing = "no op could be moved, its order is that of stock" if unmoved else ""
        reasons = [nothing, self.kept_because, "measured slower than the stock step" if self.slower else ""]
        because = "; ".join(filter(None, reasons))
        return f"the rewritten step runs ({self.schedule})" + (f": {because}" if because else "")

    @property
    def mood(self) -> str:
        """``good``: steps are faster for sure; ``plain``: nothing is sure; ``back``: they are not faster."""
        gains = [gain for gain in (self.ranks_gain, self.gain) if gain is not None]
        first = self.gain_over_first
        runs = self.planned is not None or bool(self.way or self.alone_s)
        loses = self.slower or any(gain.slower for gain in gains) or (first is not None and first.slower)
        kept = self.fell_back and not self.alone_s
        if not runs or kept or self.undecided or loses:
            return "back"
        return "good" if any(gain.faster for gain in gains) else "plain"

    @property
    def why_no_costs(self) -> str:
        """Say why ``costs`` are None; empty where they are not."""
        if self.costs is not None:
            return ""
        failed = [note for note in self.notes if note.startswith(_NOT_PREDICTED)]
        if failed:
            return failed[0]
        if self.way:
            return "a step that XLA compiles shows kernels, not ops: see gains"
        if self.mode == "data_parallel":
            return "rank 0 measures them, for schedules that are planned"
        if self.mode != "single_device":
            uncut = "nothing was measured, as all of it trained on one device"
            return uncut if self.fell_back else "the first steps of a fit measure them"
        return (
            "they are measured in the first step after some of both orders were timed (profile_steps), "
            "and there was none"
        )

    def scalars(self) -> dict[str, float]:
        """Return step, speed-up and bubbles as they are known now, else NaN; see ``GainLogger``.

        Bubbles are of one step, planned as well as measured, as on the page.
        """
        gain = self.gain or self.ranks_gain
        speed_up = math.nan if gain is None else gain.ratio
        planned, measured = self.timeline, self.measured_timeline
        return {
            "step_s": statistics.median(self.running_s) if self.running_s else math.nan,
            "speed_up": 1.0 if self.fell_back else speed_up,
            "bubble_planned": math.nan if planned is None else float(planned.steady_bubble_fraction),
            "bubble_measured": math.nan if measured is None else float(measured.bubble_fraction),
        }

    def one_line(self) -> str:
        """Say what was gained, for a log line."""
        return f"{self.headline}; schedule {self.schedule}, {self.moved_ops} ops moved"

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as (what, value); what is not known is left out."""
        return summary_rows(self)

    def task_name(self, task: Task) -> str:
        """Return a task in words: ``weight gradient of conv2d_4, micro-batch 2``."""
        layers = [] if self.planned is None else list(self.planned.layers_of(task.stage))
        names = {row.index: row.name for row in self.layers}
        ends = list(dict.fromkeys(names.get(layer, f"layer {layer}") for layer in (layers[:1] + layers[-1:])))
        of = " .. ".join(ends) or f"layer {task.stage}"
        several = self.planned is not None and self.planned.microbatches > 1 and task.kind != "U"
        return f"{KIND_WORDS[task.kind]} of {of}" + (f", micro-batch {task.microbatch}" if several else "")

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from tf_ooo.report.page import table

        return table(self)

    def summary(self) -> str:
        """Return what was gained, a short table, and the first notes."""
        rows = [*self.rows(), *(("note", note) for note in self.notes[:_MOST_NOTES])]
        if len(self.notes) > _MOST_NOTES:
            rows.append(("", f"and {len(self.notes) - _MOST_NOTES} more in report.notes"))
        (_, headline), *rows = rows
        width = max(len(what) for what, _ in rows)
        return "\n".join([headline, *(f"{what:<{width}}  {value}" for what, value in rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types; the schedule as text; graph, costs and gains are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _LEFT_OUT}
        values["planned"] = None if self.planned is None else self.planned.to_text()
        copy: dict[str, Any] = json.loads(json.dumps(values, default=dict))
        return copy

    @property
    def layer_names(self) -> dict[int, str]:
        """Return the names of layers, by number."""
        return {row.index: row.name for row in self.layers}

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page, with ``plotly.min.js`` beside it where it has a chart; returns its path."""
        from tf_ooo.planning.pictures.page import write_page
        from tf_ooo.report.page import render

        return write_page(path, render(self))

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes plan and measurement as a Chrome trace (chrome://tracing, Perfetto); returns its path.

        Without seconds every planned task takes one unit, and the trace says so: it shows order, not time.
        """
        from tf_ooo.planning.pictures.trace import save_trace
        from tf_ooo.planning.simulation.measured import one_after_another

        planned, order_only = self.timeline, False
        if planned is None:
            schedule = self.planned or Schedule(self.mode, "none")
            planned, order_only = one_after_another(schedule, dict.fromkeys(schedule.tasks, 1e-3)), True
        save_trace(planned, path, self.measured_timeline, order_only, self.layer_names)
        return Path(path)
