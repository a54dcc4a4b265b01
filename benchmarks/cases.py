"""Suites of cases, from cases.toml: a setting's lists stand for a case with each of their members."""

from itertools import product
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.case import Case, Way

SUITES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def cases_of(suite: str, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a suite; ``quick``: a few that take under five minutes together."""
    told = SUITES[suite]
    run, cases = told["quick" if quick else "full"], []
    for setting in run["settings"]:
        lists = (values if isinstance(values, list) else [values] for values in setting.values())
        cases += [_case(told, run, dict(zip(setting, values, strict=True))) for values in product(*lists)]
    return tuple(cases)


def _case(told: dict[str, Any], run: dict[str, Any], given: dict[str, Any]) -> Case:
    """Return the case; ways have its number of devices where their options say ``devices``."""
    ways = tuple(
        Way(name, had_by, {key: given[is_] if is_ == "devices" else is_ for key, is_ in options.items()})
        for name, (had_by, options) in told["ways"].items()
        if name not in run.get("without", ())
    )
    name = given.pop("name", told["name"]).format(**given, task_ms=1e3 * given.get("task_s", 0))
    return Case(name, told["mode"], told["runner"], ways, given, run["turns"])
