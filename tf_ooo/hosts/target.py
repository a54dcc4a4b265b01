"""Defines where the parts of a model run: devices of this process, or of workers that may be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import cluster_of_environment, has_devices, is_cluster
from tf_ooo.hosts.devices import full_names, home_device
from tf_ooo.hosts.facts import ReportedLimit, limits_of_gpus
from tf_ooo.hosts.speeds import link_between, relative_speeds


@runtime_checkable
class Target(Protocol):
    """Devices, by full name in the order of the parts, and who answers for them."""

    @property
    def devices(self) -> Sequence[str]: ...

    def lost(self) -> Mapping[int, str]:
        """Asks all workers; why each lost one is lost, by task."""

    def reachable(self, device: str) -> bool:
        """Return whether tensors can be read from there."""

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise: one that names the worker that was lost, or ``error`` itself."""

    def costs(self, measured: CostTable) -> CostTable:
        """Return what layers cost there that were measured in this process."""

    def link_between(self) -> Link:
        """Return the link between neighbours; measured when asked for."""

    def speeds(self) -> tuple[float, ...]:
        """Return each device's speed, see :attr:`tf_ooo.Link.speeds`; measured where they may differ."""

    def hosts(self) -> Sequence[str]:
        """Return each device's host: CPUs of one host share its cores."""

    def memory_limits(self) -> Mapping[str, ReportedLimit]:
        """Return the limits of the devices that say how many bytes they have, by full name."""


class Devices:
    """Devices without workers to be lost; ``given`` may have some of a target's methods, or a ``link``."""

    def __init__(self, devices: Sequence[str], given: object = None) -> None:
        self.devices = tuple(devices)
        self._given = given
        self.lost: Callable[[], Mapping[int, str]] = getattr(given, "lost", dict)
        self.reachable: Callable[[str], bool] = getattr(given, "reachable", lambda device: True)
        self.explain: Callable[[Exception], Exception] = getattr(given, "explain", lambda error: error)
        self.costs: Callable[[CostTable], CostTable] = getattr(given, "costs", lambda measured: measured)

    def link_between(self) -> Link:
        """Return the one that was given; else as :func:`tf_ooo.hosts.speeds.link_between`."""
        link: Link | None = getattr(self._given, "link", None)
        return link_between(self.devices) if link is None else link

    def speeds(self) -> tuple[float, ...]:
        """Return the given object's speeds, without measuring; if no object was given, the measured ones."""
        if has_devices(self._given):
            return tuple(getattr(self._given, "speeds", ()))
        return relative_speeds(self.devices, self.hosts(), home_device())

    def hosts(self) -> Sequence[str]:
        """Return the given object's hosts, one for each device if it has none; else each device's process."""
        said: Sequence[str] | None = getattr(self._given, "hosts", None)
        if said is None and has_devices(self._given):
            return self.devices
        return [name.rsplit("/device:", 1)[0] for name in self.devices] if said is None else said

    def memory_limits(self) -> Mapping[str, ReportedLimit]:
        """Return the given object's limits; else those of the GPUs."""
        said: Callable[[], Mapping[str, ReportedLimit]] | None = getattr(self._given, "memory_limits", None)
        return limits_of_gpus(self.devices) if said is None else said()


def target_of(devices: Any, local_rank: int = 0) -> Target:
    """Return what ``devices=`` stands for, see :func:`full_names`; joins the workers of a cluster.

    BackendError: a device that does not exist, a worker that cannot be joined.
    """
    if devices is None:
        devices = cluster_of_environment()
    given = devices
    if is_cluster(devices):
        from tf_ooo.hosts.cluster import connect  # noqa: PLC0415 - with several hosts only

        given = connect(devices)
    names = full_names(given, local_rank)
    return given if isinstance(given, Target) else Devices(names, given)


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
