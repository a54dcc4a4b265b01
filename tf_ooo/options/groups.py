"""Groups of options that two modes have: of several ranks, of several devices, of a step on one device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.addresses import check_devices
from tf_ooo.hosts.ranks.base import COMPRESSIONS, OPS
from tf_ooo.hosts.ranks.launch import ENGINES
from tf_ooo.options.base import (
    ModeOptions,
    accepting,
    choice,
    flag,
    folder,
    option,
    seconds,
    seconds_from_0,
    whole_number,
    yes_no_or_none,
)

WEIGHTINGS = ("ranks", "samples")
LOCKSTEPS = ("auto", "epoch", "execution")
# Only steps that XLA compiles read these.
_OF_XLA = (
    *("unroll", "streams", "store_activations", "side_updates", "any_platform"),
    *("gains", "measure_gains_s"),
)
STORES = ("auto", "cost", "all", "backward", "none")


@dataclass(frozen=True, kw_only=True)
class RankOptions(ModeOptions):
    """Holds options of modes that average gradients over processes: data_parallel, pipeline with replicas.

    Attributes:
        engine: ``"horovod"``, ``"collectives"`` (TensorFlow's own), ``"single"``; auto takes the one that
            this process was launched with.
        op: how gradients are combined, ``"Average"``, ``"Sum"`` or ``"Adasum"``.
        compression: what gradients travel as, ``"none"``, ``"fp16"`` or ``"bf16"``.
        weighting: in an average every rank counts the same (``"ranks"``), or every sample does
            (``"samples"``), for batches of unequal size.
        lockstep: ``"auto"``: ranks agree on the number of steps once an epoch, and, where a callback acts on
            batches and may stop a rank alone, before each execution on whether all go on; ``"epoch"``: on
            the number only; ``"execution"``: before each, with its batches in hand.
        stop_timeout_s: with ``"epoch"``, how long a rank that a callback has stopped waits for the others.
    """

    engine: str = option("auto", choice(ENGINES))
    op: str = option("Average", choice(OPS))
    compression: str = option("none", choice(COMPRESSIONS))
    weighting: str = option("ranks", choice(WEIGHTINGS))
    lockstep: str = option("auto", choice(LOCKSTEPS))
    stop_timeout_s: float = option(600.0, seconds_from_0)

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


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ModeOptions):
    """Holds options of modes in which one model is spread over several devices: pipeline and layerpipe.

    Attributes:
        devices: a number, device names, or a cluster (docs/pipeline.md); None: all GPUs, or all CPU devices.
        costs: a CostTable of the model's layers, such as ``report.costs`` of an earlier run; None: measured.
        compare: measure some stock steps on one device, too, which are undone, so that the report says what
            was gained over them; None: at least three, six where that takes less than 5% of the fit.
    """

    devices: Any = option(None, lambda name, value: check_devices(value))
    compare: bool | None = option(None, yes_no_or_none)
    costs: CostTable | None = option(
        None, accepting("a CostTable", lambda value: value is None or isinstance(value, CostTable))
    )


@dataclass(frozen=True, kw_only=True)
class OneDeviceOptions(ModeOptions):
    """Holds options of rewriting, of the comparison and of compiled steps, on one device.

    Attributes:
        compare: ``"auto"``: True takes turns with stock from the first step on, however short the fit is;
            False never, and keeps stock; None when what is left of the fit pays for it, which then becomes no
            more than 5% longer.  With a memory limit or ``strict`` None is True.
        memory_limit_bytes: peak bytes that the planned order may keep alive; None: no limit.  With a limit,
            ``"auto"`` takes the order with the lowest peak.
        dump_dir: folder for the graph after every pass; None writes nothing.
        batch_size: rows of one batch, where the graph leaves the number open; used to count bytes only.
            None: that of the first batch.
        unroll: jit_compile=True on a GPU: at most so many of the model's ``steps_per_execution`` go into one
            graph, in which no step waits for all of the step before; 1: Keras' own loop; None: 8.
        streams: jit_compile=True: how many side streams dW is dealt out to.
        store_activations: jit_compile=True: who reads the activations that dW needs from memory, rather than
            computing them again: ``"all"``, ``"backward"``, ``"cost"`` (as costs say) or ``"none"``; auto:
            cost, and with ``schedule="auto"`` what is measured to be fastest.
        side_updates: jit_compile=True: what leads from a dW to one new tensor of the update (the weight of
            plain gradient descent, the velocity of momentum) runs on the side stream, too.
        any_platform: jit_compile=True: rewrite also where XLA has no streams, such as on a CPU.  The
            calls then run one after the other: for tests, there is no gain.
        gains: jit_compile=True: file of a :class:`tf_ooo.costs.gains.GainTable`, seconds saved by running a
            dW beside a part of the main stream; None: they are measured, or calculated.
        measure_gains_s: jit_compile=True, schedules ``"auto"`` and ``"multi_stream"``: seconds for measuring
            gains before the first step, into ``report.gains``; 0: they are calculated; None: 60 on a CUDA
            GPU, else 0.
    """

    compare: bool | None = option(None, yes_no_or_none)
    memory_limit_bytes: int | None = option(None, whole_number(1, optional=True))
    dump_dir: str | os.PathLike[str] | None = option(None, folder)
    batch_size: int | None = option(None, whole_number(1, optional=True))
    unroll: int | None = option(None, whole_number(1, optional=True))
    streams: int = option(1, whole_number(1))
    store_activations: str = option("auto", choice(STORES))
    side_updates: bool = option(False, flag)
    any_platform: bool = option(False, flag)
    gains: str | os.PathLike[str] | None = option(None, folder)
    measure_gains_s: float | None = option(None, seconds)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure_gains_s and self.gains is not None:
            file = os.fspath(self.gains)
            raise OptionsError(f"measure_gains_s={self.measure_gains_s!r}: gains={file!r} is a table already")

    @property
    def given_for_xla(self) -> list[str]:
        """The options, ``streams=2``, that do nothing where XLA does not compile the step."""
        usual = self.defaults()
        given = {name: getattr(self, name) for name in _OF_XLA}
        return [f"{name}={value!r:.80}" for name, value in given.items() if value != usual[name]]
