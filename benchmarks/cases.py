"""A case is one setting in which ways of training take turns; cases.toml has the suites of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tomllib

from tf_ooo.errors import OOOError

# Who can have a way: stock Keras or Horovod, PyTorch (and Megatron), us, or nobody outside of this bench.
STOCK, PYTORCH, OURS, NOBODY = "stock", "pytorch", "tf_ooo", "nobody"
_Started = TypeVar("_Started")
SUITES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass(frozen=True)
class Way:
    """One way to train what a case names; what nobody can have shows a part of a gain and is no baseline."""

    name: str
    had_by: str
    options: Mapping[str, Any] = field(default_factory=dict)  # what the runner needs to know of it, as JSON

    @property
    def is_baseline(self) -> bool:
        return self.had_by in (STOCK, PYTORCH)


@dataclass(frozen=True)
class Case:
    """One setting."""

    name: str  # unique in its list, such as "gpt, 8 devices, 5 ms"
    mode: str  # where the result table has it, such as "data_parallel"
    runner: str  # a module of benchmarks.runners
    ways: tuple[Way, ...]  # take turns in this order, which moves on by one way in each turn
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the runner, as JSON; each row has them
    turns: int = 12  # of each way


@dataclass(frozen=True)
class WayRun:
    """This is what one way came to."""

    turns_s: list[float]  # seconds of a training step in each turn, in the order of the turns
    predicted_s: float | None = None  # what the plan said before the run; None: there is no plan
    bits: int | None = None  # a check sum of all trained weights at the end; None: they are not compared
    largest_difference: float | None = None  # of a trained weight from stock fit's, relative
    about: dict[str, Any] = field(default_factory=dict)  # as JSON: the schedule, a reason to fall back, ...


@dataclass(frozen=True)
class Measured:
    """A runner returns this."""

    ways: dict[str, WayRun]  # by name, without those that could not run
    stock_bits: int | None = None  # of stock fit after as many steps; None: no way was compared with it
    cores: float | None = None  # what each worker had of a core; None: all processes had the whole machine
    about: dict[str, Any] = field(default_factory=dict)  # of the whole run: weights of the model, the link
    not_run: dict[str, str] = field(default_factory=dict)  # reasons, by the name of a way


class Runner(Protocol):
    """A module of :mod:`benchmarks.runners`."""

    def why_not(self, case: Case) -> str:
        """Say why this machine cannot run the case; return an empty text where it can."""

    def run(self, case: Case) -> Measured:
        """Run all ways in turns, in processes of their own."""


def take_turns(steps: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run the step of each way once a turn and keep every result, its seconds.

    Whatever disturbs the machine hits all of them alike.  Each turn begins one way further, so that no way
    always runs behind the same neighbour.
    """
    names, kept = list(steps), {name: list[float]() for name in steps}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            kept[name].append(steps[name]())
    return kept


def started(case: Case, start: Callable[[Way], _Started]) -> tuple[dict[str, _Started], dict[str, str]]:
    """Start each way, and say why others do not run."""
    ways, not_run = dict[str, _Started](), dict[str, str]()
    for way in case.ways:
        try:
            ways[way.name] = start(way)
        except (ValueError, OOOError) as error:
            not_run[way.name] = str(error)
    return ways, not_run


def cases_of(suite: str, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a suite; ``quick``: a few that take under five minutes together."""
    told = SUITES[suite]
    run, cases = told["quick" if quick else "full"], []
    for setting in run["settings"]:
        lists = (values if isinstance(values, list) else [values] for values in setting.values())
        cases += [_case(told, run, dict(zip(setting, values, strict=True))) for values in product(*lists)]
    return tuple(cases)


def _case(told: dict[str, Any], run: dict[str, Any], given: dict[str, Any]) -> Case:
    """Return the case; ways have its number of devices where their options say ``devices``.

    A way with ``one_link`` is only for devices of which some are near to each other.
    """
    ways = tuple(
        Way(name, had_by, {key: given[is_] if is_ == "devices" else is_ for key, is_ in options.items()})
        for name, (had_by, options) in told["ways"].items()
        if name not in run.get("without", ()) and ("near" in given or "one_link" not in options)
    )
    name = given.pop("name", told["name"]).format(**given, task_ms=1e3 * given.get("task_s", 0))
    return Case(name, told["mode"], told["runner"], ways, given, run["turns"])
