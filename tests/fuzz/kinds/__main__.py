"""``python -m tests.fuzz.kinds -n 300 --mode pipeline``: what users write themselves, drawn by chance."""

from __future__ import annotations

from tests.fuzz.drawing import MODES
from tests.fuzz.kinds.drawing import OwnSetup, cases
from tests.fuzz.several import setting_of
from tests.harness.children import Children, Outcome
from tests.harness.command import Harness


def _run(setup: OwnSetup) -> Outcome:
    from tests.fuzz.kinds.judging import run  # imports TensorFlow

    return run(setup)


def _children(mode: str, jobs: int) -> Children:
    return Children(_run, lambda setup: setting_of(setup.ranks, 2 if mode.endswith("pipeline") else 0), jobs)


main = Harness(
    "tests.fuzz.kinds",
    """Trains random set-ups of what users write themselves, stock and with the callback.

    One device and data parallel must have the bits of stock (Horovod), or a report that says rounding.  A
    pipeline must train as stock up to rounding, which 64 bits tell apart; or refuse before a weight changes,
    or warn before the first step, in words that name what is not the same.
    """,
    cases,
    _children,
    group=lambda setup: setup.kind,
    modes=tuple(MODES),
).command()

if __name__ == "__main__":
    main()
