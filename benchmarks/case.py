"""A case is one setting in which ways of training take turns; a runner knows how to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Who can have a way: stock Keras or Horovod, PyTorch (and Megatron), us, or nobody outside of this bench.
STOCK, PYTORCH, OURS, NOBODY = "stock", "pytorch", "tf_ooo", "nobody"


@dataclass(frozen=True)
class Way:
    """One way to train what a case names.

    Attributes:
        name: stands in rows and tables, such as ``1f1b``.
        had_by: one of :data:`STOCK`, :data:`PYTORCH`, :data:`OURS`, :data:`NOBODY`.  ``auto`` alone is ours;
            what nobody can have shows a part of a gain and is no baseline.
        options: what the runner needs to know of it, as JSON.
    """

    name: str
    had_by: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Return whether a user could have it instead of ours."""
        return self.had_by in (STOCK, PYTORCH)


@dataclass(frozen=True)
class Case:
    """One setting.

    Attributes:
        name: is unique in its list, such as ``gpt, 8 devices, 5 ms``.
        mode: is where the result table has it: ``emulated``, ``pipeline``, ``data_parallel``, ``mesh``, ...
        runner: a module of :mod:`benchmarks.runners`.
        ways: take turns in this order, which moves on by one way in each turn.
        parameters: what the runner needs to know, as JSON; they stand in each row.
        turns: how many times each way runs.
    """

    name: str
    mode: str
    runner: str
    ways: tuple[Way, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 12


@dataclass(frozen=True)
class WayRun:
    """This is what one way came to.

    Attributes:
        turns_s: seconds of a training step in each turn, in the order of the turns.
        predicted_s: what the plan said before the run; None where there is no plan.
        bits: a check sum of all trained weights at the end; None where no weights were trained.
        largest_difference: the largest relative difference of a trained weight from stock ``fit``'s.
        about: what else is known, as JSON: the schedule that ran, its chunks, a reason to fall back.
    """

    turns_s: list[float]
    predicted_s: float | None = None
    bits: int | None = None
    largest_difference: float | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A runner returns this.

    Attributes:
        ways: by name, without those that could not run.
        stock_bits: the check sum of stock ``fit`` after as many steps; None: no way was compared with it.
        cores: what each worker had of a core; None: all processes had the whole machine.
        about: what holds for the whole run: weights of the model, seconds of a task, the link.
        not_run: reasons, by the name of a way.
    """

    ways: dict[str, WayRun]
    stock_bits: int | None = None
    cores: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """A module of :mod:`benchmarks.runners`."""

    def why_not(self, case: Case) -> str:
        """Say why this machine cannot run the case; return an empty text where it can."""

    def run(self, case: Case) -> Measured:
        """Run all ways in turns, in processes of their own."""


def check(case: Case) -> None:
    """Raise ValueError where two ways share a name or ours is missing."""
    names: Sequence[str] = [way.name for way in case.ways]
    if len(set(names)) < len(names):
        raise ValueError(f"{case.name}: two ways have one name among {', '.join(names)}")
    if not any(way.had_by == OURS for way in case.ways):
        raise ValueError(f"{case.name}: no way is ours")
