"""XLA compiles each layer's tasks, which stay apart: weights within rounding of those of steps op by op."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.compat import graph_protos
from grappler_passes.graph.dependencies import GraphIndex
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.errors import GraphError, OptionsError
from tf_ooo.modes.data_parallel import compiled, planning
from tf_ooo.tracing.flat import Unrolled

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(60)]

TOGETHER = 2


def trained(engine: Any, make: Any, data: Any, compile_tasks: bool, more: Any = None, **options: Any) -> Any:
    """A model trained by SGD, and the callback; ``more`` are arguments of ``fit``."""
    model = t.compiled(make(), t.momentum(), steps_per_execution=TOGETHER)
    options = {"schedule": "reverse_first_k", "k": 2, "profile_steps": 0, **options}
    callback = tf_ooo.OOOBackprop(tf_ooo.DataParallel(compile_tasks=compile_tasks, **options))
    t.fit(model, data, [callback], **{"epochs": 2, **(more or {})})
    assert t.equal_on_all_ranks(engine, model)
    return model, callback


def close(model: keras.Model, other: keras.Model) -> bool:
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return all(np.abs(a - b).max() <= 1e-5 * np.abs(a).max() for a, b in pairs)


@pytest.fixture
def runs(monkeypatch):
    """Counts runs of functions, compiled ones and others."""
    counted: Counter[str] = Counter()
    run = Unrolled.run

    def counting(self: Unrolled, batches: list[Any]) -> Any:
        before = dict(self.untraced)
        several = not all(isinstance(key, int) for key in before)  # of batches of any size, and of one
        for key, function in before.items():
            name = "updates" if isinstance(key, int) and several else "compiled"
            self.untraced[key] = lambda given, own=function, name=name: (counted.update([name]), own(given))[
                1
            ]
        counted["all"] += bool(before)
        try:
            return run(self, batches)
        finally:
            self.untraced.update(before)

    monkeypatch.setattr(Unrolled, "run", counting)
    return counted


def test_each_task_of_a_layer_is_one_call(engine, runs):
    by_ops, _ = trained(engine, t.deep, t.data(engine.rank), False)
    model, callback = trained(engine, t.deep, t.data(engine.rank), True)
    assert close(by_ops, model)
    assert not close(by_ops, t.compiled(t.deep(), t.momentum()))
    assert runs["compiled"] == runs["all"] > 0
    report = callback.report
    calls = Counter(
        node.attr["_ooo_kind"].s.decode() for node in report.rewritten_graph.node if "f" in node.attr
    )
    assert calls == {"F": 5 * TOGETHER, "dO": 4 * TOGETHER, "dW": 5 * TOGETHER, "U": 5 * TOGETHER}
    assert report.compiled_tasks.startswith("114 ops in 38 calls of ")
    assert "variables and other state" in report.compiled_tasks
    t.assert_reordered(report, TOGETHER)


def test_batches_of_another_size_run_op_by_op(engine, runs):
    """The last batch of each epoch is shorter on rank 1 only: one rank runs calls, the other one ops."""
    data = t.data(engine.rank, t.STEPS * t.ROWS - 3 * engine.rank)
    by_ops, _ = trained(engine, t.deep, data, False)
    model, callback = trained(engine, t.deep, data, True)
    assert close(by_ops, model)
    assert runs["all"] - runs["compiled"] == runs["updates"] == 2 * engine.rank
    said = "of batches of another size than the first one's only updates"
    assert callback.report.compiled_tasks.endswith(said)


def test_a_later_fit_with_batches_of_another_size_is_compiled_too(engine, runs):
    model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=TOGETHER)
    options = tf_ooo.DataParallel(schedule="fast_forward", profile_steps=0, compile_tasks=True)
    callback = tf_ooo.OOOBackprop(options)
    for rows in (8, 8, 16, 8):
        t.fit(model, t.data(engine.rank, 8 * rows), [callback], batch_size=rows)
        assert runs["compiled"] == runs["all"] > 0
        runs.clear()
    assert t.equal_on_all_ranks(engine, model)


def two_inputs() -> keras.Model:
    """Grappler sees that both biases have the same gradient only where it knows that rows are as many."""
    given = [keras.Input((12,)) for _ in range(2)]
    branches = [keras.layers.Dense(8)(keras.layers.Dense(6, activation="tanh")(each)) for each in given]
    return keras.Model(given, keras.layers.Dense(4)(keras.layers.Average()(branches)))


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_weights_of_the_same_gradient_are_sent_apart(engine, runs, compression):
    x, y = t.data(engine.rank, t.STEPS * t.ROWS - 3 * engine.rank)
    model, callback = trained(engine, two_inputs, ([x, x], y), True, compression=compression)
    assert runs["compiled"] == runs["all"] - 2 * engine.rank > 0
    sent = [node.name for node in callback.report.rewritten_graph.node if node.op == "HorovodAllreduce"]
    assert len(sent) == TOGETHER * len(model.trainable_variables)


def texts(rank: int) -> Any:
    x, y = t.words(rank)
    return tf.constant(np.char.add("w", x.astype(str)).tolist()), y


def looking_up() -> keras.Model:
    layers, vocabulary = keras.layers, [f"w{number}" for number in range(20)]
    given = keras.Input((6,), dtype="string")
    x = layers.Flatten()(layers.Embedding(21, 8)(layers.StringLookup(vocabulary=vocabulary)(given)))
    return keras.Model(given, layers.Dense(4)(layers.Dropout(0.2, seed=3)(x)))


def test_lookups_and_random_numbers_stay_op_by_op(engine):
    by_ops, _ = trained(engine, looking_up, texts(engine.rank), False)
    model, callback = trained(engine, looking_up, texts(engine.rank), True)
    assert close(by_ops, model)
    said = callback.report.compiled_tasks
    assert "strings and handles" in said or "variables and other state" in said
    assert "random numbers" in said


def test_messages_and_their_order_are_the_same(engine, monkeypatch):
    together = []
    check = compiled.check_together

    def checked(*graphs: Any) -> None:
        together.append(graphs)
        check(*graphs)

    monkeypatch.setattr(compiled, "check_together", checked)
    trained(engine, t.deep, t.data(engine.rank, t.STEPS * t.ROWS - 3), True)
    ops, calls = together[0]
    sent = [sorted(n.name for n in graph.node if n.op == "HorovodAllreduce") for graph in (ops, calls)]
    assert sent[0] == sent[1] == engine.gather(sent)[1 - engine.rank][0]
    assert len(sent[0]) == 10 * TOGETHER
    indices = [GraphIndex(graph) for graph in (ops, calls)]
    before = [{(a, b) for a in sent[0] for b in sent[0] if index.implied(a, b)} for index in indices]
    assert before[0]
    assert before[0] <= before[1]
    turned = graph_protos.copy_of(calls)
    first, last = (next(n for n in turned.node if n.name == name) for name in next(iter(before[0])))
    first.input.append(f"^{last.name}")
    for node in turned.node:  # the other way round, and a message of another name
        node.input[:] = [text for text in node.input if node is first or text[0] != "^"]
    with pytest.raises(GraphError, match="would wait for those of ranks with batches of other sizes"):
        check(ops, turned)
    first.name += "_again"
    with pytest.raises(GraphError, match="other messages"):
        check(ops, turned)


def test_where_one_rank_cannot_compile_none_does(engine, monkeypatch, runs):
    def fails(make: Any) -> None:
        raise GraphError("XLA cannot compile a task: no such op")

    if engine.rank == 1:
        monkeypatch.setattr(compiled, "as_compiled", fails)
    model, callback = trained(engine, t.mlp, t.data(engine.rank), True)
    assert not runs["compiled"]
    report = callback.report
    assert not report.compiled_tasks
    assert not report.fell_back
    why = "XLA does not compile the tasks: rank 1: GraphError: XLA cannot compile a task: no such op"
    assert why in report.notes


def test_compiled_steps_are_compared(engine, runs, monkeypatch, quick_plans):
    """Compiling, and the first run of what was compiled, are in no time that is compared."""
    waits_s, make = 2.0, compiled._called

    def slowly(*arguments: Any) -> Any:
        time.sleep(waits_s)
        called = make(*arguments)
        first_waits_s = [waits_s]

        def run(given: Any) -> Any:
            time.sleep(first_waits_s.pop() if first_waits_s else 0.0)
            return called.function(given)

        return replace(called, function=run)

    monkeypatch.setattr(compiled, "_called", slowly)
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    options = {"schedule": "auto", "k": None, "profile_steps": 3, "compare": True}
    _, callback = trained(engine, t.mlp, t.data(engine.rank), True, {"epochs": 8}, **options)
    report = callback.report
    assert report.stock_step_s is not None
    assert report.measured_step_s is not None
    assert max(report.steps_s) < waits_s / TOGETHER
    assert runs["compiled"]


@pytest.mark.ranks(2, "collectives")
def test_tensorflows_collectives(engine):
    data = t.data(engine.rank, t.STEPS * t.ROWS - 3 * engine.rank)
    by_ops, _ = trained(engine, t.deep, data, False)
    model, callback = trained(engine, t.deep, data, True)
    assert close(by_ops, model)
    assert callback.report.compiled_tasks.startswith("134 ops in 38 calls of ")


def test_on_cpus_nothing_is_compiled_unless_asked_for(engine):
    _, callback = trained(engine, t.mlp, t.data(engine.rank), "auto")
    assert not callback.report.compiled_tasks


def test_refused():
    with pytest.raises(
        OptionsError, match="compile_tasks='yes' is not accepted; accepted: 'auto', True, False"
    ):
        tf_ooo.DataParallel(compile_tasks="yes")


def test_one_process_trains_in_stock_order():
    model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=TOGETHER)
    callback = tf_ooo.OOOBackprop(tf_ooo.DataParallel(engine="single", compile_tasks=True))
    t.fit(model, t.data(0), [callback])
    assert callback.report.fallback_reason == "one process: nothing to average"
    assert not callback.report.compiled_tasks


def test_a_step_that_no_optimizer_hands_over_does_not_run(engine, monkeypatch):
    """It would train on zeros."""
    by_ops, _ = trained(engine, t.deep, t.data(engine.rank, t.STEPS * t.ROWS - 3), False)
    request = compiled.request_to_take

    def not_asked(model: Any) -> Any:
        made = request(model)
        made.close()
        return made

    monkeypatch.setattr(compiled, "request_to_take", not_asked)
    model, callback = trained(engine, t.deep, t.data(engine.rank, t.STEPS * t.ROWS - 3), True)
    assert any("the step cannot be traced for one size of batches" in note for note in callback.report.notes)
    assert t.bits(by_ops) == t.bits(model)
