"""``python -m tests.fuzz -n 2000 --seed 7``: random set-ups, and a minimal program for one that fails."""

from __future__ import annotations

from tests.fuzz.drawing import MODES, cases
from tests.fuzz.program import program
from tests.fuzz.running import run
from tests.fuzz.several import MOST_DEVICES, setting_of
from tests.harness.children import Children
from tests.harness.command import Harness


def _children(mode: str, jobs: int) -> Children:
    devices = MOST_DEVICES if mode.endswith("pipeline") else 0
    return Children(run, lambda setup: setting_of(setup.ranks, devices), jobs)


main = Harness(
    "tests.fuzz",
    """Trains random set-ups stock and rewritten, and compares the bits.

    Pipelines are compared by two schedules; in data parallel two ranks with stock Horovod.  One whose tasks
    XLA compiles has the numbers of one op by op up to rounding.
    """,
    cases,
    _children,
    group=lambda setup: setup.mode,
    modes=tuple(MODES),
    shown=program,
    shrinks=True,
).command()

if __name__ == "__main__":
    main()
