"""The plug-in inside this process: what it is asked, what TensorFlow gets, what stays off."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes import plugin
from grappler_passes.compat import releases
from grappler_passes.compat.graph_protos import copy_of
from grappler_passes.plugin import callback, loader, requests
from grappler_passes.plugin.requests import DONE_ATTR, VARIABLE_ATTR
from tf_ooo.rewriting.request import Failures

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def loaded():
    plugin.load()


@contextmanager
def rewriting(rewrite: Callable[[Any], Any], **options) -> Iterator[plugin.Request]:
    request = plugin.register(plugin.Request(f"test{next(_numbers)}", rewrite, **options))
    try:
        with plugin.tracing(request):
            yield request
    finally:
        plugin.unregister(request.id)


def train(steps: int = 3) -> tuple[list[bytes], list[float]]:
    """Trains two layers from fixed weights; the final weights and the losses."""
    rng = tf.random.Generator.from_seed(7)
    weights = [tf.Variable(rng.normal((4, 4)), name=f"layer{i}/kernel") for i in range(2)]
    x = rng.normal((8, 4))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(x @ weights[0])
            loss = tf.reduce_sum((hidden @ weights[1]) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    losses = [float(step(x)) for _ in range(steps)]
    return [w.numpy().tobytes() for w in weights], losses


def edit(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A rewrite that applies ``change`` to a copy."""

    def rewrite(graph_def):
        out = copy_of(graph_def)
        change(out)
        return out

    return rewrite


def first(graph_def, op: str):
    return next(node for node in graph_def.node if node.op == op)


def node_of(graph_def, op: str) -> int:
    return next(i for i, node in enumerate(graph_def.node) if node.op == op)


def raises(error: type[BaseException]) -> Callable[[Any], Any]:
    def rewrite(graph_def):
        raise error("on purpose")

    return rewrite


def make_cycle(g):
    first(g, "MatMul").input.append("^" + next(n.name for n in g.node if n.op == "_Retval"))


def make_unknown_op(g):
    g.node.add(name="strange", op="NoSuchOp", device=g.node[0].device)


def make_duplicate(g):
    g.node.add().CopyFrom(first(g, "MatMul"))


def drop_retval(g):
    del g.node[node_of(g, "_Retval")]


def drop_update(g):
    gone = first(g, "AssignSubVariableOp").name
    kept = [n for n in g.node if n.name != gone]
    for node in kept:
        inputs = [i for i in node.input if i != f"^{gone}"]
        node.input[:] = inputs
    nodes = [copy_of(n) for n in kept]
    del g.node[:]
    g.node.extend(nodes)


def make_wrong_dtype(g):
    first(g, "MatMul").attr["T"].type = 2


def put_on(device: str) -> Callable[[Any], None]:
    def change(g):
        first(g, "MatMul").device = device

    return change


BAD = {
    "raises": raises(ValueError),
    "SystemExit": raises(SystemExit),
    "KeyboardInterrupt": raises(KeyboardInterrupt),
    "not a graph": lambda graph_def: b"garbage",
    "empty graph": lambda graph_def: type(graph_def)(),
    "cycle": edit(make_cycle),
    "dangling input": edit(lambda g: first(g, "MatMul").input.append("^nowhere")),
    "missing output": edit(lambda g: first(g, "MatMul").input.__setitem__(0, first(g, "_Arg").name + ":3")),
    "unknown op": edit(make_unknown_op),
    "duplicate node": edit(make_duplicate),
    "wrong dtype": edit(make_wrong_dtype),
    "too many inputs": edit(lambda g: first(g, "MatMul").input.append(first(g, "MatMul").input[0])),
    "dropped _Retval": edit(drop_retval),
    "dropped update": edit(drop_update),
    "malformed device": edit(put_on("/device:nonsense:x:y")),
    "nonexistent device": edit(put_on("/job:localhost/replica:0/task:0/device:CPU:99")),
    "partial device": edit(put_on("/device:CPU:99")),
}


