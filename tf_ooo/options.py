"""What a user can set.  One frozen object, checked when it is made."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.device_names import check_devices
from tf_ooo.hosts.ranks.names import COMPRESSIONS, ENGINES, OPS
from tf_ooo.planning.policies import BACKWARD_ORDERS, POLICIES

MODES = ("auto", "single_device", "data_parallel", "pipeline", "layerpipe")
WEIGHTINGS = ("ranks", "samples")
LOCKSTEPS = ("epoch", "execution")
_OF_ONE_PROCESS = ("timeline", "dump_dir")
# Orders of computation and of communication; need data_parallel.
PARALLEL_SCHEDULES = ("reverse_first_k", "search")
# Need pipeline; fast_forward is one of them and of one device.
PIPELINE_SCHEDULES = tuple(policy.name for policy in POLICIES.values() if "pipeline" in policy.modes)
# For steps that XLA compiles.
COMPILED_SCHEDULES = ("multi_stream",)
NEEDS_XLA = "is for steps that XLA compiles: it needs jit_compile=True"
# Asynchronous.
LAYERPIPE_SCHEDULES = tuple(policy.name for policy in POLICIES.values() if "layerpipe" in policy.modes)
# layerpipe: which weights a backward pass multiplies with.
WEIGHTS = ("stash", "ema", "latest")
STORES = ("auto", "cost", "all", "backward", "none")
SCHEDULES = tuple(
    dict.fromkeys(
        (
            "auto",
            *BACKWARD_ORDERS,
            *COMPILED_SCHEDULES,
            *PARALLEL_SCHEDULES,
            *PIPELINE_SCHEDULES,
            *LAYERPIPE_SCHEDULES,
        )
    )
)


@dataclass(frozen=True)
class Options:
    """How to rewrite a training step.

    Attributes:
        mode: ``"auto"``, ``"single_device"``, ``"data_parallel"``, ``"pipeline"`` or ``"layerpipe"``; auto
            means single_device, and in ``model.fit`` data_parallel where horovodrun started several
            processes.
        schedule: ``"auto"`` (rewrite, measure both orders, keep the faster) or a policy's name,
            which is applied as asked; reverse_first_k and search are for ``mode="data_parallel"``.  For
            ``mode="pipeline"`` auto takes the schedule with the shortest predicted step.
        memory_limit_bytes: peak bytes that the planned order may keep alive; None: no limit.  With a
            limit, ``"auto"`` takes the order with the lowest peak.  Holds for each device.
        profile_steps: steps of each order that are timed, after one that is not; 0 measures nothing.
            pipeline: steps (3 at most) that are profiled on one device before the model is cut.
        timeline: folder for ``report.html`` and ``trace.json`` at the end; None writes nothing.
        strict: raise what went wrong; otherwise the stock step runs on and the report says why.
        dump_dir: folder for the graph after every pass; None writes nothing.
        batch_size: rows of one batch on one device, where the graph leaves the number open; used to
            count bytes only.  None: that of the first batch.
        engine: data_parallel: ``"horovod"``, ``"collectives"`` (TensorFlow's own), ``"single"``; auto takes
            the one that this process was launched with.
        op: data_parallel: how gradients are combined, ``"Average"``, ``"Sum"`` or ``"Adasum"``.
        compression: data_parallel: what gradients travel as, ``"none"``, ``"fp16"`` or ``"bf16"``.
        weighting: data_parallel: in an average every rank counts the same (``"ranks"``), or every sample
            does (``"samples"``), for batches of unequal size.
        lockstep: data_parallel: ranks agree on the number of steps once an ``"epoch"``, or before each
            ``"execution"``, so that one rank alone may stop within an epoch.
        unroll: data_parallel, and jit_compile=True on a GPU: at most so many of the model's
            ``steps_per_execution`` go into one graph, in which no step waits for all of the step before; 1:
            Keras' own loop; None: 2 to 16, fewer of a large step (data_parallel), or 8.  layerpipe: so many
            batches are taken and trained in one call of a function; None: 8, fewer of a large step.
        streams: jit_compile=True: how many side streams dW is dealt out to.
        store_activations: jit_compile=True: who reads the activations that dW needs from memory, rather than
            computing them again: ``"all"``, ``"backward"``, ``"cost"`` (as costs say) or ``"none"``; auto:
            cost, and with ``schedule="auto"`` what is measured to be fastest.
        gains: jit_compile=True: file of a :class:`tf_ooo.costs.gains.GainTable`, seconds saved by running a
            dW beside a part of the main stream; None: they are measured, or calculated.
        measure_gains_s: jit_compile=True, schedules ``"auto"`` and ``"multi_stream"``: seconds for measuring
            gains before the first step, into ``report.gains``; 0: they are calculated; None: 60 on a CUDA
            GPU, else 0.
        side_updates: jit_compile=True: what leads from a dW to one new tensor of the update (the weight of
            plain gradient descent, the velocity of momentum) runs on the side stream, too.
        any_platform: jit_compile=True: rewrite also where XLA has no streams, such as on a CPU.  The
            calls then run one after the other: for tests, there is no gain.
        k: reverse_first_k: how many layers' dW wait; None: chosen by simulation from measured costs.
        devices: pipeline, layerpipe: a number, device names, or a cluster (see docs/pipeline.md); None: all
            GPUs, or all CPU devices.
        microbatches: pipeline: parts of a batch.
        chunks: interleaved_1f1b: stages on each device; None: 2 to 4 are tried.
        group: modulo: layers of a group; None: tried.
        weights: layerpipe: which weights a backward pass multiplies with: ``"stash"`` (those of its forward
            pass, exact), ``"ema"`` (rebuilt from a moving average of the updates) or ``"latest"``.
        drain_steps: layerpipe: no batch comes in before all before it are done, every so many batches, so
            that a checkpoint taken then holds all their updates; None: at the ends of epochs only.
        rate_warmup_steps: layerpipe: in the first so many steps learning rates are smaller, the more the
            later a layer's gradients are (docs/layerpipe.md); None: not.
        accumulate_steps: pipedream_2bw: so many batches' gradients are one update; None: the fewest for which
            two versions of the weights do, 2 (P - 1) on P devices, at least P.
        replicas: pipeline: the number of processes, each with a pipeline of its own, whose gradients are
            averaged; None: as many as horovodrun started.
        costs: pipeline, layerpipe: a CostTable of the model's layers, such as ``report.costs`` of an earlier
            run; None: measured.

    Raises:
        OptionsError: names the option, its value and what is accepted.
    """

    mode: str = "auto"
    schedule: str = "auto"
    memory_limit_bytes: int | None = None
    profile_steps: int = 3
    timeline: str | os.PathLike[str] | None = None
    strict: bool = False
    dump_dir: str | os.PathLike[str] | None = None
    batch_size: int | None = None
    engine: str = "auto"
    op: str = "Average"
    compression: str = "none"
    weighting: str = "ranks"
    lockstep: str = "epoch"
    unroll: int | None = None
    k: int | None = None
    devices: Any = None
    microbatches: int = 8
    chunks: int | None = None
    group: int | None = None
    replicas: int | None = None
    streams: int = 1
    store_activations: str = "auto"
    side_updates: bool = False
    any_platform: bool = False
    gains: str | os.PathLike[str] | None = None
    measure_gains_s: float | None = None
    weights: str = "stash"
    drain_steps: int | None = None
    rate_warmup_steps: int | None = None
    accumulate_steps: int | None = None
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("schedule", self.schedule, SCHEDULES)
        for name, accepted in _CHOICES.items():
            _check_choice(name, getattr(self, name), accepted)
        if self.weighting == "samples" and self.op != "Average":
            raise OptionsError(f"weighting='samples' goes with op='Average' only, not with op={self.op!r}")
        _check_int("memory_limit_bytes", self.memory_limit_bytes, least=1, optional=True)
        _check_int("batch_size", self.batch_size, least=1, optional=True)
        if self.schedule in PARALLEL_SCHEDULES and self.mode != "data_parallel":
            raise OptionsError(
                f"schedule={self.schedule!r} orders communication: it needs mode='data_parallel'"
            )
        if self.schedule in COMPILED_SCHEDULES and self.mode not in ("auto", "single_device"):
            raise OptionsError(f"schedule={self.schedule!r} {NEEDS_XLA} and mode='single_device'")
        _check_int("k", self.k, least=0, optional=True)
        if self.k is not None and self.schedule != "reverse_first_k":
            raise OptionsError(f"k={self.k} goes with schedule='reverse_first_k' only")
        self._check_pipeline()
        self._check_layerpipe()
        _check_int("unroll", self.unroll, least=1, optional=True)
        _check_int("profile_steps", self.profile_steps, least=0, optional=False)
        _check_path("timeline", self.timeline)
        _check_path("dump_dir", self.dump_dir)
        _check_path("gains", self.gains)
        self._check_measuring()
        _check_int("streams", self.streams, least=1, optional=False)
        for name in ("strict", "any_platform", "side_updates"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionsError(f"{name}={value!r} is not accepted; accepted: True, False")

    def _check_measuring(self) -> None:
        seconds = self.measure_gains_s
        if seconds is None:
            return
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < float("inf"):
            raise OptionsError(
                f"measure_gains_s={seconds!r} is not accepted; accepted: None or seconds from 0"
            )
        if seconds and self.gains is not None:
            file = os.fspath(self.gains)
            raise OptionsError(f"measure_gains_s={seconds!r}: gains={file!r} is a table already")

    def _check_pipeline(self) -> None:
        _check_int("microbatches", self.microbatches, least=1, optional=False)
        for name, schedule in (("chunks", "interleaved_1f1b"), ("group", "modulo")):
            value = getattr(self, name)
            _check_int(name, value, least=1, optional=True)
            if value is not None and self.schedule != schedule:
                raise OptionsError(f"{name}={value} goes with schedule={schedule!r} only")
        _check_int("replicas", self.replicas, least=1, optional=True)
        if self.replicas is not None and self.mode == "layerpipe":
            raise OptionsError(f"replicas={self.replicas} needs mode='pipeline'")
        if self.mode in ("pipeline", "layerpipe"):
            if self.mode == "pipeline" and self.schedule not in ("auto", *PIPELINE_SCHEDULES):
                raise OptionsError(
                    f"schedule={self.schedule!r} is none of mode='pipeline'; accepted: 'auto', "
                    f"{_listed(PIPELINE_SCHEDULES)}"
                )
            more = _OF_RANKS if self.mode == "layerpipe" else ("unroll",)
            self._check_unused((*_OF_ONE_DEVICE, *more))
            check_devices(self.devices)
            if self.costs is not None and not isinstance(self.costs, CostTable):
                raise OptionsError(f"costs={self.costs!r:.80} is not accepted; accepted: a CostTable")
            return
        if self.schedule in PIPELINE_SCHEDULES and self.schedule not in BACKWARD_ORDERS:
            raise OptionsError(f"schedule={self.schedule!r} needs mode='pipeline'")
        for name in ("devices", "costs", "replicas", "microbatches"):
            if getattr(self, name) != getattr(Options, name):
                raise OptionsError(f"{name}={getattr(self, name)!r:.80} needs mode='pipeline'")

    def _check_unused(self, names: Iterable[str]) -> None:
        """OptionsError for what this mode would not look at."""
        for name in names:
            if getattr(self, name) != getattr(Options, name):
                raise OptionsError(f"{name}={getattr(self, name)!r:.80} is not for mode={self.mode!r}")

    def _check_layerpipe(self) -> None:
        for name in ("drain_steps", "rate_warmup_steps", "accumulate_steps"):
            _check_int(name, getattr(self, name), least=1, optional=True)
        self._check_two_versions()
        if self.mode == "layerpipe":
            if self.schedule not in ("auto", *LAYERPIPE_SCHEDULES):
                raise OptionsError(
                    f"schedule={self.schedule!r} is none of mode='layerpipe'; accepted: 'auto', "
                    f"{_listed(LAYERPIPE_SCHEDULES)}"
                )
            if self.microbatches != Options.microbatches:
                raise OptionsError(
                    f"microbatches={self.microbatches} is not for mode='layerpipe': each batch stays whole; "
                    "accumulate_steps= of schedule='pipedream_2bw' makes one update of several batches"
                )
            for name in ("memory_limit_bytes", "dump_dir"):
                if getattr(self, name) is not None:
                    raise OptionsError(f"{name}= is not for mode='layerpipe', which could not keep to it")
            return
        if self.schedule in LAYERPIPE_SCHEDULES:
            raise OptionsError(f"schedule={self.schedule!r} needs mode='layerpipe'")
        if self.weights != "stash":
            raise OptionsError(f"weights={self.weights!r} needs mode='layerpipe'")
        for name in ("drain_steps", "rate_warmup_steps"):
            if getattr(self, name) is not None:
                raise OptionsError(f"{name}={getattr(self, name)} needs mode='layerpipe'")

    def _check_two_versions(self) -> None:
        if self.schedule != "pipedream_2bw":
            if self.accumulate_steps is not None:
                raise OptionsError(
                    f"accumulate_steps={self.accumulate_steps} goes with schedule='pipedream_2bw' only"
                )
            return
        if self.weights != "stash":
            raise OptionsError(
                f"weights={self.weights!r} is not for schedule='pipedream_2bw', which keeps two versions"
            )
        if self.rate_warmup_steps is not None:
            raise OptionsError(
                "rate_warmup_steps= is not for schedule='pipedream_2bw', whose gradients are all one update "
                "late; a LearningRateSchedule can warm up itself"
            )

    @classmethod
    def from_arguments(cls, **arguments: Any) -> Options:
        """Options from keyword arguments; an unknown name is an OptionsError, not a TypeError."""
        known = [item.name for item in fields(cls)]
        for name, value in arguments.items():
            if name not in known:
                raise OptionsError(
                    f"unknown option {name}={value!r}{_did_you_mean(name, known)}; known: {', '.join(known)}"
                )
        return cls(**arguments)

    @property
    def resolved_mode(self) -> str:
        """The mode that runs: ``"auto"`` is ``"single_device"`` in this release."""
        return "single_device" if self.mode == "auto" else self.mode

    def shared(self) -> dict[str, Any]:
        """What all processes of one training must agree on, as JSON types."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in _OF_ONE_PROCESS
        }

    @property
    def may_fall_back(self) -> bool:
        """A named schedule is applied as asked; only ``"auto"`` may go back to the stock order."""
        return self.schedule == "auto"


