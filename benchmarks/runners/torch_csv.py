"""Our order in ``torch.distributed.pipelining`` itself, from a CSV file, in turns with torch's own schedules.

Ranks are real processes of torch, with its runtime, autograd and messages; the tasks of their layers wait
instead of computing, so that the two cores of a small machine stand for devices.
"""

import importlib.util
import tempfile
from pathlib import Path

from benchmarks.cases import OURS, Case, Measured, Way, WayRun, started, take_turns
from benchmarks.emulated.costs import costs_of
from benchmarks.processes import BenchmarkError, Job, command, quiet
from benchmarks.torch_orders import schedule_of
from tf_ooo.hosts.addresses import free_port
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate

_APART = 1e-5  # Losses are sums in float32 whose order differs.


def why_not(case: Case) -> str:
    """Say that torch is missing; return an empty text where it is there."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed: requirements/torch.in"


def run(case: Case) -> Measured:
    """Plan all ways, let the ranks take turns with them, and compare their losses."""
    asked = case.parameters
    sizes = {name: asked[name] for name in ("model", "layers", "devices", "task_s", "latency_s")}
    table, steps = costs_of(**sizes), asked["steps"]

    def planned(way: Way) -> Schedule:
        return schedule_of(way.options, table, asked["devices"], asked["microbatches"])

    plans, not_run = started(case, planned)
    ours = {way.name for way in case.ways if way.had_by == OURS}
    seconds = [(of.forward_s, of.output_grad_s, of.weight_grad_s) for of in table.layers]
    told = {name: (of.stages, of.to_torch_csv() if name in ours else "") for name, of in plans.items()}
    with tempfile.TemporaryDirectory() as folder:
        ranks = _ranks(folder, asked["devices"], asked["microbatches"], steps, seconds, told)
        try:
            turns = {name: lambda name=name: ranks.ask(name) for name in plans}  # type: ignore[misc]
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
        for name, plan in plans.items()
    }
    return Measured(runs, about=about, not_run=not_run)


def _ranks(folder: str, devices: int, *given: object) -> Job:
    address, port = Path(folder) / "torch", free_port()
    lines = [
        command(f"{__name__}_rank:main", str(address), rank, devices, port, *given) for rank in range(devices)
    ]
    job = Job(lines, quiet() | {"GLOO_SOCKET_IFNAME": "lo"}, address, devices)
    job.connect()
    return job
