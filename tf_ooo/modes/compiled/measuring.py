"""Measures what dW gain beside regions of the main stream, on the user's device and within a time budget.

Which pairs are measured first is decided by what formulas say they gain; what the budget does not reach is
calculated, and scaled by what the measured pairs made of their calculated gains.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tf_ooo.compat import xla_nodes
from tf_ooo.costs.gains import GainTable
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.modes.compiled.calls import StepToPlan
from tf_ooo.modes.compiled.stopwatch import Piece, Timing, launch_s, piece_of, time_piece
from tf_ooo.planning.building.joint import calculated_gains
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Task

_LOG = logging.getLogger("tf_ooo")
_SAY_EVERY_S = 5.0
Pair = tuple[str, int]


class MeasuredGains:
    """The table of a step's gains: measured at the first call, known from then on.

    No further piece is begun when ``budget_s`` are over.  Only with ``delay`` may dW run beside the next
    step's forward pass, and only then that is measured.
    """

    def __init__(
        self,
        budget_s: float,
        on_measured: Callable[[GainTable], None] | None = None,
        delay: bool = False,
    ) -> None:
        self.budget_s, self._on_measured, self.delay = budget_s, on_measured, delay
        self._known: dict[tuple[str, ...], GainTable] = {}

    def __call__(self, what: StepToPlan, layers: Sequence[LayerCosts]) -> GainTable:
        """Steps of other batch sizes have the same layers, and get the same table."""
        key = tuple(layer.name for layer in what.parts.graph.layers)
        if key not in self._known:
            self._known[key] = _Measuring(what, layers, self.budget_s, self.delay).table()
            if self._on_measured is not None:
                self._on_measured(self._known[key])
        return self._known[key]


class _Measuring:
    """One table in the making."""

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
            pair_saves_s = self._saved_s(pair)
            if pair_saves_s is None:
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
            {**saved_s, **rest}, xla_nodes.device_name(), tuple(notes), alone_s, frozenset(rest), lost_s
        )

    def _has_time(self, pair: Pair) -> bool:
        """Say whether a pair's missing measurements fit in the time, if they take as long as others did."""
        elapsed_s = time.monotonic() - self._started
        main, aside = self._pieces[pair]
        keys = (main.kind, ""), (aside.kind, ""), (main.kind, aside.kind)
        missing = sum(key not in self._timings for key in keys)
        return not missing or elapsed_s + missing * elapsed_s / max(1, self._built) <= self.budget_s

    def _saved_s(self, pair: Pair) -> float | None:
        """Alone and alone, less side by side; 0 within the noise; None where one of them cannot be timed."""
        main, aside = self._pieces[pair]
        timings = [self._timed(main), self._timed(aside), self._timed(main, aside)]
        known = [timing for timing in timings if timing is not None]
        if len(known) < len(timings):
            return None
        main_alone, aside_alone, together = known
        saved_s = main_alone.seconds + aside_alone.seconds - together.seconds
        noise_s = sum(timing.spread_s for timing in known)
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
            f"gains: {len(saved_s)} pairs of dW and main stream measured on {xla_nodes.device_name()} "
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
