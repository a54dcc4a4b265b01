"""Holds everything that was found, planned and measured for one training step."""

from __future__ import annotations

import html
import json
import logging
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report import parts
from tf_ooo.report.sections import LayerPipeSection, PipelineSection
from tf_ooo.report.summary import Gain, summary_rows
from tf_ooo.units import KIND_WORDS, seconds_text

if TYPE_CHECKING:
    from tf_ooo.planning.model.task import Task

_LOG = logging.getLogger("tf_ooo")

_LEFT_OUT = {"rewritten_graph", "planned", "costs", "gains", "timeline", "measured_timeline", "plan_notes"}
# In the summary.
_MOST_NOTES = 6
# A note that says why there are no costs of a step's ops begins so.
NOT_PREDICTED = "the step's time is not predicted: "


@dataclass(repr=False, frozen=True)
class Report(
    parts.Ways,
    parts.Recorded,
    parts.Memory,
    parts.Timed,
    parts.PlannedStep,
    parts.Rewritten,
    parts.StepOps,
    parts.Outcome,
    parts.Trained,
):
    """Holds all that is known of a training: the attributes of its parts, None for those not known.

    Code that knows a part puts it in while training runs.  The repr is the summary; notebooks show a table.

    Attributes:
        profiling_overhead_s: seconds of the first rewritten step, which traces and plans, and of starting
            and reading the profiler; data_parallel: also of measuring the link and planning, and of the trace
            of a single step; of steps of a baseline that are undone.
        notes: sentences on what was not done as planned, and why.
        pipeline, layerpipe: the mode's own section; empty in other modes.
    """

    profiling_overhead_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    layerpipe: LayerPipeSection = field(default_factory=LayerPipeSection)

    def put(self, *known: parts.Part) -> None:
        """Put parts in, each in place of the earlier one of its kind."""
        for part in known:
            vars(self).update(vars(part))

    def change(self, **values: Any) -> None:
        """Change single attributes; the others of their parts stay."""
        if unknown := values.keys() - vars(self).keys():
            raise TypeError(f"a report has no {', '.join(sorted(unknown))}")
        vars(self).update(values)

    def took(self, seconds: float) -> None:
        """Add to the seconds that training takes longer because of us."""
        self.change(profiling_overhead_s=self.profiling_overhead_s + seconds)

    def note(self, *texts: str, log: int | None = None) -> None:
        """Add notes, each once; new ones are logged at the level ``log``."""
        for text in texts:
            if text and text not in self.notes:
                self.notes.append(text)
                if log is not None:
                    _LOG.log(log, "%s", text)

    def forget(self, *texts: str) -> None:
        """Take back notes that are no longer true."""
        self.notes[:] = [note for note in self.notes if note not in texts]

    @property
    def schedule(self) -> str:
        """Return the policy whose order runs, or ``"stock"``."""
        if self.fell_back:
            return "stock"
        return self.way or "stock" if self.planned is None else self.planned.policy

    @property
    def slower(self) -> bool:
        """Return whether the rewritten step was measured and is slower by more than the noise."""
        if self.measured_step_s is None or self.stock_step_s is None:
            return False
        return self.measured_step_s > self.stock_step_s + (self.step_noise_s or 0.0)

    @property
    def running_s(self) -> Sequence[float]:
        """Return the seconds of single steps that run now: of stock, if it was kept."""
        return next(iter(self.baselines_s.values()), self.steps_s) if self.fell_back else self.steps_s

    @property
    def gain(self) -> Gain | None:
        """Return the running steps beside those of the first baseline; None if either is not known."""
        baseline, baseline_s = next(iter(self.baselines_s.items()), ("", []))
        if not baseline_s or not self.steps_s:
            return None
        measured = self.costs is not None and self.costs.source == "measured"
        serial_s = (self.pipeline or self.layerpipe).serial_step_s if measured else 0.0
        return Gain(baseline, baseline_s, self.steps_s, self.decided_interval, self.in_turns, serial_s)

    @property
    def gain_over_first(self) -> Gain | None:
        """Return the running steps beside the first ones, if there is no baseline; None as :attr:`gain`."""
        if self.baselines_s or not self.first_steps_s or not self.steps_s:
            return None
        return Gain(f"one device{self.same_micro_batches}", self.first_steps_s, self.steps_s)

    @property
    def same_micro_batches(self) -> str:
        """Say how the first steps differed from stock's; empty: they did not."""
        if not self.pipeline or self.pipeline.microbatches == 1:
            return ""
        count = self.pipeline.first_microbatches
        return f" in {count} micro-batches" if count else " with the same micro-batches"

    @property
    def ranks_gain(self) -> Gain | None:
        """Return batches a second of all ranks beside those of one alone; None if either is not known."""
        if not self.alone_s or not self.running_s:
            return None
        of_all_s = [self.ranks * alone_s for alone_s in self.alone_s]
        return Gain(f"one rank with all {self.ranks} batches", of_all_s, self.running_s)

    @property
    def headline(self) -> str:
        """Say plainly what was gained: the first line of summary, page and repr."""
        gain, ranks_gain = self.gain, self.ranks_gain
        if ranks_gain is None:
            return self._headline(gain)
        return ranks_gain.text + (f"; {self._headline(gain)}" if self.fell_back or gain is not None else "")

    def _headline(self, gain: Gain | None) -> str:
        """Say what was gained over one step at a time, or over the stock order."""
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
        """Return ``good`` for surely faster steps, ``back`` for stock or slower ones, else ``plain``."""
        gains = [gain for gain in (self.ranks_gain, self.gain) if gain is not None]
        first = self.gain_over_first
        runs = self.planned is not None or self.way or self.alone_s
        loses = self.slower or any(gain.slower for gain in gains) or (first is not None and first.slower)
        if not runs or (self.fell_back and not self.alone_s) or self.undecided or loses:
            return "back"
        return "good" if any(gain.faster for gain in gains) else "plain"

    @property
    def why_no_costs(self) -> str:
        """Say why ``costs`` are None; empty where they are not."""
        if self.costs is not None:
            return ""
        if failed := [note for note in self.notes if note.startswith(NOT_PREDICTED)]:
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
        """Return step, speed-up and bubbles as known now, else NaN; see ``GainLogger``.

        Planned and measured bubbles are those of one step, as on the page.
        """
        gain, planned, measured = self.gain or self.ranks_gain, self.timeline, self.measured_timeline
        return {
            "step_s": statistics.median(self.running_s) if self.running_s else math.nan,
            "speed_up": 1.0 if self.fell_back else gain.ratio if gain else math.nan,
            "bubble_planned": float(planned.steady_bubble_fraction) if planned else math.nan,
            "bubble_measured": float(measured.bubble_fraction) if measured else math.nan,
        }

    def one_line(self) -> str:
        """Return the gain in one line, for a log."""
        return f"{self.headline}; schedule {self.schedule}, {self.moved_ops} ops moved"

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as (name, value); values that are not known are left out."""
        return summary_rows(self)

    def task_name(self, task: Task) -> str:
        """Return a task in words: ``weight gradient of conv2d_4, micro-batch 2``."""
        layers = [] if self.planned is None else list(self.planned.layers_of(task.stage))
        ends = (self.layer_names.get(layer, f"layer {layer}") for layer in (layers[:1] + layers[-1:]))
        of = " .. ".join(dict.fromkeys(ends)) or f"layer {task.stage}"
        several = self.planned is not None and self.planned.microbatches > 1 and task.kind != "U"
        return f"{KIND_WORDS[task.kind]} of {of}" + (f", micro-batch {task.microbatch}" if several else "")

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        head, data = "<th style='text-align:left'>", "<td style='text-align:left'>"
        (_, headline), *rows = ((html.escape(what), html.escape(value)) for what, value in self.rows())
        cells = "".join(f"<tr>{head}{what}</th>{data}{value}</td></tr>" for what, value in rows)
        return f"<p><b>{headline}</b></p><table>{cells}</table>"

    def summary(self) -> str:
        """Return the gain, a short table, and the first notes."""
        rows = [*self.rows(), *(("note", note) for note in self.notes[:_MOST_NOTES])]
        if len(self.notes) > _MOST_NOTES:
            rows.append(("", f"and {len(self.notes) - _MOST_NOTES} more in report.notes"))
        width = max(len(what) for what, _ in rows[1:])
        return "\n".join([rows[0][1], *(f"{what:<{width}}  {value}" for what, value in rows[1:])])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types; the schedule as text; graph, costs and gains are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _LEFT_OUT}
        values["schedule"] = self.schedule
        values["planned"] = None if self.planned is None else self.planned.to_text()
        copy: dict[str, Any] = json.loads(json.dumps(values, default=dict))
        return copy

    @property
    def layer_names(self) -> dict[int, str]:
        """Return the names of layers, by number."""
        return {row.index: row.name for row in self.layers}

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page, with ``plotly.min.js`` beside it if it has a chart; return its path."""
        from tf_ooo.planning.pictures.page import write_page
        from tf_ooo.report.page import render

        return write_page(path, render(self))

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write plan and measurement as a Chrome trace (chrome://tracing, Perfetto); return its path.

        Without seconds every planned task takes one unit, and the trace says so: it shows order, not time.
        """
        from tf_ooo.planning.pictures.trace import save_trace
        from tf_ooo.planning.simulation.measured import one_after_another

        schedule, order_only = self.planned or Schedule(self.mode, "none"), self.timeline is None
        planned = self.timeline or one_after_another(schedule, dict.fromkeys(schedule.tasks, 1e-3))
        save_trace(planned, path, self.measured_timeline, order_only, self.layer_names)
        return Path(path)
