"""Says in words what a plan's predictions hold for: nothing is assumed without saying so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.choosing.figures import recomputation, squeezed
from tf_ooo.planning.choosing.plan import Candidate, Plan
from tf_ooo.planning.model.problem import Problem
from tf_ooo.units import bytes_text, time_text


def stated(plan: Plan, table: CostTable | None = None) -> tuple[str, ...]:
    """Return the assumptions of a plan, and what its memory limit costs."""
    schedule = plan.trial.schedule
    candidate = Candidate(schedule.policy, plan.problem, plan.trial)
    said = [str(cost) for cost in (squeezed(candidate), recomputation(candidate)) if cost is not None]
    return (*assumptions(plan.problem, table, schedule.mode), *said)


def assumptions(problem: Problem, table: CostTable | None = None, mode: str | None = None) -> tuple[str, ...]:
    """State the costs, devices, rows of a step, link and limit; ``mode`` as in the schedule."""
    speeds = ", ".join(f"{speed:.3g}" for speed in problem.link.speeds)
    return (
        *_of_costs(table),
        _rows_text(problem, table, mode),
        *([_link_text(problem.link)] if problem.devices > 1 else []),
        *(_cores_texts(problem.link) if problem.devices > 1 else ()),
        *([f"devices {speeds} times as fast as the one that the costs are for"] if speeds else []),
        _limit_text(problem.limits_bytes),
    )


def _of_costs(table: CostTable | None) -> tuple[str, ...]:
    if table is None:
        return ("costs as given, for one micro-batch",)
    if not (table.device or table.assumptions):
        return ("costs as given; the table says of no device",)
    return (*([f"costs {table.source}, for {table.device}"] if table.device else []), *table.assumptions)


def _rows_text(problem: Problem, table: CostTable | None, mode: str | None) -> str:
    count, devices = problem.microbatches, problem.devices
    text = f"{_counted(devices, 'device')}, {_counted(count, 'micro-batch', 'micro-batches')}"
    text += " on each" if mode == "data_parallel" and devices > 1 else " a step"
    rows = None if table is None else table.rows
    if rows is None:
        return f"{text}, of rows that the costs do not tell"
    workers = devices if mode == "data_parallel" else 1
    return f"{text}, of {_counted(rows, 'row')}: {_counted(rows * count * workers, 'row')} a step"


def _counted(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def _link_text(link: Link) -> str:
    if replace(link, speeds=()) == Link():
        return "no link is given: what devices send takes no time (--link 25Gbit,20us; link=tf_ooo.Link(...))"
    speed = "any size" if math.isinf(link.bytes_per_s) else f"{link.bytes_per_s * 8 / 1e9:.4g} Gbit/s"
    text = f"link {speed}, {time_text(link.latency_s)} latency, each direction of each two devices"
    if link.overhead_s_per_byte:
        text += f", {link.overhead_s_per_byte * 1e9:.3g} s of both processors for each GB"
    return text


def _cores_texts(link: Link) -> tuple[str, ...]:
    """Say which devices share cores; empty: none do."""
    machines: dict[int, list[str]] = {}
    for device, machine in enumerate(link.machines):
        machines.setdefault(machine, []).append(str(device))
    sharing = [f"devices {', '.join(group)}" for group in machines.values() if len(group) > 1]
    return (f"{' and '.join(sharing)} share the {link.cores} cores of their machine",) if sharing else ()


def _limit_text(limits_bytes: Sequence[int]) -> str:
    if len(set(limits_bytes)) > 1:
        return f"at most {', '.join(map(bytes_text, limits_bytes))} on the devices"
    return f"at most {bytes_text(limits_bytes[0])} on each device" if limits_bytes else "no memory limit"
