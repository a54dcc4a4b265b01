"""Defines the options that all or several modes have, and how each value is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeGuard, TypeVar

from tf_ooo.costs.layer_costs import is_amount
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError, did_you_mean
from tf_ooo.hosts.devices import check_devices
from tf_ooo.hosts.ranks.base import COMPRESSIONS, OPS
from tf_ooo.hosts.ranks.launch import ENGINES
from tf_ooo.planning.policies import POLICIES, schedules_of

Check = Callable[[str, object], None]
Value = TypeVar("Value")


def option(default: Value, check: Check, *, of_policy: bool = False) -> Value:
    """Return a field of a dataclass of options; ``check`` is called with its name and value.

    ``of_policy``: only policies that list the option read it; other schedules refuse all values but None.
    """
    return field(default=default, metadata={"check": check, "of_policy": of_policy})


def choice(accepted: Iterable[str]) -> Check:
    """Accept one of some texts; an error for a near miss asks whether that one was meant."""
    accepted = tuple(accepted)

    def check(name: str, value: object) -> None:
        if isinstance(value, str) and value in accepted:
            return
        hint = did_you_mean(value, accepted) if isinstance(value, str) else ""
        raise OptionsError(f"{name}={value!r:.80} is not accepted{hint}; accepted: {listed(accepted)}")

    return check


def accepting(accepted: str, is_accepted: Callable[[object], bool]) -> Check:
    """Refuse values that are not accepted; the text ``accepted`` says what would be."""

    def check(name: str, value: object) -> None:
        if not is_accepted(value):
            raise OptionsError(f"{name}={value!r:.80} is not accepted; accepted: {accepted}")

    return check


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole_number(least: int, *, optional: bool = False) -> Check:
    """Accept an int of at least ``least``, or None where it is ``optional``."""
    accepted = f"{'None or ' if optional else ''}an int of at least {least}"
    return accepting(accepted, lambda value: optional if value is None else _is_int(value, least))


def number_or_numbers(least: int) -> Check:
    """Accept None, an int of at least ``least``, or a list of such ints of at least 1."""

    def is_accepted(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return bool(value) and all(_is_int(each, max(1, least)) for each in value)
        return value is None or _is_int(value, least)

    return accepting(
        f"None, an int of at least {least}, or a list with one of at least 1 for each", is_accepted
    )


def _is_int_or_auto(value: object) -> bool:
    return value == "auto" or _is_int(value, 1)


def _is_folder(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


number_or_auto = accepting(
    "None, 'auto', or an int of at least 1", lambda value: value is None or _is_int_or_auto(value)
)
parts_or_auto = accepting("'auto', or an int of at least 1", _is_int_or_auto)
seconds = accepting("None or seconds from 0", lambda value: value is None or is_amount(value))
seconds_from_0 = accepting("seconds from 0", is_amount)
folder = accepting("None or a folder", lambda value: value is None or _is_folder(value))
flag = accepting("True, False", lambda value: isinstance(value, bool))
flag_or_auto = accepting(
    "'auto', True, False", lambda value: isinstance(value, bool) or isinstance(value, str) and value == "auto"
)
yes_no_or_none = accepting("True, False, None", lambda value: value is None or isinstance(value, bool))


def listed(accepted: Iterable[str]) -> str:
    """Return texts in quotes, separated by commas."""
    return ", ".join(repr(item) for item in accepted)


Own = TypeVar("Own", bound="ModeOptions")
_OF_ONE_PROCESS = ("timeline", "dump_dir")


@dataclass(frozen=True, kw_only=True)
class ModeOptions:
    """Is the base class of all modes' options: a frozen value, checked when it is made.

    A type with a ``mode`` is a mode's; the ones without are groups of fields that several modes have.

    Attributes:
        mode: the mode's name.
        why_not: for some options of other modes, why this mode refuses them; else ``"is not for ..."``.
        schedule_files: whether ``schedule`` may also be a file.
        schedule: ``"auto"``, or a policy's name, which is applied as asked.
        profile_steps: steps that are measured, after one that is not; 0 measures nothing.  On one device
            ``"auto"`` measures as many as it needs to be sure, no more than 40.
        timeline: folder for ``report.html`` and ``trace.json`` at the end; None writes nothing.
        strict: raise what went wrong; otherwise the stock step runs on and the report says why.

    Raises:
        OptionsError: names the option, its value and what is accepted; of an option of another mode, the
            modes that have it.
    """

    mode: ClassVar[str]
    why_not: ClassVar[Mapping[str, str]] = {}
    schedule_files: ClassVar[bool] = False

    schedule: str = "auto"
    profile_steps: int = option(3, whole_number(0))
    timeline: str | os.PathLike[str] | None = option(None, folder)
    strict: bool = option(False, flag)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "mode" in vars(cls):
            _OF_MODES.append(cls)

    def __new__(cls: type[Own], *args: object, **given: object) -> Own:
        """Refuse options of other modes and options without a value: TypeErrors in ``__init__``."""
        if args:
            name = cls.__name__
            raise OptionsError(f"{name}({args[0]!r:.40}): options are given by name, {name}(schedule='auto')")
        for name, value in given.items():
            if name not in cls.defaults():
                raise cls.refusal(name, value)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not (self.schedule_files and is_file(self.schedule)):
            check_schedule(self.mode, self.schedule)
        for item in fields(self):
            if "check" in item.metadata:
                item.metadata["check"](item.name, getattr(self, item.name))
                if item.metadata["of_policy"]:
                    self._check_readers(item.name)

    def _check_readers(self, name: str) -> None:
        value = getattr(self, name)
        readers = [policy.name for policy in POLICIES.values() if name in policy.options]
        if value is not None and self.schedule not in readers:
            raise OptionsError(f"{name}={value} goes with schedule={listed(readers)} only")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the value of each option where the user gives none, by name."""
        return {item.name: item.default for item in fields(cls)}

    @classmethod
    def refusal(cls, name: str, value: object) -> OptionsError:
        """Return the error to raise for an option that this mode does not have."""
        if not (owners := owners_of(name)):
            known = dict.fromkeys(each for mode in (cls, *_OF_MODES) for each in mode.defaults())
            hint = did_you_mean(name, known)
            return OptionsError(f"unknown option {name}={value!r:.80}{hint}; known: {', '.join(known)}")
        clause = cls.why_not.get(name, f"is not for mode={cls.mode!r}")
        return OptionsError(f"{name}={value!r:.80} {clause}; it needs {owners}")

    @property
    def may_fall_back(self) -> bool:
        """Return whether stock may run: only with ``"auto"``; a named schedule is applied as asked."""
        return self.schedule == "auto"

    @property
    def policy_options(self) -> dict[str, Any]:
        """Return the values that are given for the schedule's own options."""
        names = [item.name for item in fields(self) if item.metadata.get("of_policy")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def shared(self) -> dict[str, Any]:
        """Return the options that all processes of one training must agree on, as JSON types."""
        values = {name: getattr(self, name) for name in self.defaults() if name not in _OF_ONE_PROCESS}
        return {"mode": self.mode, **values}


# Filled as the modes' options are defined; tf_ooo.modes.table imports them all.
_OF_MODES: list[type[ModeOptions]] = []


def owners_of(name: str) -> str:
    """Return the modes that have an option, as ``mode='a' or mode='b'``; empty where none has it."""
    names = sorted(owner.mode for owner in _OF_MODES if name in owner.defaults())
    return " or ".join(f"mode={mode!r}" for mode in names)


def is_default(name: str, value: object) -> bool:
    """Return whether a mode that has this option would do the same without it."""
    return any(value == owner.defaults().get(name, MISSING) for owner in _OF_MODES)


def is_file(schedule: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a schedule is the name of a file: a path, or a text with a dot or a slash."""
    if isinstance(schedule, os.PathLike):
        return isinstance(os.fspath(schedule), str)
    return isinstance(schedule, str) and any(sign in schedule for sign in {".", "/", os.sep})


def check_schedule(mode: str, schedule: object) -> None:
    """Raise OptionsError unless ``mode`` trains by the schedule of this name, or it is ``"auto"``."""
    accepted = ("auto", *schedules_of(mode))
    if schedule in accepted:
        return
    if is_file(schedule):
        takers = " or ".join(f"mode={owner.mode!r}" for owner in _OF_MODES if owner.schedule_files)
        raise OptionsError(
            f"schedule={os.fspath(schedule)!r:.80}: a schedule's file is run by {takers} only, not by "
            f"mode={mode!r}; accepted: {listed(accepted)}"
        )
    policy = POLICIES.get(schedule) if isinstance(schedule, str) else None
    if policy is None:
        choice(accepted)("schedule", schedule)
    else:
        needed = " or ".join(f"mode={name!r}" for name in policy.trains)
        raise OptionsError(
            f"schedule={schedule!r} is none of mode={mode!r}: it needs {needed}; accepted: {listed(accepted)}"
        )


@dataclass(frozen=True, kw_only=True)
class TaskOptions(ModeOptions):
    """Holds the option of modes in which XLA may compile each task of a step separately.

    Attributes:
        compile_tasks: each task (F and dO of a stage or layer, dW of a layer, U) is one call that XLA
            compiles; what XLA cannot compile runs op by op.  ``"auto"``: where all devices are GPUs and Keras
            would compile the step, as ``jit_compile="auto"`` does there; not on CPUs.
    """

    compile_tasks: bool | str = option("auto", flag_or_auto)

    def compiles_tasks(self, as_keras: bool, devices: Iterable[str]) -> bool:
        """Return whether XLA compiles tasks; ``as_keras``: whether Keras would have XLA compile steps."""
        if self.compile_tasks != "auto":
            return bool(self.compile_tasks)
        return as_keras and all("GPU" in device for device in devices)


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
        compression: the type that gradients are sent as, ``"none"``, ``"fp16"`` or ``"bf16"``.
        weighting: in an average every rank counts the same (``"ranks"``), or every sample does
            (``"samples"``), for batches of unequal size.
        lockstep: ``"epoch"``: ranks agree on the number of steps once an epoch; ``"execution"``: before each
            execution, with its batches in hand; ``"auto"``: once an epoch, and before each execution on
            whether all go on, where a callback acts on batches and may stop a rank alone.
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
        """Raise OptionsError for an option of averaging where a single process trains."""
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
        compare: also measure some stock steps on one device, then undo them, so that the report tells the
            gain over them; None: at least three, six where that takes less than 5% of the fit.
    """

    devices: Any = option(None, lambda name, value: check_devices(value))
    compare: bool | None = option(None, yes_no_or_none)
    costs: CostTable | None = option(
        None, accepting("a CostTable", lambda value: value is None or isinstance(value, CostTable))
    )


@dataclass(frozen=True, kw_only=True)
class OneDeviceOptions(ModeOptions):
    """Holds options of rewriting, comparing and compiling steps on one device.

    Attributes:
        compare: ``"auto"``: True takes turns with stock from the first step on, however short the fit is;
            False never compares and keeps stock; None compares when the rest of the fit becomes at most 5%
            longer by it.  With a memory limit or ``strict`` None is True.
        memory_limit_bytes: peak bytes that the planned order may keep alive; None: no limit.  With a limit,
            ``"auto"`` takes the order with the lowest peak.
        dump_dir: folder for the graph after every pass; None writes nothing.
        batch_size: rows of one batch, where the graph leaves the number open; used to count bytes only.
            None: that of the first batch.
        unroll: jit_compile=True on a GPU: at most so many of the model's ``steps_per_execution`` go into one
            graph, in which a step begins before all of the last is done; 1: Keras' own loop; None: 8.
        streams: jit_compile=True: over how many side streams dW are spread.
        store_activations: jit_compile=True: who reads the activations that dW needs from memory, rather than
            computing them again: ``"all"``, ``"backward"``, ``"cost"`` (as costs say) or ``"none"``; auto:
            cost, and with ``schedule="auto"`` what is measured to be fastest.
        side_updates: jit_compile=True: what leads from a dW to one new tensor of the update (the weight of
            plain gradient descent, the velocity of momentum) runs on the side stream, too.
        any_platform: jit_compile=True: rewrite also where XLA has no streams, such as on a CPU.  The
            calls then run one after the other: for tests, there is no gain.
        gains: jit_compile=True: file of a :class:`tf_ooo.costs.table.GainTable`, seconds saved by running a
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
        """Return the given options, such as ``streams=2``, that do nothing unless XLA compiles the step."""
        usual = self.defaults()
        given = {name: getattr(self, name) for name in _OF_XLA}
        return [f"{name}={value!r:.80}" for name, value in given.items() if value != usual[name]]
