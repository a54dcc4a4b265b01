"""Brings out-of-order backprop to unmodified TensorFlow and Keras.

The names load on first use, so ``import tf_ooo`` does not import TensorFlow; ``__init__.pyi`` tells type
checkers what they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from tf_ooo.hosts.ranks.launch import launched, remember_names
from tf_ooo.version import __version__

_NAMES = {
    "keras_callbacks.ooo_backprop": ["OOOBackprop"],
    "tf_ooo.decorator": ["function"],
    "tf_ooo.scope": ["enabled"],
    "tf_ooo.hosts.memory": ["host_memory"],
    "tf_ooo.modes.compiled.priority": ["high_priority_main_stream"],
    "tf_ooo.modes.by_name": ["Options"],
    "tf_ooo.modes.table": ["SingleDevice", "DataParallel", "Pipeline", "LayerPipe"],
    "tf_ooo.rewriting.one_device": ["classify"],
    "tf_ooo.rewriting.plan": ["plan"],
    "tf_ooo.planning.model.schedule": ["Schedule"],
    "tf_ooo.report.report": ["Report"],
    "tf_ooo.planning.simulation.simulator": ["simulate"],
    "tf_ooo.planning.simulation.timeline": ["Timeline"],
    "tf_ooo.costs.layer_costs": ["LayerCosts", "Link"],
    "tf_ooo.errors": [
        *("OOOError", "OptionsError", "GraphError", "CostError", "ScheduleError"),
        *("MemoryLimitError", "BackendError", "PassError"),
    ],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

# Rooms that a script may name: ``from tf_ooo import data_parallel``.
_ROOMS = {"data_parallel": "tf_ooo.modes.data_parallel", "pipeline": "tf_ooo.modes.pipeline"}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - names are strings, from one table


if launched():
    remember_names()  # a script may call hvd.init() before it makes a callback


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name not in _HOME:
        raise AttributeError(f"module 'tf_ooo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
