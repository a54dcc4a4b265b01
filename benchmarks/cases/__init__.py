"""Lists of cases: each module has ``cases(quick)``, which returns what ``run`` runs by the module's name."""

from __future__ import annotations

import importlib

from benchmarks.case import Case, check

SUITES = (
    "emulated", "pipelines", "meshes", "unequal", "layerpipe", "data_parallel", "one_cpu", "any_size",
    "torch",
)  # fmt: skip


def cases_of(suite: str, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a suite; ``quick``: a few that take under five minutes together.

    Raises:
        ValueError: two ways of a case share a name, or none of them is ours.
    """
    module = importlib.import_module(f"benchmarks.cases.{suite}")
    cases: tuple[Case, ...] = module.cases(quick)
    for case in cases:
        check(case)
    return cases
