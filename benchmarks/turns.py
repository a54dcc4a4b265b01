"""Ways take turns, so that whatever disturbs the machine hits all of them alike."""

from collections.abc import Callable, Mapping


def take_turns(steps: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run the step of each way once a turn and keep every result, its seconds.

    Each turn begins one way further, so that no way always runs behind the same neighbour.
    """
    names, kept = list(steps), {name: list[float]() for name in steps}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            kept[name].append(steps[name]())
    return kept
