"""A task computes again what it would else read of another one; what was tampered with is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat.shape_inference import infer_some_outputs
from grappler_passes.errors import VerifyError
from tests.graph.graphs import flat, run
from tests.graph.test_compile_tasks import Traced, numbers, of_both, task
from tf_ooo.rewriting import task_copies
from tf_ooo.rewriting.compile_tasks import CompileTasksPass
from tf_ooo.rewriting.task_calls import TaskKey

WIDE = numbers(3, 8)


def then(forward, backward):
    """A task F, whose results only a task dO reads."""

    def tasks(number, rows):
        with task(f"F_{number}"):
            results = forward(rows)
        with task(f"dO_{number}"):
            return backward(*results)

    return of_both(tasks)


def returned(forward, backward, dtype=tf.float32):
    """The types of the ops whose results the calls of F return."""
    step = then(lambda rows: forward(tf.cast(rows, dtype)), backward)
    traced = Traced(step, numbers(4, 3))
    # TensorFlow adds halves up in other ways than XLA.
    result = traced.compiled() if dtype == tf.bfloat16 else traced.assert_runs_alike(4, 2)
    functions = [f for f in result.graph_def.library.function if f.signature.name.startswith("ooo_task_F")]
    ops = {node.name: node.op for node in functions[0].node_def}
    return sorted(ops[functions[0].ret[out.name].split(":")[0]] for out in functions[0].signature.output_arg)


def activation(rows):
    x = tf.matmul(rows, WIDE)
    scaled = x * 0.7
    bell = tf.math.erf(scaled)
    return tf.matmul(x * (bell + 1.0), WIDE, transpose_b=True), scaled, bell, x * 0.5


def test_an_activation_is_computed_again():
    """Instead of three results of one size its call returns the product that they are of."""

    def backward(out, scaled, bell, half):
        return tf.reduce_sum(tf.exp(-scaled) + bell * half, 1) + tf.reduce_sum(out)

    assert returned(activation, backward) == ["MatMul", "MatMul"]


def test_what_a_product_reads_is_stored_and_is_returned():
    def forward(rows):
        out = tf.nn.relu(tf.matmul(rows, WIDE) - 0.25)
        bent = tf.tanh(out)
        return bent, tf.matmul(bent, WIDE, transpose_b=True)

    assert returned(forward, lambda bent, out: tf.reduce_sum(bent, 1) + out[:, 0]) == ["MatMul", "Tanh"]


def test_what_products_of_two_tasks_read_is_returned():
    """Each of them would need a kernel that stores it."""

    def tasks(number, rows):
        with task(f"F_{number}"):
            bent = tf.tanh(tf.matmul(rows, WIDE))
        with task(f"dO_{number}"):
            first = tf.matmul(bent, WIDE, transpose_b=True)
        with task(f"U_{number}"):
            return first, tf.matmul(bent, bent, transpose_b=True)

    result = Traced(of_both(tasks), numbers(4, 3)).compiled()
    returned_ops = {f.signature.name.split("_")[2]: f for f in result.graph_def.library.function}
    assert "Tanh" not in {node.op for node in returned_ops["dO"].node_def}


def test_nothing_is_computed_again_of_more_than_it_is():
    """One row's sum of two products is smaller than they are."""

    def forward(rows):
        row = tf.reshape(tf.matmul(rows, WIDE), (16,))
        many = tf.matmul(tf.reshape(row, (16, 1)), tf.ones((1, 16)))
        return tf.exp(row), tf.tanh(many) + row, tf.reduce_sum(many)

    kinds = returned(forward, lambda small, large, total: tf.reduce_sum(large) * small + total)
    assert kinds.count("Sum") == 1
    assert "Exp" not in kinds, "what its product is given for is as small"


@pytest.mark.parametrize(("length", "kind"), [(16, "MatMul"), (17, "Tanh"), (20, "Tanh")])
def test_no_long_chain_is_computed_again(length, kind):
    def forward(rows):
        x = tf.matmul(rows, WIDE)
        for _ in range(length - 1):
            x = tf.sigmoid(x)
        return (tf.tanh(x),)

    assert returned(forward, lambda x: tf.reduce_sum(x * x, 1)) == [kind]


