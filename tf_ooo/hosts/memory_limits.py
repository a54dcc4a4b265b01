"""Asks how many bytes devices say that tensors may take there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tf_ooo.hosts.facts import Facts


@dataclass(frozen=True)
class ReportedLimit:
    """Holds the limit of one device; ``said``: who says so, in words."""

    bytes: int
    said: str


def limits_of_gpus(devices: Sequence[str]) -> dict[str, ReportedLimit]:
    """Return the bytes that TensorFlow may use of the GPUs among these devices, by full name.

    Of CPUs it makes a number up.
    """
    if not any(":GPU:" in name for name in devices):
        return {}
    from grappler_passes.compat import runtime

    sizes = runtime.device_memory_bytes()
    return {
        name: ReportedLimit(sizes[name], f"TensorFlow may use so many of {name}")
        for name in devices
        if ":GPU:" in name and sizes.get(name, 0) > 0
    }


def limits_of_workers(
    computing: Mapping[int, int], workers: Mapping[int, Facts], own: Facts
) -> dict[int, ReportedLimit]:
    """Return the limit of each CPU of workers in control groups that limit their memory, by task.

    Processes of one group share its limit, less what all of them took before.

    Args:
        computing: CPU devices by task; 0 where a task has GPUs.
        workers: what they say of themselves, by task.
        own: the same of this process, which takes part where it is in such a group.
    """
    groups: defaultdict[str, dict[int, Facts]] = defaultdict(dict)
    for task, facts in workers.items():
        if facts.memory_limit_bytes is not None:
            groups[facts.memory_group][task] = facts
    limits: dict[int, ReportedLimit] = {}
    for name, members in groups.items():
        beside = [own] if own.memory_group == name else []
        devices = sum(computing[task] for task in members)
        taken_bytes = sum(facts.taken_bytes for facts in (*members.values(), *beside))
        limits |= {
            task: ReportedLimit(
                max(1, (facts.memory_limit_bytes - taken_bytes) // devices),
                _said(facts, len(members) + len(beside), taken_bytes),
            )
            for task, facts in members.items()
            if computing[task] and facts.memory_limit_bytes is not None
        }
    return limits


def _said(facts: Facts, processes: int, taken_bytes: int) -> str:
    who = f"worker {facts.addresses[facts.task]} (task {facts.task})"
    shared = f", which {processes} processes share," if processes > 1 else ""
    return (
        f"{who} has a control group of {facts.memory_limit_bytes} bytes{shared} of which {taken_bytes} were "
        "taken before"
    )
