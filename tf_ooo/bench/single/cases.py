"""What ``tf-ooo bench single`` measures: cases, and ways of training them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from tf_ooo.bench.shared.rows import Row


@dataclass(frozen=True)
class Case:
    """What is measured side by side: one network, batch and kind of data, all ways.

    Images have ``size`` pixels a side, None: the network's.  After ``make_s`` seconds no other way is made.
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
class OurWay:
    """How dW are moved to side streams, by a plan of :mod:`tf_ooo.modes.compiled.plans`.

    ``measured``: which of them gain is measured, not calculated.  ``store``: which activations are, as in
    :func:`tf_ooo.modes.compiled.rewrite.rewrite_step`.
    """

    plan: Literal["every_layer", "joint"]
    streams: int = 1
    store: str = "cost"
    updates_aside: bool = False
    measured: bool = False


OURS: Mapping[str, OurWay] = {
    "early": OurWay("every_layer"),
    "joint": OurWay("joint"),
    "joint, measured gains": OurWay("joint", measured=True),
    "early, 2 streams": OurWay("every_layer", streams=2),
    "early, barriers on all activations": OurWay("every_layer", store="all"),
    "early, recompute": OurWay("every_layer", store="backward"),
    "early, updates aside": OurWay("every_layer", updates_aside=True),
    "early, no barriers on activations": OurWay("every_layer", store="none"),
}
STOCK, WITHOUT_XLA = "xla", "no xla"
# model.fit, and whether our callback is there.
FITS = {"fit": False, "auto": True}
QUICK = (STOCK, WITHOUT_XLA, "early", "joint")
STEPS = (*QUICK, *(name for name in OURS if name not in QUICK))


@dataclass(frozen=True)
class AskedWays:
    """What one process makes: names of ways, and the CUDA priority of its main stream if it has one."""

    names: list[str]
    priority: int | None = None


class Ready(TypedDict, total=False):
    """Its first answer: which ways can run, what there is to say of each, and what XLA made of some."""

    ready: list[str]
    said: dict[str, str]
    device: str
    modules: dict[str, Row]
    versions: dict[str, str]
