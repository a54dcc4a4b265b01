"""Turns options by name, ``mode="pipeline", devices=4``, into the typed options that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.ranks.launch import launched_with_workers
from tf_ooo.modes.table import MODES, Pipeline, SingleDevice
from tf_ooo.options import ModeOptions
from tf_ooo.options.base import choice, is_default, owners_of

AUTO = "auto"


class Options:
    """Holds a mode and its options: ``Options(mode="pipeline", devices=4)`` is ``Pipeline(devices=4)``.

    The fields of the mode's own options can be read here, too.

    Args:
        mode: ``"auto"``, ``"single_device"``, ``"data_parallel"``, ``"pipeline"`` or ``"layerpipe"``; auto
            means single_device, in ``model.fit`` data_parallel where horovodrun started several processes;
            with ``devices=`` it chooses, for each model, one device, replicas, a pipeline, or replicas of a
            pipeline.
        **arguments: fields of :class:`tf_ooo.SingleDevice`, :class:`tf_ooo.DataParallel`,
            :class:`tf_ooo.Pipeline` or :class:`tf_ooo.LayerPipe`.

    Attributes:
        typed: the mode's own options; of auto those outside of ``fit``, unless only the mode that auto means
            in ``fit`` has all of them.

    Raises:
        OptionsError: names the option, its value and what is accepted; of an option of another mode, which.
    """

    __slots__ = ("arguments", "mode", "typed")

    def __init__(self, mode: str = AUTO, **arguments: Any) -> None:
        choice((AUTO, *MODES))("mode", mode)
        self.mode, self.arguments = mode, arguments
        try:
            self.typed = self.resolved(workers=False)
        except OptionsError:
            if mode != AUTO or not launched_with_workers():
                raise
            self.typed = self.resolved(workers=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in Options.__slots__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.typed, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and (self.mode, self.typed) == (other.mode, other.typed)

    def __hash__(self) -> int:
        return hash((self.mode, self.typed))

    def __repr__(self) -> str:
        given = {"mode": self.mode, **self.arguments}
        return f"Options({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @classmethod
    def from_arguments(cls, **arguments: Any) -> Options:
        """Return the same as ``Options(...)``."""
        return cls(**arguments)

    @property
    def resolved_mode(self) -> str:
        """Return the mode that runs outside of ``fit``: for ``"auto"`` it is ``"single_device"``."""
        return self.typed.mode

    def resolved(self, *, workers: bool) -> ModeOptions:
        """Return the mode's own options.

        Args:
            workers: for ``fit`` in one of several processes that were launched, where auto is data_parallel.
        """
        options_type, arguments = self._type(workers), dict(self.arguments)
        if self.mode == AUTO and options_type is SingleDevice and arguments.get("devices") == 1:
            del arguments["devices"]
        own = options_type.defaults()
        for name, value in arguments.items():
            if name in own or is_default(name, value):
                continue
            if self.mode != AUTO or not owners_of(name):
                raise options_type.refusal(name, value)
            owners, mode = owners_of(name), options_type.mode
            raise OptionsError(f"{name}={value!r:.80} needs {owners}; mode='auto' is {mode!r} here")
        given = {name: value for name, value in arguments.items() if name in own}
        if self.mode == AUTO and options_type is Pipeline:
            chosen: dict[str, Any] = {"replicas": AUTO}
            if given.get("schedule", AUTO) == AUTO:
                chosen |= {"fall_back": True, "recompute": AUTO}
            given = chosen | given
        return options_type(**given)

    def _type(self, workers: bool) -> type[ModeOptions]:
        if self.mode != AUTO:
            return MODES[self.mode]
        single = self.arguments.get("devices") in (None, 1)
        return MODES["data_parallel"] if workers else SingleDevice if single else Pipeline


def options_for_fit(given: str | Options | ModeOptions, **arguments: Any) -> ModeOptions:
    """Return a callback's typed options, from a mode's name and arguments or from a value given instead."""
    return _typed(given, arguments, workers=launched_with_workers())


def options_for_steps(where: str, given: str | Options | ModeOptions, **arguments: Any) -> SingleDevice:
    """Return typed options of ``where``, which rewrites functions; arguments as :func:`options_for_fit`.

    Raises OptionsError for the modes that need a model and its ``fit``.
    """
    typed = _typed(given, arguments, workers=False)
    if not isinstance(typed, SingleDevice):
        raise OptionsError(
            f"mode={typed.mode!r} is for model.fit with tf_ooo.OOOBackprop; {where} accepts 'single_device'"
        )
    return typed


def _typed(given: str | Options | ModeOptions, arguments: Mapping[str, Any], workers: bool) -> ModeOptions:
    if not isinstance(given, (Options, ModeOptions)):
        return Options(given, **arguments).resolved(workers=workers)
    holder = type(given).__name__
    for name, value in arguments.items():
        if not is_default(name, value):
            raise OptionsError(f"{name}={value!r:.80} beside {holder}(...): write {holder}({name}=...)")
    return given.resolved(workers=workers) if isinstance(given, Options) else given
