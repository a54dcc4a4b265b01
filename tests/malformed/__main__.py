"""``python -m tests.malformed -n 300 --seed 1``: random malformed inputs, and what is said of them."""

from __future__ import annotations

from tests.harness.children import Children, Setting
from tests.harness.command import Harness
from tests.malformed.drawing import CASES, area_of
from tests.malformed.running import run


def _setting_of(number: int) -> Setting:
    """A cluster has to be started before TensorFlow runs: such cases have a process of their own."""
    return Setting(devices=2, name="ports" if area_of(number) == "ports" else "")


main = Harness(
    "tests.malformed",
    "Gives random malformed inputs: each must be refused in a clear line, or work, and nothing be lost.",
    lambda mode: CASES,
    lambda mode, jobs: Children(run, _setting_of, jobs),
    group=lambda case: case.area,
    shown=lambda case: case.text,
    by_number=True,
).command()

if __name__ == "__main__":
    main()
