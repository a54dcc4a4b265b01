"""Measures what layers cost where they run: in steps that are spread over devices already."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.costs.profile import MOST_STEPS, OpProfile, medians, read_side_by_side
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError
from tf_ooo.fit.measured import measured_costs
from tf_ooo.fit.traced import run_traced
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.target import Target
from tf_ooo.rewriting.step_graph import StepGraph, general_names


class InPlace:
    """Traces the next steps that are run through it, at most three; one where workers have to be asked.

    Args:
        step: as it was taken apart.
        count: micro-batches of those that run.
        signature: of the batches on which steps are measured.

    Attributes:
        why_not: why there are no costs.
    """

    def __init__(self, step: StepGraph, count: int, target: Target, steps: int, signature: object) -> None:
        self.why_not, self.signature = "", signature
        self._step, self._count, self._target = step, count, target
        self._addresses = target.addresses if isinstance(target, Cluster) else ()
        self._left = min(steps, 1 if self._addresses else MOST_STEPS)
        self._profiles: list[OpProfile] = []

    @property
    def done(self) -> bool:
        return not self._left or bool(self.why_not)

    def run(self, step: Callable[[], Any], expected_s: float) -> Any:
        """Return one step, which traces nothing; its outputs.  Raises what it raises."""
        traced = run_traced(step, self._addresses, expected_s)
        self._left -= 1
        self.why_not = traced.failed
        try:
            hosts = _by_host(traced.events)
            self._profiles += [] if traced.failed else [_joined(list(map(read_side_by_side, hosts)))]
        except CostError as error:
            self.why_not = str(error)
        return traced.outputs

    def costs(self, names: Iterable[str]) -> CostTable | None:
        """Return the layers' costs for one micro-batch; None: nothing was measured.

        ``names``: of all nodes that ran; a profile may lack some.
        """
        if not self._profiles:
            return None
        # The rest of a step, besides its ops, does not show where devices wait for each other.
        profile = dataclasses.replace(_median(self._profiles), step_s=0.0)
        return self._target.costs(
            measured_costs(self._step, profile, general=general_names(names, self._count))
        )


def _by_host(events: Mapping[str, Sequence[TracedEvent]]) -> list[list[TracedEvent]]:
    """Return all that shares cores; threads of different processes have the same names."""
    hosts: defaultdict[str, list[TracedEvent]] = defaultdict(list)
    for address, seen in events.items():
        own = (dataclasses.replace(event, line=f"{event.line} of {address}") for event in seen)
        hosts[address.rpartition(":")[0]] += own
    return list(hosts.values())


def _joined(profiles: Sequence[OpProfile]) -> OpProfile:
    """Join the profiles of one execution on several hosts, each of which ran other ops."""
    first = profiles[0]
    return dataclasses.replace(
        first,
        seconds={name: value for profile in profiles for name, value in profile.seconds.items()},
        types={name: value for profile in profiles for name, value in profile.types.items()},
        core_s={name: value for profile in profiles for name, value in profile.core_s.items()},
    )


def _median(profiles: Sequence[OpProfile]) -> OpProfile:
    """Other work on the machine makes single ones long."""
    seconds = medians([profile.seconds for profile in profiles])
    core_s = medians([profile.core_s for profile in profiles])
    return dataclasses.replace(profiles[-1], seconds=seconds, core_s=core_s, steps=len(profiles))
