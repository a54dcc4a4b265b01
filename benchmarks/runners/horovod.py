"""Data parallel training beside stock Horovod: two ranks with a share of the CPU each, behind one link.

Horovod's settings are a process's.  So each setting that is tried has a job of its own, as has TensorFlow's
strategy; all jobs run side by side on the same link, in the same CPU groups, and take turns with each other.
Horovod's background threads exchange messages also when nothing is to be averaged: the processes of a
Horovod job are stopped (SIGSTOP) while it is not its turn.
"""

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Measured, Way, WayRun, take_turns
from benchmarks.machine import confine
from benchmarks.models import Weights, compared
from benchmarks.processes import Job, command, quiet
from tf_ooo.hosts.devices import held_ports

_LAUNCHER = Path(sys.executable).with_name("horovodrun")
_WORKERS = 2
_LOCAL_TURNS = 3
# A message may wait for a rank that is stopped; Horovod's own limit is 30 s.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "36000", "HOROVOD_STALL_CHECK_DISABLE": "1"}
# Kinds of ways: where gradients are averaged, and by whom.
APPLY, TAPE, STRATEGY, CALLBACK, LOCAL = "apply", "tape", "strategy", "callback", "local"


def why_not(case: Case) -> str:
    """Say why this machine cannot run the case; return an empty text where it can."""
    cores, there = _WORKERS * float(case.parameters["cores"]), len(os.sched_getaffinity(0))
    if cores > there:
        return f"needs {cores:g} cores, and there are {there}"
    if not _LAUNCHER.exists():
        return f"there is no {_LAUNCHER.name} beside Python: make horovod"
    return confine.why_not()


def run(case: Case) -> Measured:
    """Run all ways in turns."""
    asked, group = case.parameters, f"tf_ooo_benchmarks_{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inside = stack.enter_context(confine.link(group))
        stack.enter_context(confine.Shares(group).made(_WORKERS, asked["cores"]))
        job_of = _jobs(stack, case, group, inside, folder)
        local = next(way.name for way in case.ways if way.options["kind"] == LOCAL)
        facts = job_of[local].ask("make", local)
        compute_s = statistics.median(job_of[local].ask("turn", local) for _ in range(_LOCAL_TURNS))
        mbit = None  # the link is as fast as the machine
        if "communication" in asked:
            mbit = bandwidth_mbit(asked["communication"], facts["gradient_bytes"], compute_s)
            confine.slow(inside, mbit * 1e6)
        for name, job in job_of.items():
            if name != local:
                job.ask("make", name)
        steps = {way.name: functools.partial(job_of[way.name].ask, "turn", way.name) for way in case.ways}
        turns_s = take_turns(steps, case.turns)
        about = {**facts, "compute_s": compute_s, "link_mbit_s": mbit, "ranks": _WORKERS}
        ends = {name: job.ask("end", name) for name, job in job_of.items()}
    return measured(case, turns_s, ends, about)


def jobs_of(case: Case) -> dict[str, list[Way]]:
    """Group ways by what is a process's: Horovod's settings, as JSON; or TensorFlow's strategy."""
    jobs: dict[str, list[Way]] = {}
    for way in case.ways:
        knobs = json.dumps(way.options.get("knobs", {}))
        jobs.setdefault(STRATEGY if way.options["kind"] == STRATEGY else knobs, []).append(way)
    return jobs


def measured(
    case: Case,
    turns_s: dict[str, list[float]],
    ends: dict[str, tuple[Weights, WayRun]],
    about: dict[str, Any],
) -> Measured:
    """Compare the weights of all ways with those of the first, stock Horovod; one rank's are alone."""
    runs = {name: replace(run, turns_s=turns_s[name]) for name, (_, run) in ends.items()}
    stock, *others = case.ways
    trained = {way.name: ends[way.name][0] for way in others if way.options["kind"] != LOCAL}
    bits, runs = compared(runs, trained, ends[stock.name][0])
    compared_with = {"bits compared with": "stock Horovod, two ranks"}
    return Measured(runs, bits, float(case.parameters["cores"]), about | compared_with)


def bandwidth_mbit(communication: float, gradient_bytes: int, compute_s: float) -> float:
    """Return the link on which all gradients take so many times as long as computing.

    A ring of n ranks sends them 2 (n - 1) times (Patarasuk & Yuan 2009), over one link here.
    """
    return round(8 * 2 * (_WORKERS - 1) * gradient_bytes / (communication * compute_s) / 1e6, 1)


def _jobs(
    stack: contextlib.ExitStack, case: Case, group: str, inside: Sequence[str], folder: Path
) -> dict[str, Job]:
    """Start all jobs, which end with the stack; return them by the names of their ways."""
    own = {name: value for name, value in quiet().items() if not name.startswith("HOROVOD_")}
    own["PATH"] = f"{_LAUNCHER.parent}{os.pathsep}{own.get('PATH', '')}"
    launch = [*inside, str(_LAUNCHER), "--gloo", "--network-interfaces", "lo", "-np", str(_WORKERS)]
    jobs: dict[str, Job] = {}
    cluster = [f"127.0.0.1:{port}" for port in stack.enter_context(held_ports(_WORKERS))]
    for number, (knobs, ways) in enumerate(jobs_of(case).items()):
        address, stops = folder / f"job_{number}", knobs != STRATEGY
        start = [*launch, *command(f"{__name__}_rank:main", case, ways, group, str(address), cluster)]
        environment = own | _PATIENT | (json.loads(knobs) if stops else {})
        job = Job([start], environment, address, _WORKERS, stops)
        stack.callback(job.end)
        jobs |= {way.name: job for way in ways}
    for job in jobs.values():
        job.connect()
    return jobs