@pytest.mark.parametrize(("dtype", "kind"), [(tf.float32, "Sum"), (tf.float64, "Sum"), (tf.bfloat16, "Mean")])
def test_a_mean_is_divided_where_it_is_read(dtype, kind):
    """The sum of half types would be rounded in between."""

    def forward(rows):
        return (tf.reduce_mean(rows, -1, keepdims=True),)

    assert returned(forward, lambda mean: tf.cast(mean, tf.float32) * 2.0, dtype) == [kind]


def test_numbers_that_are_compared_are_the_same_ones():
    """The largest and what it is looked for in are of one computation."""

    def tasks(number, rows):
        with task(f"F_{number}"):
            x = tf.sigmoid(tf.matmul(rows, WIDE))
        with task(f"dO_{number}"):
            largest = tf.reduce_max(x, 1, keepdims=True) * 1.0
        with task(f"U_{number}"):
            return tf.reduce_sum(tf.cast(x == largest, tf.float32), 1)

    result = Traced(of_both(tasks), numbers(4, 3)).assert_runs_alike(6, 3)
    (body,) = [f for f in result.graph_def.library.function if f.signature.name.startswith("ooo_task_U")]
    assert "Sigmoid" not in {node.op for node in body.node_def}


def in_a_loop(given):
    def body(number, sums):
        bent = tf.tanh(sums * 0.5)
        return number + 1, bent - tf.reduce_mean(bent + given, -1, keepdims=True)

    return tf.while_loop(lambda number, _: number < 3, body, (0, given))[1]


def in_a_branch(given):
    def mean():
        return given - tf.reduce_mean(given * 0.5, -1, keepdims=True)

    return tf.cond(tf.reduce_sum(given) > 0.0, mean, lambda: tf.tanh(given))


@pytest.mark.parametrize("compute", [in_a_loop, in_a_branch])
def test_loops_and_branches_stay_as_they_are(compute):
    """Means and activations in them, of what a task outside has computed."""

    @tf.function
    def function(x):
        with task("F_0"):
            given = tf.exp(tf.matmul(x, WIDE) * 0.1)
        with task("dO_0"):
            return compute(given) * 2.0 + given

    graph_def, inputs, outputs = flat(function, tf.TensorSpec((4, 3)))
    scopes = [(node.name, node.name.split("_")[0]) for node in graph_def.node if node.op != "Placeholder"]
    tasks = {name: TaskKey(kind, 0, 0) for name, kind in scopes if kind in ("F", "dO")}
    compiled = CompileTasksPass(tasks, {})(graph_def).graph_def
    assert not [node.name for node in compiled.node if node.name.endswith("tf_ooo_count")]
    was, now = (run(graph, inputs, outputs, [numbers(4, 3)])[0] for graph in (graph_def, compiled))
    np.testing.assert_allclose(now, was, rtol=1e-5)


def test_calls_are_marked_as_what_they_are():
    """A copy is of the task that reads it, and so is the call that it comes first in."""

    def change(graph_def):
        for node in graph_def.node:
            scope = node.name.split("/")[0]
            if scope in ("F_0", "dO_0"):
                node.attr["_ooo_kind"].s = scope.split("_")[0].encode()
                node.attr["_ooo_stage"].i = int(scope == "dO_0")

    def function(x):
        with task("F_0"):
            given = tf.matmul(x, WIDE)
            far = tf.exp(given)
        with task("dO_0"):
            return far * far - 1.0

    result = Traced(function, numbers(4, 3), change=change).compiled()
    calls = {n.name: n for n in result.graph_def.node if n.op == "PartitionedCall"}
    assert {n.attr["_ooo_kind"].s.decode(): n.attr["_ooo_stage"].i for n in calls.values()} == {
        "F": 0,
        "dO": 1,
    }
    (noted,) = [note.nodes[1:] for note in result.notes if note.nodes[0].startswith("ooo_task/dO")]
    assert {name.split("/")[0] for name in noted} == {"dO_0"}


