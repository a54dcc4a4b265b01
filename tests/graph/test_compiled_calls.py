"""XLA compiles what it can: tasks that it refuses when it tries stay op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.test_compile_tasks import traced_training
from tf_ooo.errors import GraphError
from tf_ooo.rewriting import compiled_calls
from tf_ooo.rewriting.compile_tasks import CompileTasksPass
from tf_ooo.rewriting.compiled_calls import as_compiled
from tf_ooo.rewriting.result import CompiledTasks


@pytest.fixture
def refuse(monkeypatch):
    """XLA refuses the tasks of these kinds."""

    def set_to(*kinds):
        tried = compiled_calls._why_not

        def why_not(functions, called):
            called = list(called)
            refused = [name for name, *_ in called if name.split("_")[2] in kinds]
            return f"no kernel for {refused[0]}" if refused else tried(functions, called)

        monkeypatch.setattr(compiled_calls, "_why_not", why_not)

    return set_to


@dataclass(frozen=True)
class Made:
    graph_def: Any
    compiled: CompiledTasks


def made_of(step):
    """Return a function that makes calls of a step's tasks, and the ops that it was refused each time."""
    asked = []

    def make(refused):
        asked.append(refused)
        done = CompileTasksPass(step.tasks, step.general, refused)(step.before)
        return Made(done.graph_def, CompiledTasks.of(done.notes))

    return make, asked


def test_a_task_that_is_refused_stays_op_by_op(refuse):
    refuse("dO")
    step = traced_training()
    make, asked = made_of(step)
    result = as_compiled(make)
    assert [{name.split("/")[0] for name in refused} for refused in asked] == [set(), {"dO_0", "dO_1"}]
    assert {name.split("/")[1].split("_")[0] for name in result.compiled.calls} == {"F", "U"}
    left = {name for name in step.tasks if name.startswith("dO")}
    assert left <= {node.name for node in result.graph_def.node}
    said = f"op by op: {len(asked[-1])} tasks that XLA cannot compile (no kernel for "
    assert said in result.compiled.text
    for was, now in zip(step.run(step.before), step.run(result.graph_def), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-5)


def test_nothing_is_left_to_compile(refuse):
    refuse("F", "dO", "U")
    make, asked = made_of(traced_training())
    with pytest.raises(GraphError, match="XLA cannot compile a task: no kernel for ooo_task"):
        as_compiled(make)
    assert [bool(refused) for refused in asked] == [False, True, True]


@pytest.mark.parametrize("error", [tf.errors.ResourceExhaustedError, tf.errors.UnavailableError])
def test_a_full_or_lost_device_refuses_nothing(monkeypatch, error):
    def run():
        raise error(None, None, "no more\nof it")

    monkeypatch.setattr(compiled_calls.xla_calls, "run_calls", lambda calls: run)
    make, asked = made_of(traced_training())
    with pytest.raises(GraphError, match="XLA cannot compile a task: no more$"):
        as_compiled(make)
    assert asked == [frozenset()]


def test_what_always_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(compiled_calls, "_why_not", lambda functions, called: "no kernel")
    make, _ = made_of(traced_training())
    with pytest.raises(GraphError, match="XLA cannot compile a task: no kernel"):
        as_compiled(lambda refused: make(frozenset()))