@pytest.mark.parametrize("name", BAD)
def test_training_goes_on_unchanged_when_a_rewrite_fails(name, caplog):
    stock = train()
    with rewriting(BAD[name]) as request:
        assert train() == stock
    assert request.calls > 0
    assert request.rewrites == 0
    assert request.errors
    expected = {"raises": ValueError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}
    assert isinstance(request.errors[0], expected.get(name, plugin.AnswerError)), request.errors
    logged = [r for r in caplog.records if r.name == "tf_ooo"]
    assert len(logged) == 1, "logged once, though TensorFlow calls twice"
    assert logged[0].exc_info is None, "one line: the traceback is for the level DEBUG"


def test_an_interrupt_during_a_rewrite_is_raised_later():
    with rewriting(raises(KeyboardInterrupt)) as request:
        train()
    with pytest.raises(KeyboardInterrupt):
        Failures(request.errors).raise_first(strict=False)
    Failures(request.errors).raise_first(strict=False)


def test_a_good_rewrite_runs_once_after_all_of_tensorflows_own_optimizers():
    stock = train()
    seen = []

    def rewrite(graph_def):
        seen.append(copy_of(graph_def))
        out = copy_of(graph_def)
        matmuls = [n for n in out.node if n.op == "MatMul"]
        matmuls[0].attr["_ooo_kind"].s = b"F"
        return out

    with rewriting(rewrite) as request:
        assert train() == stock
    assert (request.calls, request.rewrites, len(seen)) == (2, 1, 1)
    assert not request.errors
    assert not any(DONE_ATTR in node.attr for node in seen[0].node)
    assert any("_ooo_seen_CPU" in node.attr for node in seen[0].node)


def test_a_graph_that_was_rewritten_is_left_alone():
    with rewriting(lambda graph_def: copy_of(graph_def)) as request:
        train()
        answers = [
            callback.answer(request_graph(request.id, mark)) for mark in ("_ooo_done", "_ooo_seen_CPU")
        ]
    assert answers[0] is None
    assert answers[1] is not None
    assert request.skipped == ["rewritten already"]


def request_graph(request_id, mark):
    graph_def = graph_pb2.GraphDef()
    node = graph_def.node.add(name="x", op="_Arg")
    node.attr["T"].type, node.attr["index"].i = 1, 0
    node.attr["_ooo_request"].s, node.attr[mark].b = request_id.encode(), True
    return graph_def.SerializeToString()


def test_the_rewritten_graph_is_the_one_that_runs():
    def negate(graph_def):
        out = copy_of(graph_def)
        retval = first(out, "_Retval")
        out.node.add(name="negated", op="Neg", device=retval.device, input=[retval.input[0]])
        out.node[-1].attr["T"].type = retval.attr["T"].type
        retval.input[0] = "negated"
        return out

    with rewriting(negate) as request:
        _, losses = train(steps=1)
    assert not request.errors
    assert losses == [-loss for loss in train(steps=1)[1]]


def loops_and_branches() -> list[bytes]:
    """A training step with a loop, a branch and their gradients, all lowered to Switch and Merge."""
    weight = tf.Variable(tf.fill((2, 2), 0.5), name="w")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for _ in tf.range(3):
                x = tf.tanh(x @ weight)
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: x * weight, lambda: x)
            loss = tf.reduce_sum(x)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return [step(tf.ones((2, 2))).numpy().tobytes() for _ in range(2)] + [weight.numpy().tobytes()]


def test_loops_and_branches_pass_the_check():
    stock = loops_and_branches()
    ops = set()

    def touch_everything(graph_def):
        out = copy_of(graph_def)
        for node in out.node:
            ops.add(node.op)
            node.attr["_ooo_kind"].s = b"F"
        return out

    with rewriting(touch_everything) as request:
        assert loops_and_branches() == stock
    assert not request.errors
    assert request.rewrites == 1
    assert {"NextIteration", "Merge", "Switch", "Enter"} <= ops