def test_a_task_on_two_devices_has_two_copies():
    def change(graph_def):
        for node in graph_def.node:
            node.device = "/device:CPU:1" if node.name == "dO_0/far" else "/device:CPU:0"

    def function(x):
        with task("F_0"):
            view = tf.reshape(tf.exp(x), (3, 4))
        with task("dO_0"):
            return tf.multiply(view, 2.0, "near"), tf.multiply(view, 3.0, "far")

    traced = Traced(function, numbers(4, 3), change=change)
    own = task_copies.own_copies(
        traced.before, traced.tasks, traced.general, infer_some_outputs(traced.before)
    )
    nodes = {node.name: node for node in own.graph_def.node}
    for reader, device in (("dO_0/near", 0), ("dO_0/far", 1)):
        assert nodes[nodes[reader].input[0]].device == f"/device:CPU:{device}"
        assert nodes[reader].input[0] in own.copies


def test_a_mean_of_an_unknown_number_stays():
    graph_def, sums = divided(lambda x: means(x[: tf.cast(x[0, 0], tf.int32)]))
    assert sums == {}
    assert [node.op for node in graph_def.node].count("Mean") == 2


def means(x):
    with task("F_0"):
        return tf.reduce_mean(x, 0), tf.reduce_mean(tf.exp(x))


def divided(function):
    traced = Traced(function, numbers(4, 3))
    return task_copies.divided_means(traced.before, traced.tasks, infer_some_outputs(traced.before))


def test_means_have_sums():
    graph_def, sums = divided(means)
    nodes = {node.name: node for node in graph_def.node}
    counts = [nodes[f"{name}/tf_ooo_count"].attr["value"].tensor.float_val[0] for name in sums.values()]
    assert counts == [4.0, 12.0]
    assert [nodes[name].op for name in sums] == ["Sum", "Sum"]


def another_sum(nodes):
    nodes["F_0/Mean/tf_ooo_sum"].attr["keep_dims"].b ^= True
    return "attributes"


def another_number(nodes):
    nodes["F_0/Mean/tf_ooo_count"].attr["value"].tensor.float_val[0] = 5.0
    return "attributes"


def no_quotient(nodes):
    nodes["F_0/Mean"].op = "Mul"
    return "attributes"


def the_wrong_way_round(nodes):
    nodes["F_0/Mean"].input[:] = reversed(nodes["F_0/Mean"].input)
    return "attributes"


@pytest.mark.parametrize("tamper", [another_sum, another_number, no_quotient, the_wrong_way_round])
def test_a_mean_that_was_tampered_with_is_refused(tamper):
    traced = Traced(means, numbers(4, 3))
    after, sums = task_copies.divided_means(traced.before, traced.tasks, infer_some_outputs(traced.before))
    said = tamper({node.name: node for node in after.node})
    with pytest.raises(VerifyError, match=said):
        task_copies._check_sums(traced.before, after, {"F_0/Mean": 4, "F_0/Mean_1": 12})


def reads_another(copy, nodes, was):
    copy.input[0] = "F_0/Tanh"
    return "data inputs"


def has_another_type(copy, nodes, was):
    copy.attr["T"].type = tf.float64.as_datatype_enum
    return "attributes"


def is_a_product(copy, nodes, was):
    copy.op = nodes["F_0/Exp"].op = was["F_0/Exp"].op = "MatMul"
    return "a MatMul is computed again"


def does_not_wait(copy, nodes, was):
    del nodes["dO_0/Add"].input[-1]
    return "waits"


def waits_for_less(copy, nodes, was):
    del copy.input[-1]
    return "waits"


@pytest.mark.parametrize(
    "tamper", [reads_another, has_another_type, is_a_product, does_not_wait, waits_for_less]
)
def test_a_copy_that_was_tampered_with_is_refused(tamper):
    def function(x):
        with task("F_0"):
            given = tf.matmul(x, WIDE)
            other = tf.tanh(given)
            with tf.control_dependencies([other]):
                far = tf.exp(given)
        with task("dO_0"), tf.control_dependencies([other]):
            return tf.raw_ops.Add(x=far, y=far, name="Add")

    traced = Traced(function, numbers(4, 3))
    own = task_copies.own_copies(
        traced.before, traced.tasks, traced.general, infer_some_outputs(traced.before)
    )
    nodes, was = ({node.name: node for node in graph.node} for graph in (own.graph_def, traced.before))
    (copy,) = [nodes[name] for name, of in own.copies.items() if of == "F_0/Exp"]
    task_copies._check(traced.before, own)
    said = tamper(copy, nodes, was)
    with pytest.raises(VerifyError, match=said):
        task_copies._check(traced.before, own)