# Of a step that is rewritten for the device that it is traced on.
_OF_ONE_DEVICE = (
    "streams",
    "store_activations",
    "side_updates",
    "any_platform",
    "gains",
    "measure_gains_s",
    "batch_size",
)
_OF_RANKS = ("engine", "op", "compression", "weighting", "lockstep")
_CHOICES = {
    "engine": ENGINES,
    "op": OPS,
    "compression": COMPRESSIONS,
    "weighting": WEIGHTINGS,
    "lockstep": LOCKSTEPS,
    "store_activations": STORES,
    "weights": WEIGHTS,
}


def refuse_data_parallel(options: Options, where: str) -> None:
    """Raises OptionsError: these modes need a model, whose ``fit`` they take part in."""
    if options.mode in ("data_parallel", "pipeline", "layerpipe"):
        raise OptionsError(
            f"mode={options.mode!r} is for model.fit with tf_ooo.OOOBackprop; {where} accepts 'single_device'"
        )


def _check_choice(name: str, value: object, accepted: Iterable[str]) -> None:
    accepted = tuple(accepted)
    if not isinstance(value, str) or value not in accepted:
        hint = _did_you_mean(value, accepted) if isinstance(value, str) else ""
        raise OptionsError(f"{name}={value!r} is not accepted{hint}; accepted: {_listed(accepted)}")


def _check_int(name: str, value: object, *, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        also = "None or " if optional else ""
        raise OptionsError(f"{name}={value!r} is not accepted; accepted: {also}an int of at least {least}")


def _check_path(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, (str, os.PathLike)) or not os.fspath(value)):
        raise OptionsError(f"{name}={value!r} is not accepted; accepted: None or a folder")


def _did_you_mean(value: str, accepted: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, list(accepted), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _listed(accepted: Iterable[str]) -> str:
    return ", ".join(repr(item) for item in accepted)