def effects():
    """A step with loops and branches that changes variables, and these."""
    weight, count = tf.Variable(tf.fill((2, 2), 0.5)), tf.Variable(0.0)

    @tf.function
    def step(x, value):
        count.assign(value)
        for _ in tf.range(3):
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ weight), lambda: x)  # noqa: B023
            count.assign_add(1.0)
        weight.assign_sub(x)
        return x, tf.strings.as_string(x[0, 0]), value

    return step, weight, count


def test_a_graph_that_rests_returns_zeros_and_has_no_effect():
    step, weight, count = effects()
    with rewriting(plugin.resting) as request:
        for _ in range(2):
            x, text, value = step(tf.ones((2, 2)), tf.constant(7.0))
            assert (float(x), text.numpy(), float(value)) == (0.0, b"", 0.0)
    assert not request.errors
    assert request.rewrites == 1
    assert float(count) == 0.0
    assert weight.numpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_refused_graph_raises_before_anything_has_an_effect():
    step, weight, count = effects()
    with rewriting(raises(MemoryError), refuse_on=(MemoryError,)) as request:
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="on purpose"):
                step(tf.ones((2, 2)), tf.constant(7.0))
    assert isinstance(request.errors[0], MemoryError)
    assert float(count) == 0.0
    assert weight.numpy().tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_rewrite_that_changes_its_argument_does_no_harm():
    stock = train()

    def rewrite(graph_def):
        del graph_def.node[:]

    with rewriting(rewrite) as request:
        assert train() == stock
    assert request.skipped == ["nothing to rewrite"]


def test_python_is_not_called_while_no_request_is_registered():
    before = loader.python_calls()
    train()
    assert loader.python_calls() == before


def test_python_is_not_called_for_functions_traced_outside_the_request():
    request = plugin.register(plugin.Request("outside", raises(ValueError)))
    try:
        before = loader.python_calls()
        train()
        assert loader.python_calls() == before
    finally:
        plugin.unregister(request.id)
    assert request.calls == 0


def test_a_function_without_variables_is_left_alone():
    with rewriting(raises(ValueError)) as request:
        assert int(tf.function(lambda x: x + x * x)(tf.constant(3))) == 12
    assert request.calls == 0


def test_a_graph_of_an_unregistered_request_runs_in_stock_order():
    stock = train()
    request = plugin.Request("never registered", raises(ValueError))
    with rewriting(raises(ValueError)) as other, plugin.tracing(request):
        assert train() == stock
    assert request.calls == other.calls == 0


def test_two_requests_of_one_id_are_refused():
    with (
        rewriting(lambda g: None) as request,
        pytest.raises(ValueError, match="registered already"),
    ):
        plugin.register(plugin.Request(request.id, lambda g: None))


def test_many_threads_compile_functions_at_once():
    stock = train()
    requests_, results = [], []

    def work():
        with rewriting(edit(lambda g: None)) as request:
            results.append(train())
        requests_.append(request)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [stock] * 8
    assert [(r.calls, r.rewrites, r.errors) for r in requests_] == [(2, 1, [])] * 8


def variables_in(graph_def) -> dict[str, bool]:
    """Name to trainable, of all arguments of a graph."""
    infos = [json.loads(n.attr[VARIABLE_ATTR].s) for n in graph_def.node if VARIABLE_ATTR in n.attr]
    out = {info["name"]: info["trainable"] for info in infos}
    assert len(out) == len(infos), "names are unique"
    return out


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_keras_fit_names_its_variables(steps_per_execution):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=f"d{i}") for i in range(3))])
    model.layers[0].trainable = False
    model.compile("adam", "mse", jit_compile=False, steps_per_execution=steps_per_execution)
    graphs = []
    with rewriting(graphs.append, describe=plugin.describe_keras(model)) as request:
        model.fit(tf.ones((8, 4)), tf.ones((8, 4)), batch_size=2, verbose=0)
    assert not request.errors
    found = variables_in(max(graphs, key=lambda g: len(g.node)))
    trainable = {id(v) for v in model.trainable_variables}
    wanted = {getattr(v, "path", v.name.removesuffix(":0")): id(v) in trainable for v in model.variables}
    assert {name: found[name] for name in wanted} == wanted
    assert sorted(wanted.values()) == [False] * 2 + [True] * 4
    if hasattr(model.variables[0], "path"):  # Keras 2 leaves some of the optimizer's own marked trainable
        others = {name: trainable for name, trainable in found.items() if name not in wanted}
        assert not any(others.values()), "optimizer slots and metrics are not trainable"


