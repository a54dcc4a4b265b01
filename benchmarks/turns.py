"""Ways take turns, so that whatever disturbs the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def take_turns(steps: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run each way once a turn and keep every result.

    Each turn begins one way further, so that no way always runs behind the same neighbour.

    Args:
        steps: by the name of a way, what runs a step and returns its seconds.
        turns: how many times each of them runs.
    """
    names = list(steps)
    kept: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            kept[name].append(steps[name]())
    return kept
