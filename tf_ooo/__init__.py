"""Out-of-order backprop for unmodified TensorFlow and Keras.

The names load on first use, so ``import tf_ooo`` does not import TensorFlow; ``__init__.pyi`` tells type
checkers what they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from tf_ooo.hosts.ranks.launch import launched, remember_names
from tf_ooo.version import __version__

_HOME = {
    "OOOBackprop": "keras_callbacks.ooo_backprop",
    "function": "tf_ooo.decorator",
    "enabled": "tf_ooo.scope",
    "high_priority_main_stream": "tf_ooo.modes.compiled.priority",
    "Options": "tf_ooo.modes.by_name",
    "SingleDevice": "tf_ooo.modes.table",
    "DataParallel": "tf_ooo.modes.table",
    "Pipeline": "tf_ooo.modes.table",
    "LayerPipe": "tf_ooo.modes.table",
    "classify": "tf_ooo.rewriting.planner",
    "plan": "tf_ooo.rewriting.plan",
    "Schedule": "tf_ooo.planning.model.schedule",
    "Report": "tf_ooo.report.report",
    "simulate": "tf_ooo.planning.simulation.simulator",
    "Timeline": "tf_ooo.planning.simulation.timeline",
    "LayerCosts": "tf_ooo.costs.layer_costs",
    "Link": "tf_ooo.costs.layer_costs",
    "OOOError": "tf_ooo.errors",
    "OptionsError": "tf_ooo.errors",
    "GraphError": "tf_ooo.errors",
    "CostError": "tf_ooo.errors",
    "ScheduleError": "tf_ooo.errors",
    "MemoryLimitError": "tf_ooo.errors",
    "BackendError": "tf_ooo.errors",
    "PassError": "tf_ooo.errors",
}

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
