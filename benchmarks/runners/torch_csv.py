"""Our order in ``torch.distributed.pipelining`` itself, from a CSV file, in turns with torch's own schedules.

Ranks are real processes of torch, with its runtime, autograd and messages; the tasks of their layers wait
instead of computing, so that the two cores of a small machine stand for devices.
"""

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import Case, Measured, Way, WayRun, started, take_turns
from benchmarks.emulated.costs import costs_of
from benchmarks.processes import BenchmarkError, Job, command, quiet
from benchmarks.torch_orders import schedule_of
from tf_ooo.hosts.devices import free_port
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate

# Losses are sums of micro-batches in float32, whose order differs.
_APART = 1e-5


class Told(NamedTuple):
    """A rank is told this of a way."""

    stages: tuple[tuple[int, int], ...]  # first and last layer of each
    ranks: list[int]  # of each stage
    torch_class: str  # torch's own schedule; empty: ``csv`` has the order
    csv: str


def why_not(case: Case) -> str:
    """Say that torch is missing; return an empty text where it is there."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed: requirements/torch.in"


def run(case: Case) -> Measured:
    """Plan all ways, let the ranks take turns with them, and compare their losses."""
    asked = dict(case.parameters)
    devices, microbatches, steps = (asked.pop(name) for name in ("devices", "microbatches", "steps"))
    table = costs_of(devices=devices, **asked)

    def planned(way: Way) -> tuple[Schedule, Told]:
        plan, own = schedule_of(way.options, table, devices, microbatches), way.options.get("class", "")
        return plan, Told(plan.stages, plan.device_of_stage, own, "" if own else plan.to_torch_csv())

    ways, not_run = started(case, planned)
    told = {name: of for name, (_, of) in ways.items()}
    seconds = [(of.forward_s, of.output_grad_s, of.weight_grad_s) for of in table.layers]
    with tempfile.TemporaryDirectory() as folder:
        ranks = _ranks(folder, devices, microbatches, steps, seconds, told)
        try:
            turns = {name: partial(ranks.ask, name) for name in ways}
            take_turns(turns, 1)  # first steps exchange shapes
            turns_s = take_turns(turns, case.turns)
            losses, about = ranks.ask("losses"), ranks.ask("about")
        finally:
            ranks.end()
    if max(losses.values()) - min(losses.values()) > _APART * max(losses.values()):
        raise BenchmarkError(f"losses differ after as many steps: {losses}")
    runs = {
        name: WayRun(
            turns_s[name],
            simulate(plan, table, steps=steps).makespan_s / steps,
            about={"schedule": plan.policy, "stages": len(plan.stages), "loss": losses[name]},
        )
        for name, (plan, _) in ways.items()
    }
    return Measured(runs, about=about, not_run=not_run)


def _ranks(folder: str, devices: int, *given: object) -> Job:
    address, port = Path(folder) / "torch", free_port()
    main = f"{__name__}_rank:main"
    lines = [command(main, str(address), rank, devices, port, *given) for rank in range(devices)]
    job = Job(lines, quiet() | {"GLOO_SOCKET_IFNAME": "lo"}, address, devices)
    job.connect()
    return job
