"""The variables of a model on the devices of its parts, until the fit ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tf_ooo.hosts.target import Target
from tf_ooo.rewriting.naming import named
from tf_ooo.tracing.variables import Moved, all_variables


class Placed:
    """Moves variables to devices and brings them back.

    :meth:`restore` may be called before :meth:`move`, and after a move that was interrupted.

    Args:
        model: whose variables.
        target: where they go.
    """

    def __init__(self, model: Any, target: Target) -> None:
        self._model, self._target, self._moved = model, target, Moved(model)

    def move(self, devices: Mapping[str, str]) -> None:
        """Each to the device that stands by its name in graphs; those that have none stay."""
        variables = named(all_variables(self._model))
        by_id = {id(variable): devices[name] for name, variable in variables.items() if name in devices}
        self._moved.move(by_id, variables.values())

    def check_captures(self, captures: Iterable[Any]) -> None:
        """See :meth:`Moved.check_captures`."""
        self._moved.check_captures(captures)

    def restore(self) -> list[str]:
        """Back with their present values; names those whose device is gone."""
        self._target.lost()  # a read from a worker that has just died would wait for ever
        return self._moved.restore(self._target.reachable)
