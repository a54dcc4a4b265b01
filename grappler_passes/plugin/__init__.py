"""Loads the Grappler plug-in, by which TensorFlow hands its final training graph to a Python function.

>>> from grappler_passes import plugin
>>> plugin.load()
>>> request = plugin.register(plugin.Request("mine", rewrite=lambda graph_def: None))
>>> with plugin.tracing(request):
...     train_step(x, y)          # a tf.function: traced, and rewritten before its first run
>>> plugin.unregister("mine")
"""

from grappler_passes.plugin.callback import AnswerError, check_answer, resting
from grappler_passes.plugin.loader import PluginError, load, loaded
from grappler_passes.plugin.requests import (
    Request,
    VariableInfo,
    describe_keras,
    described_by_handle,
    register,
    tracing,
    unregister,
)

__all__ = [
    "AnswerError",
    "PluginError",
    "Request",
    "VariableInfo",
    "check_answer",
    "describe_keras",
    "described_by_handle",
    "load",
    "loaded",
    "register",
    "resting",
    "tracing",
    "unregister",
]
