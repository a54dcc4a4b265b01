"""The process that trains all ways of a case on emulated devices, in turns: layers whose tasks are waits."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from os import environ
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.cases import Case, Measured, Way, started, take_turns
from benchmarks.emulated.costs import ROWS, WIDTH, costs_of
from benchmarks.emulated.observed import Observed
from benchmarks.models import SEED, Workload, make_devices
from benchmarks.runners.steps import Fit, Profile, train_in_turns
from benchmarks.torch_orders import schedule_of
from tf_ooo import Link, Pipeline
from tf_ooo.costs.table import CostTable
from tf_ooo.demo.emulated import Emulated, emulated_model
from tf_ooo.demo.waits import LOG, Log, prefer
from tf_ooo.hosts.cluster import connect
from tf_ooo.hosts.runtime_costs import with_runtime
from tf_ooo.hosts.speeds import link_between
from tf_ooo.hosts.worker import serve
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.planning import step_s_of
from tf_ooo.planning.building.stages import merged

# Tasks of a step of which a picture can be drawn; of more the median turn is not kept.
_MOST_DRAWN = 100


def workload_of(table: CostTable, microbatches: int = 1) -> Workload:
    """Compile a model of such layers, always with the same names: graphs of one kind are alike."""
    keras.backend.clear_session()
    layers = [
        Emulated((layer.forward_s, layer.output_grad_s, layer.weight_grad_s), name=layer.name)
        for layer in table.layers
    ]
    return Workload(*emulated_model(layers, ROWS * microbatches, WIDTH, SEED))


def serve_worker(cluster: str, task: int, devices: int) -> None:
    """Be a worker with so many emulated devices."""
    prefer()  # and with it all threads that are started from here
    make_devices(devices)
    serve(cluster, task, inter_op_threads=6 + 2 * devices, intra_op_threads=1)


class Run(Fit):
    """The steps of one way; the first of them makes the plan."""

    def __init__(self, options: Pipeline, table: CostTable, known: Profile | None) -> None:
        super().__init__(workload_of(table, options.microbatches or 1), options, known)
        self.start()
        self._layers, self._is_ours = table.layers, options.schedule == "auto"
        self.observed = Observed(self.schedule, tasks_of(self.report.rewritten_graph))

    def observed_step_s(self, log: Log) -> float:
        """Run a step, look at its log, and return its seconds."""
        log.new()
        took_s = self.step_s()
        self.observed.add(took_s, log.new())
        return took_s

    def about(self) -> dict[str, Any]:
        schedule, turn = self.schedule, self.observed.median_turn()
        stages = merged(self._layers, schedule.stages, schedule.microbatches)
        return {
            "schedule": schedule.policy,
            "chunks": len(schedule.stages) // schedule.devices,
            "fused": schedule.fused_backward,
            "simulated_s": step_s_of(replace(schedule, stages=()), stages, Link()),  # with no time in between
            **self.observed.to_dict(),
            **({"order": schedule.to_text()} if self._is_ours else {}),
            **({"turn": turn} if len(turn) <= _MOST_DRAWN else {}),
        }


def _measured(link: Link, devices: Sequence[str], near: int) -> Link:
    """Return the link with the runtime's costs; so many devices each are in a process, near to each other."""
    far = with_runtime(link, devices[::near])
    if near == 1:
        return far
    groups = tuple(number // near for number in range(len(devices)))
    return replace(far, near=link_between(devices[:2]), groups=groups)


def measured(case: Case, cluster: str) -> Measured:
    """Run all ways in turns, and train with stock Keras as often; with workers nothing is computed here."""
    devices = case.parameters["devices"]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * devices + 4)
    if not cluster:
        make_devices(devices)
    parameters, log = {"task_s": None, **case.parameters}, Log(environ[LOG])
    names = ("model", "layers", "devices", "task_s", "latency_s")
    table = costs_of(*(parameters[name] for name in names))
    log.wait(0)
    preferred = prefer()
    if cluster:
        table = replace(
            table, link=_measured(table.link, connect(cluster).devices, parameters.get("near", 1))
        )
    microbatches = parameters["microbatches"]
    settings = {"costs": table, "devices": cluster or devices, "microbatches": microbatches}
    settings |= {"profile_steps": 0, "compare": False, "check_loss": False}
    known: list[Profile | None] = []

    def start(way: Way) -> Run:
        # The first way's schedule is a file: costs of whole layers are then taken as they are, and no layer
        # is divided, in the ways behind it neither.
        schedule, one_link = "auto", bool(way.options.get("one_link"))
        if "auto" not in way.options or one_link:
            costs = replace(table, link=table.link.of_one_tier) if one_link else table
            schedule = f"{folder}/{way.name}.txt"
            Path(schedule).write_text(schedule_of(way.options, costs, devices, microbatches).to_text())
        run = Run(Pipeline(schedule=schedule, **settings), table, known[0] if known else None)
        known.append(run.profile)
        return run

    def stock() -> Workload:
        log.wait(0)
        return workload_of(table, microbatches)

    with tempfile.TemporaryDirectory() as folder:
        runs, not_run = started(case, start)
    prefer()  # and threads that were started since
    log.wait(1)
    take_turns({name: run.step_s for name, run in runs.items()}, 1)
    count, ways, bits = train_in_turns(runs, case.turns, lambda run: run.observed_step_s(log), stock)
    runtime_us = {name: round(seconds * 1e6, 1) for name, seconds in table.link.runtime.items()}
    about: dict[str, Any] = {"weights": WIDTH * len(table.layers), "steps": count, "preferred": preferred}
    about |= {"runtime_us": runtime_us} if cluster else {}
    return Measured(ways, bits, about=about, not_run=not_run)
