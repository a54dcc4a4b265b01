"""What ``tf-ooo bench single`` tells its processes, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class Case:
    """What is measured side by side: one network, batch and kind of data, all ways.

    Attributes:
        network: of :data:`tf_ooo.bench.single.networks.NETWORKS`.
        batch: images or sequences of a step.
        data: of :data:`tf_ooo.bench.single.inputs.KINDS`.
        size: pixels of an image's side; None: the network's.
        make_s: seconds after which no other way is begun to be made; None: no limit.
    """

    network: str
    batch: int
    data: str = "random"
    size: int | None = None
    make_s: float | None = None

    @property
    def name(self) -> str:
        """For rows and pictures."""
        size = f" {self.size}x{self.size}" if self.size else ""
        return f"{self.network}{size} batch {self.batch}" + ("" if self.data == "random" else f" {self.data}")


@dataclass(frozen=True)
class Ways:
    """What one process makes: names of ways, and the CUDA priority of its main stream if it has one."""

    names: list[str]
    priority: int | None = None


class Ready(TypedDict):
    """The first answer: which ways can run, what there is to say of each, and what XLA made of some."""

    ready: list[str]
    said: dict[str, str]
    device: str
    modules: dict[str, dict[str, Any]]
    versions: dict[str, str]


def ready_with(names: list[str], said: dict[str, str], device: str = "unknown") -> Ready:
    """The first answer of a process that knows nothing of XLA."""
    return {"ready": names, "said": said, "device": device, "modules": {}, "versions": {}}


class Measured(TypedDict, total=False):
    """Further answers: seconds of a step in one turn, and the peak of the memory if there is a GPU."""

    step_s: float
    peak_bytes: int
