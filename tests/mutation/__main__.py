"""``python -m tests.mutation -n 200 --seed 1``: faults planted in the code, which the quick tests notice."""

from __future__ import annotations

from tests.harness.children import PASSING, Children
from tests.harness.command import Harness
from tests.harness.drawing import Cases
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.running import SETTING, limit_s, run
from tests.mutation.targets import TESTS


def _cases(mode: str) -> Cases[Mutant]:
    everything = [mutant for module in TESTS for mutant in mutants_of(module)]
    return Cases(lambda draw: draw.in_turn(everything))


main = Harness(
    "tests.mutation",
    "Changes one place of a module at a time and looks whether its quick tests notice.",
    _cases,
    lambda mode, jobs: Children(
        run, lambda mutant: SETTING, jobs, lambda mutant: limit_s(mutant.module), renewed_after=1
    ),
    group=lambda mutant: mutant.module,
    shown=lambda mutant: f"{mutant.operator}\n{mutant.diff()}",
    passing=(*PASSING, "hangs", "dies"),
    goal=0.9,
    jobs=2,
).command()

if __name__ == "__main__":
    main()
