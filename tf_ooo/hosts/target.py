"""Defines where the parts of a model run: devices of this process, or of workers that may be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import cluster_of_environment, is_cluster
from tf_ooo.hosts.cluster import Cluster, connect
from tf_ooo.hosts.devices import full_names, home_device
from tf_ooo.hosts.facts import limits_of_gpus
from tf_ooo.hosts.speeds import link_between, relative_speeds
from tf_ooo.hosts.system_memory import ReportedLimit


class Devices:
    """Devices of this process, none of which can be lost; the methods are those of :class:`Cluster`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    def lost(self) -> Mapping[int, str]:
        return {}

    def reachable(self, device: str) -> bool:
        return True

    def explain(self, error: Exception) -> Exception:
        return error

    def link_between(self) -> Link:
        return link_between(self.devices)

    def speeds(self) -> tuple[float, ...]:
        return relative_speeds(self.devices, self.hosts(), home_device())

    def hosts(self) -> Sequence[str]:
        """Return each device's process."""
        return [name.rsplit("/device:", 1)[0] for name in self.devices]

    def memory_limits(self) -> Mapping[str, ReportedLimit]:
        return limits_of_gpus(self.devices)


Target: TypeAlias = Cluster | Devices
"""Devices, by full name in the order of the parts, and who answers for them."""


def target_of(devices: Any, local_rank: int = 0) -> Target:
    """Return what ``devices=`` stands for, see :func:`full_names`; joins the workers of a cluster.

    BackendError: a device that does not exist, a worker that cannot be joined.
    """
    devices = cluster_of_environment() if devices is None else devices
    given = connect(devices) if is_cluster(devices) else devices
    names = full_names(given, local_rank)
    return given if isinstance(given, Cluster) else Devices(names)


def lost_text(variables: Sequence[str]) -> str:
    """Say what has become of variables whose worker is gone."""
    return (
        f"{len(variables)} variables, first {variables[0]}, were on a device that is gone; they have the "
        "values that they had before this fit: load the last checkpoint"
    )


def gone(lost: Sequence[str], explain: Callable[[Exception], Exception]) -> Exception:
    """Return the error to raise for variables whose device is gone; names the worker, where there is one."""
    error = RuntimeError(lost_text(lost))
    explained = explain(error)
    return BackendError(str(error)) if explained is error else explained
