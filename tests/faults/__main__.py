"""``python -m tests.faults -n 500 --seed 1``: random faults, counted by mode and kind."""

from __future__ import annotations

import contextlib
import functools
import importlib

from tests.faults.drawing import cases
from tests.faults.running import own_folder, run
from tests.faults.setups import MODES, Setup
from tests.harness.children import Children
from tests.harness.command import Harness

# More than a set-up can take: each wait in it has a limit of its own.
LIMIT_S = 3600.0


def _children(mode: str, jobs: int) -> Children:
    """They share the trainings without a fault."""
    _import_everything()
    stack = contextlib.ExitStack()
    references = stack.enter_context(own_folder())
    function = functools.partial(run, references=references)
    return Children(function, jobs=jobs, limit_s=lambda setup: LIMIT_S, stack=stack)


def _import_everything() -> None:
    """Import what a training needs, without running an op."""
    for name in ("single_device.fit", "data_parallel.fit", "pipeline.mode", "layerpipe.fit"):
        importlib.import_module(f"tf_ooo.modes.{name}")
    for name in ("tf_ooo.cli.worker", "tf_ooo.modes.replicated", "tf_ooo.modes.compiled.session"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("horovod.tensorflow")


def _group(setup: Setup) -> str:
    return f"{setup.training.mode}, {setup.fault.kind.replace('_', ' ')}"


main = Harness(
    "tests.faults",
    "Strikes trainings: each ends in time, leaves whole checkpoints, and goes on to the same bits.",
    cases,
    _children,
    group=_group,
    modes=("", *MODES),
    shown=lambda setup: f"{setup.fault}\nin {setup.training}",
    jobs=2,
).command()

if __name__ == "__main__":
    main()
