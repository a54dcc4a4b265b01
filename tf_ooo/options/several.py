"""Groups of options that two modes have: of several ranks, and of several devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.addresses import check_devices
from tf_ooo.hosts.ranks.combining import COMPRESSIONS, OPS
from tf_ooo.hosts.ranks.launch import ENGINES
from tf_ooo.options.base import ModeOptions
from tf_ooo.options.checks import choice, option

WEIGHTINGS = ("ranks", "samples")
LOCKSTEPS = ("epoch", "execution")


@dataclass(frozen=True, kw_only=True)
class RankOptions(ModeOptions):
    """Of modes that average gradients over several processes: data_parallel, and pipeline with replicas.

    Attributes:
        engine: ``"horovod"``, ``"collectives"`` (TensorFlow's own), ``"single"``; auto takes the one that
            this process was launched with.
        op: how gradients are combined, ``"Average"``, ``"Sum"`` or ``"Adasum"``.
        compression: what gradients travel as, ``"none"``, ``"fp16"`` or ``"bf16"``.
        weighting: in an average every rank counts the same (``"ranks"``), or every sample does
            (``"samples"``), for batches of unequal size.
        lockstep: ranks agree on the number of steps once an ``"epoch"``, or before each ``"execution"``, so
            that one rank alone may stop within an epoch.
    """

    engine: str = option("auto", choice(ENGINES))
    op: str = option("Average", choice(OPS))
    compression: str = option("none", choice(COMPRESSIONS))
    weighting: str = option("ranks", choice(WEIGHTINGS))
    lockstep: str = option("epoch", choice(LOCKSTEPS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting == "samples" and self.op != "Average":
            raise OptionsError(f"weighting='samples' goes with op='Average' only, not with op={self.op!r}")

    def refuse_averaging(self) -> None:
        """OptionsError for an option of averaging, where one process trains and averages nothing."""
        for name in ("op", "compression", "weighting"):
            value = getattr(self, name)
            if value != self.defaults()[name]:
                raise OptionsError(
                    f"{name}={value!r} is for several processes, whose gradients are averaged, and mode="
                    f"{self.mode!r} trains in one here: horovodrun -np 2 python train.py, or leave {name} out"
                )


def _devices(name: str, value: object) -> None:
    check_devices(value)


def _cost_table(name: str, value: object) -> None:
    if value is not None and not isinstance(value, CostTable):
        raise OptionsError(f"{name}={value!r:.80} is not accepted; accepted: a CostTable")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ModeOptions):
    """Of modes in which one model is spread over several devices: pipeline and layerpipe.

    Attributes:
        devices: a number, device names, or a cluster (docs/pipeline.md); None: all GPUs, or all CPU devices.
        costs: a CostTable of the model's layers, such as ``report.costs`` of an earlier run; None: measured.
    """

    devices: Any = option(None, _devices)
    costs: CostTable | None = option(None, _cost_table)