def test_mixed_precision_is_not_disturbed_by_the_hook():
    """Inside Keras' autocast scope a variable's ``value`` is a Cast: looking must not add one."""
    keras = pytest.importorskip("keras", "3.0")

    class Branch(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(4,), name="kernel")

        def call(self, x):
            return tf.cond(tf.reduce_sum(x) > 0, lambda: x * self.kernel, lambda: x)

    def weights() -> list[bytes]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([Branch(dtype="mixed_float16")])  # not built before fit
        model.compile("sgd", "mse", jit_compile=False)
        describe.append(plugin.describe_keras(model))
        model.fit(tf.ones((4, 4)), tf.ones((4, 4)), batch_size=2, verbose=0)
        return [v.numpy().tobytes() for v in model.variables]

    describe: list = []
    stock = weights()
    graphs = []
    with rewriting(graphs.append, describe=lambda variables: describe[-1](variables)) as request:
        assert weights() == stock
    assert not request.errors
    assert any("kernel" in name for name in variables_in(max(graphs, key=lambda g: len(g.node))))


def test_variables_of_one_name_are_told_apart():
    weights = [tf.Variable(float(i), name="w") for i in range(3)] + [tf.Variable(1.0, name="w_1")]
    graphs = []
    with rewriting(graphs.append):
        tf.function(lambda: tf.add_n([w * w for w in weights]))()
    assert set(variables_in(graphs[0])) == {"w", "w_1", "w_2", "w_3"}


def test_a_handle_without_its_variable_is_described():
    """Legacy optimizers give fused ops the handles of their slots, and the function does not know whose."""
    weight, slot = tf.Variable(1.0, name="w"), tf.Variable(0.0, name="m")

    def describe(variables):
        return [{"name": "slot", "trainable": False} if v.handle is slot.handle else None for v in variables]

    def step():
        gradient = 2 * weight
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=weight.handle, accum=slot.handle, lr=0.1, grad=gradient, momentum=0.9
        )

    graphs = []
    with rewriting(graphs.append, describe=describe):
        tf.function(step)()
    assert variables_in(graphs[0]) == {"w": True, "slot": False}
    assert float(weight) == pytest.approx(0.8)


def test_an_inner_function_belongs_to_the_outer_request():
    weight = tf.Variable(2.0, name="inner")
    inner = tf.function(lambda: weight * weight)
    graphs = []
    with rewriting(graphs.append):
        assert float(tf.function(lambda: inner() + 1.0)()) == 5.0
    assert variables_in(graphs[0]) == {"inner": True}


def test_loading_again_does_nothing():
    before = loader.loaded()
    plugin.load()
    assert loader.loaded() == before
    assert "CPU" in before


def test_a_shim_that_is_not_compiled_is_named(monkeypatch):
    monkeypatch.setattr(loader.importlib.machinery, "EXTENSION_SUFFIXES", [])
    with pytest.raises(plugin.PluginError, match=r"_shim_cpu.*C compiler.*pip install \."):
        loader.shim_path("CPU")


@pytest.mark.parametrize("version", ["2.14.1", "2.22.0-rc1", "3.0.0"])
def test_an_untried_tensorflow_is_refused_in_one_line(monkeypatch, version):
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.raises(plugin.PluginError) as caught:
        plugin.load()
    wanted = f"TensorFlow {version} is not supported; pip install 'tensorflow>=2.15,<2.22'"
    assert str(caught.value) == wanted == releases.why_unsupported()


def test_an_unknown_request_is_no_error():
    plugin.unregister("never there")
    assert requests.find("never there") is None
