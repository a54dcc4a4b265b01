"""The ways of training that ``tf-ooo bench single`` compares, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OurWay:
    """How dW are moved to side streams.

    Attributes:
        plan: of :mod:`tf_ooo.modes.compiled.plans`.
        streams: side streams.
        store: which activations stay stored, see :func:`tf_ooo.modes.compiled.step.default_rewriter`.
        updates_aside: updates run on the side streams too.
        measured: which dW gain is measured, not calculated.
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
EVERY = (*STEPS, *FITS)
