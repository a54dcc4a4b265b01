"""Passes that only compiled steps have: each, wherever it runs, changes what it declares and nothing else."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import pytest
import tensorflow as tf

from grappler_passes.passes.base import Pass, PassPipeline
from grappler_passes.passes.verify import verify
from tests import zoo
from tf_ooo.compat import train_function
from tf_ooo.errors import GraphError
from tf_ooo.modes import compiled
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled.controller import ways
from tf_ooo.modes.compiled.session import StreamSession
from tf_ooo.modes.compiled.step import CompiledStep, StreamStep

pytestmark = zoo.needs_xla_streams


@pytest.fixture
def ran(monkeypatch):
    """The types of the passes that have run, each of which was verified by itself."""
    kinds = set()
    call = Pass.__call__

    def verified(self, graph_def, training_graph=None):
        result = call(self, graph_def, training_graph)
        if not isinstance(self, PassPipeline):
            kinds.add(type(self))
            verify(graph_def, result.graph_def, replaced=result.replaced, relaxes=self.relaxes)
        return result

    monkeypatch.setattr(Pass, "__call__", verified)
    return kinds


def passes_of_compiled(kind=Pass):
    for below in kind.__subclasses__():
        if below.__module__.startswith(f"{compiled.__name__}.") and not below.__subclasses__():
            yield below
        yield from passes_of_compiled(below)


def test_each_pass_changes_what_it_declares_and_nothing_else(ran):
    model, x, y = zoo.compiled(zoo.mlp, "momentum", jit_compile=True)
    zoo.make_variables(model, x, y)
    batch = (tf.constant(x), tf.constant(y))
    step = train_function.step_on_data(model, model.train_step)
    for options in ({"store_activations": "backward", "streams": 2}, {"side_updates": True}):
        session = StreamSession(Options(schedule="multi_stream", any_platform=True, **options))
        for way in ways(session.options, 1):
            with contextlib.suppress(GraphError):  # XLA keeps no streams on a CPU
                CompiledStep(StreamStep(step, step, session, way), (batch,), {})
    for module in pkgutil.iter_modules(compiled.__path__, f"{compiled.__name__}."):
        importlib.import_module(module.name)
    assert set(passes_of_compiled()) - ran == set()
