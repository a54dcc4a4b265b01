"""Tasks that XLA compiles: graphs with calls compute the same, and what was tampered with is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.shape_inference import infer_some_outputs
from grappler_passes.errors import PassError, VerifyError
from grappler_passes.passes.verify import verify
from tests.graph.graphs import as_optimizers_get_it, node
from tf_ooo.compat import tf_functions
from tf_ooo.compat.func_graphs import OptimizedGraph
from tf_ooo.rewriting import compile_tasks, task_calls
from tf_ooo.rewriting.compile_tasks import CompileTasksPass
from tf_ooo.rewriting.task_calls import TaskKey

task = tf.name_scope


class Traced:
    """A traced function of two micro-batches; ops in a scope such as ``dO_1`` are of that task."""

    def __init__(self, function, *inputs, change=lambda graph_def: None):
        self.function = function  # keeps its variables
        self.inputs = [tf.constant(value) for value in inputs]
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in self.inputs]
        self.concrete = tf_functions.concrete_function(function, specs)
        self.before = as_optimizers_get_it(self.concrete)
        change(self.before)
        names = [n.name for n in self.before.node if re.match(r"(F|dO|U)_\d+/", n.name)]
        scopes = {name: name.split("/")[0].split("_") for name in names}
        self.tasks = {name: TaskKey(kind, 0, int(number)) for name, (kind, number) in scopes.items()}
        self.general = {name: f"{kind}/{name.split('/', 1)[1]}" for name, (kind, _) in scopes.items()}

    def compiled(self):
        """The pass' result, which keeps what it declares."""
        result = CompileTasksPass(self.tasks, self.general)(self.before)
        verify(self.before, result.graph_def, replaced=result.replaced, relaxes=CompileTasksPass.relaxes)
        return result

    def parts(self):
        """Return what is checked: the chosen ops, the graph with calls, and the ops by call."""
        outputs = infer_some_outputs(self.before)
        chosen = task_calls.choose(self.before, self.tasks, self.general, outputs)
        return chosen, *compile_tasks.with_calls(self.before, chosen, self.general)

    def run(self, graph_def):
        """The results, and what becomes of the variables, which are then what they were."""
        variables = [(variable, variable.numpy()) for variable in self.concrete.graph.variables]
        function = OptimizedGraph(graph_def, self.concrete, self.concrete.captured_inputs)
        results = [result.numpy() for result in function(*self.inputs)]
        for variable, value in variables:
            results.append(variable.numpy())
            variable.assign(value)
        return results

    def assert_runs_alike(self, calls, functions):
        """The graph with so many calls computes what the one without does."""
        result = self.compiled()
        compiled = [note for note in result.notes if note.status == compile_tasks.COMPILED]
        assert (len(compiled), len({note.reason for note in compiled})) == (calls, functions)
        for was, now in zip(self.run(self.before), self.run(result.graph_def), strict=True):
            assert (was.dtype, was.shape) == (now.dtype, now.shape)
            np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-6)
        return result


def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def training_step(weight):
    """Two micro-batches of a layer, whose gradients are added up."""

    def step(x):
        value = tf.ensure_shape(weight.read_value(), weight.shape)
        gradients, losses = [], []
        for number in range(2):
            rows = x[2 * number : 2 * number + 2]
            with task(f"F_{number}"):
                hidden = tf.matmul(rows, value) - tf.constant([0.5, 0.25, -1.0], name="bias")
                out = tf.nn.relu(hidden)
                losses.append(tf.reduce_sum(out * out, name="loss"))
            with task(f"dO_{number}"):
                slope = tf.where(hidden > 0.0, 2.0 * out, tf.zeros_like(out))
                gradients.append(tf.matmul(rows, slope - tf.sigmoid(hidden), transpose_a=True))
        with task("U_0"):
            change = tf.add(*gradients) * 0.125
        weight.assign_sub(change)
        return tf.add(*losses), weight.read_value()

    return step


def traced_training(**settings):
    return Traced(training_step(tf.Variable(numbers(3, 3))), numbers(4, 3), **settings)


def test_a_training_step():
    """One function serves both micro-batches."""
    traced = traced_training()
    result = traced.assert_runs_alike(5, 3)
    calls = [n.name for n in result.graph_def.node if n.op == "PartitionedCall"]
    expected = {"F_stage_0_0", "F_stage_0_1", "dO_stage_0_0", "dO_stage_0_1", "U_stage_0_0"}
    assert {name.removeprefix("ooo_task/") for name in calls} == expected
    assert [note for note in result.notes if note.status == "left"] == []
    again = traced.compiled().graph_def
    assert again == result.graph_def, "XLA finds what it has compiled by the functions' names"


def test_views_belong_to_who_reads_them():
    """A reshaped result leaves its call as it was computed: XLA would copy it."""

    def step(x):
        results = []
        for number in range(2):
            rows = x[2 * number : 2 * number + 2]
            with task(f"F_{number}"):
                out = tf.nn.relu(rows * 2.0)
                flat = tf.expand_dims(tf.reshape(out, (3, 2)), 0)
            with task(f"dO_{number}"):
                results.append(tf.reduce_sum(flat * 3.0, 1) + tf.reduce_sum(out * 0.5))
        return results

    result = Traced(step, numbers(4, 3)).assert_runs_alike(4, 2)
    functions = result.graph_def.library.function
    forward = [f for f in functions if f.signature.name.startswith("ooo_task_F")]
    assert [len(f.signature.output_arg) for f in forward] == [1]


# Ops may be like these: each function has two micro-batches, and becomes so many calls and functions.


def of_both(run):
    """The results of a function of each micro-batch's number and rows."""

    return lambda x: tf.nest.flatten([run(number, x[2 * number : 2 * number + 2]) for number in range(2)])


def of_each(kind, compute):
    """The results of a function of each micro-batch's rows, whose ops are of one task."""

    def run(number, rows):
        with task(f"{kind}_{number}"):
            return compute(rows)

    return of_both(run)


def then(first, second):
    """A task F whose results a task dO reads."""

    def run(number, rows):
        with task(f"F_{number}"):
            results = first(rows)
        with task(f"dO_{number}"):
            return results, second(*results)

    return of_both(run)


def normalized(rows):
    image = tf.reshape(rows, [1, 2, 2, 2])
    ones = tf.ones([2])
    out, mean, variance, *saved = tf.raw_ops.FusedBatchNormV3(
        x=image, scale=ones, offset=ones, mean=[], variance=[], is_training=True
    )
    return image, out, mean, variance, saved[0], saved[1], saved[2]


def normalized_gradient(image, out, mean, variance, first, second, third):
    slope = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=out, x=image, scale=tf.ones([2]), reserve_space_1=first, reserve_space_2=second,
        reserve_space_3=third,
    )  # fmt: skip
    return slope.x_backprop, slope.scale_backprop + mean * variance


def looked_up(rows):
    table = tf.constant(numbers(160, 128))  # 80 KiB: too large to be copied
    return tf.gather(table, tf.cast(rows, tf.int32)) * 2.0


CASES = {
    "split": (of_each("F", lambda x: [part * 2.0 for part in tf.split(x, 2, axis=1)]), 2, 1),
    "parts read elsewhere": (
        then(lambda x: tf.split(x, 4, axis=1), lambda a, b, c, d: [d - b, tf.concat([c, a, a], 1)]), 4, 2,
    ),
    "unstack": (then(tf.unstack, lambda a, b: (a - b) * 2.0), 4, 2),
    "batch normalization": (then(normalized, normalized_gradient), 4, 2),
    "lists": (of_each("F", lambda x: tf.add_n([x, tf.concat([x[:1], x[1:] * 2.0], 0), x])), 2, 1),
    "integers": (of_each("F", lambda x: tf.cast(tf.argmax(x, 1), tf.int64) * tf.constant(3, tf.int64)), 2, 1),
    "booleans": (of_each("F", lambda x: tf.logical_and(x > 0.0, x < 1.0)), 2, 1),
    "scalars": (then(lambda x: [tf.reduce_sum(x), tf.reduce_max(x)], lambda a, b: a / b - b), 4, 2),
    "empty": (of_each("F", lambda x: tf.concat([x[:0], x[:0] * 2.0], 1)), 2, 1),
    "read twice": (of_each("F", lambda x: tf.matmul(x * x, x * x, transpose_b=True) - x[:, :2]), 2, 1),
    "input read twice": (then(lambda x: [tf.exp(x)], lambda a: (a - a * a) / a), 4, 2),
    "returned twice": (of_each("F", lambda x: [tf.exp(x) * 2.0] * 2), 2, 1),
    "a large constant": (of_each("F", looked_up), 2, 1),
    "shapes": (of_each("F", lambda x: tf.reshape(tf.tile(tf.transpose(x), [2, 3]), [-1, 6])), 2, 1),
    "one op": (of_each("F", tf.exp), 2, 1),
    "halves": (of_each("F", lambda x: tf.cast(tf.cast(x, tf.float16) * 2.0, tf.float64)), 2, 1),
    "top": (then(lambda x: list(tf.math.top_k(x, 3)), lambda a, i: a * tf.cast(i, tf.float32)), 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_ops_may_be_like(case):
    function, calls, functions = CASES[case]
    Traced(function, np.abs(numbers(4, 4)) + 0.1).assert_runs_alike(calls, functions)


def test_unequal_micro_batches_have_a_function_together():
    """They do where no constant of theirs tells their sizes."""

    def step(x):
        results = []
        for number, rows in enumerate((x[:3], x[3:])):
            with task(f"F_{number}"):
                results.append(tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True)) - 1.0)
        return results

    Traced(step, numbers(4, 4)).assert_runs_alike(2, 1)


def test_slices_of_the_batch_stay():
    """They are all that differs between micro-batches."""

    def step(x):
        results = []
        for number in range(2):
            with task(f"F_{number}"):
                results.append(tf.exp(x[2 * number : 2 * number + 2]) * 2.0)
        return results

    Traced(step, numbers(4, 3)).assert_runs_alike(2, 1)


def test_names_and_the_order_of_terms_may_differ_between_micro_batches():
    """TensorFlow numbers ops as it meets them, and its remapper sorts by names what commutes."""

    def step(x):
        results = []
        for number, names in enumerate((("a", "b", "c", "d"), ("d", "c", "b", "a"))):
            rows = x[2 * number : 2 * number + 2]
            with task(f"F_{number}"):
                first, then = tf.exp(rows, names[0]), tf.sin(rows, names[1])
                terms = (first, then) if number else (then, first)
                results.append(tf.subtract(tf.multiply(*terms, names[2]), first, names[3]))
        return results

    traced = Traced(step, numbers(4, 3))
    kinds = {n.name: n.op for n in traced.before.node}
    traced.general = {name: f"F/{kinds[name]}" for name in traced.tasks}
    traced.assert_runs_alike(2, 1)


def test_what_xla_cannot_have_stays():
    """And all that is around it, in one call where a task does not come back to it."""

    def compute(x):
        words = tf.strings.as_string(x * 2.0)
        noise = tf.random.uniform(tf.shape(x), seed=3) * 0.0
        picked = tf.boolean_mask(x, x > 0.3)
        return tf.strings.to_number(words) + 1.0, noise + x, tf.reduce_sum(picked * 2.0)

    result = Traced(of_each("F", compute), np.abs(numbers(4, 4))).compiled()
    left = {note.reason.split(": ")[0] for note in result.notes if note.status == "left"}
    assert {task_calls.NO_NUMBERS, task_calls.RANDOM, task_calls.OPEN_SHAPES} <= left


def test_loops_stay():
    def step(x):
        with task("F_0"):
            return tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: [y * 2.0 + 1.0], [x + x * x])

    traced = Traced(step, numbers(2, 2))
    result = traced.compiled()
    assert any(task_calls.STATE in note.reason or "While" in note.reason for note in result.notes)
    traced = traced_training(change=in_a_branch)
    result = traced.compiled()
    assert any(note.reason.startswith(task_calls.IN_LOOPS) for note in result.notes)


def in_a_branch(graph_def):
    """The first micro-batch's matrix product is dead in one of two cases."""
    nodes = {n.name: n for n in graph_def.node}
    product = nodes["F_0/MatMul"]
    truth = node(graph_def, "truth", "Const", dtype=tf.bool.as_datatype_enum)
    truth.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(True))
    node(graph_def, "switch", "Switch", product.input[0], "truth", T=tf.float32.as_datatype_enum)
    product.input[0] = "switch:1"


def test_what_waits_waits_for_the_call():
    """An op whose results nobody reads is there, too; what waited for it waits for its call."""

    def step(x):
        with task("F_0"):
            unread = tf.exp(x) * 2.0
            read = tf.sin(x) + 1.0
        with tf.control_dependencies([unread]), task("dO_0"):
            return read * 3.0 - x, tf.identity(x)

    traced = Traced(step, numbers(2, 2))
    result = traced.assert_runs_alike(2, 2)
    nodes = {n.name: n for n in result.graph_def.node}
    assert "^ooo_task/F_stage_0_0" in nodes["ooo_task/dO_stage_0_0"].input
    (dropped,) = {name for name in result.replaced if name.endswith("Exp")}
    assert dropped not in nodes


def test_a_join_within_a_task_is_in_its_call():
    """A pipeline has a dO end with what it sends; one between tasks stays."""

    def joined(graph_def):
        nodes = {n.name: n for n in graph_def.node}
        for number, (before, after) in enumerate((("F_0/Exp", "F_0/Sin"), ("F_1/Exp", "dO_1/add"))):
            node(graph_def, f"join_{number}", "NoOp", f"^{before}")
            nodes[after].input.append(f"^join_{number}")
        node(graph_def, "last", "NoOp", "^F_0/Exp")

    function = then(lambda x: [tf.exp(x) * 2.0, tf.sin(x)], lambda a, b: a + b * b)
    result = Traced(function, numbers(4, 3), change=joined).assert_runs_alike(4, 3)
    kept = {n.name for n in result.graph_def.node}
    assert kept & {"join_0", "join_1", "last"} == {"join_1", "last"}


def test_a_call_without_results():
    """Only others' waits keep it."""

    def step(x):
        with task("F_0"):
            unread = tf.exp(x) * 2.0
        with tf.control_dependencies([unread]):
            return tf.identity(x)

    Traced(step, numbers(2, 2)).assert_runs_alike(1, 1)


def test_a_constant_that_waits():
    """Grappler lets constants wait for what they were folded from; a call has its own copy, without that."""

    def waits(graph_def):
        nodes = {n.name: n for n in graph_def.node}
        nodes["F_0/bias"].input.append("^F_0/MatMul")
        nodes["F_1/bias"].input.append("^dO_0/sub")

    traced = traced_training(change=waits)
    traced.assert_runs_alike(5, 3)


def test_an_op_alone_reads_a_constant_that_waits():
    """The op comes before the rest of the task that the constant waits for, so it is a call with a copy."""

    def step(x):
        with task("dO_0"):
            first = tf.nn.relu(x) * 2.0
        with tf.control_dependencies([first]):
            constant = tf.constant(3.0, name="waits")
        with task("U_0"):
            alone = x * constant
        with task("dO_0"):
            return tf.sigmoid(first + alone)

    Traced(step, numbers(2, 3)).assert_runs_alike(2, 2)


def test_an_order_that_only_a_constant_gave_is_missed():
    """The call drops it, and the check says so."""
    weight = tf.Variable(numbers(2, 2))

    def step(x):
        weight.assign_add(x)
        with task("F_0"):
            out = tf.exp(x) * tf.constant(2.0, name="two")
        return weight.read_value() + out

    def changed(graph_def):
        nodes = {n.name: n for n in graph_def.node}
        (read,) = [n for n in graph_def.node if n.op == "ReadVariableOp"]
        (added,) = [n for n in graph_def.node if n.op == "AssignAddVariableOp"]
        nodes["F_0/two"].input.append(f"^{added.name}")
        read.input[:] = [text for text in read.input if text[0] != "^"] + ["^F_0/mul"]

    with pytest.raises(PassError, match="side effects.*no longer runs after"):
        Traced(step, numbers(2, 2), change=changed).compiled()


# Each of these tampers with a graph that has calls, and says what must be said of it.


def by_name(graph_def):
    return {n.name: n for n in graph_def.node}


def inner(graph_def, kind, op):
    """The first op of a type in the function of a task."""
    return next(n for n in function_of(graph_def, kind).node_def if n.op == op)


def function_of(graph_def, kind):
    (function,) = [f for f in graph_def.library.function if f.signature.name.startswith(f"ooo_task_{kind}_")]
    return function


def without(graph_def, *gone):
    kept = [n for n in graph_def.node if n.name not in gone and n.op not in gone]
    assert len(kept) < len(graph_def.node)
    out = graph_protos.with_nodes(graph_def, kept)
    graph_def.CopyFrom(out)


def another_attribute(graph_def):
    inner(graph_def, "dO", "MatMul").attr["transpose_a"].b = False
    return "'attributes'.*dO_\\d/MatMul"


def another_op(graph_def):
    inner(graph_def, "F", "Relu").op = "Relu6"
    return "'attributes'.*was a Relu, is another Relu6"


def swapped_inputs(graph_def):
    difference = inner(graph_def, "F", "Sub")
    difference.input[:] = reversed(difference.input)
    return "'data inputs'.*F_\\d/sub"


def swapped_arguments(graph_def):
    call = by_name(graph_def)["ooo_task/F_stage_0_0"]
    assert len(call.input) == 2
    call.input[:] = reversed(call.input)
    return "'data inputs'.*F_\\d/MatMul"


def swapped_results(graph_def):
    returned = function_of(graph_def, "F").ret
    returned["r0"], returned["r1"] = returned["r1"], returned["r0"]
    return "'data inputs'"


def a_result_is_an_argument(graph_def):
    returned = function_of(graph_def, "F").ret
    returned["r0"] = "a0"
    return "'data inputs'"


def another_constant(graph_def):
    values = [n.attr["value"].tensor for n in function_of(graph_def, "F").node_def if n.op == "Const"]
    (bias,) = [value for value in values if tf.make_ndarray(value).size == 3]
    bias.CopyFrom(tf.make_tensor_proto([0.5, 0.25, -2.0]))
    return "'attributes'.*F_\\d/bias"


def another_function(graph_def):
    call = by_name(graph_def)["ooo_task/F_stage_0_1"]
    call.attr["f"].func.name = function_of(graph_def, "dO").signature.name
    return "'calls'.*F_stage_0_1.*other ops"


def no_function(graph_def):
    by_name(graph_def)["ooo_task/F_stage_0_1"].attr["f"].func.name = "gone"
    return "'calls'.*F_stage_0_1.*its function"


def another_op_in_a_function(graph_def):
    function_of(graph_def, "F").node_def.add(name="more", op="NoOp")
    return "'calls'.*F_stage_0.*other ops"


def an_op_less_in_a_function(graph_def):
    del function_of(graph_def, "F").node_def[-1]
    return "'calls'.*F_stage_0.*other ops"


def no_call(graph_def):
    without(graph_def, "ooo_task/U_stage_0_0")
    return "'structure'"


def another_device(graph_def):
    by_name(graph_def)["ooo_task/dO_stage_0_1"].device = "/device:CPU:1"
    return "'devices'.*dO_\\d"


def an_update_on_another_device(graph_def):
    by_name(graph_def)["AssignSubVariableOp"].device = "/device:CPU:1"
    return "'devices'.*AssignSub"


def no_update(graph_def):
    for reader in graph_def.node:
        reader.input[:] = [text for text in reader.input if text != "^AssignSubVariableOp"]
    without(graph_def, "AssignSubVariableOp")
    return "'kept'.*AssignSub"


def no_result(graph_def):
    without(graph_def, "returned_0")
    return "'kept'.*returned_0"


def an_update_that_does_not_wait(graph_def):
    update = by_name(graph_def)["AssignSubVariableOp"]
    controls = [text for text in update.input if text[0] == "^"]
    assert controls
    update.input[:] = [text for text in update.input if text[0] != "^"]
    return "'waits'.*AssignSub"


def one_more_wait(graph_def):
    by_name(graph_def)["ooo_task/dO_stage_0_1"].input.append("^ooo_task/dO_stage_0_0")
    return "'waits'.*dO_stage_0_1"


def a_cycle(graph_def):
    by_name(graph_def)["ooo_task/F_stage_0_0"].input.append("^ooo_task/dO_stage_0_0")
    return "'structure'.*cycle"


def the_other_micro_batch(graph_def):
    call = by_name(graph_def)["ooo_task/dO_stage_0_1"]
    call.input[:] = [text.replace("F_stage_0_1", "F_stage_0_0") for text in call.input]
    return "'data inputs'.*dO_\\d"


def an_op_more(graph_def):
    node(graph_def, "more", "NoOp")
    return "'new nodes'.*more"


def an_op_twice(graph_def):
    node(graph_def, "F_0/Relu", "Relu", "ooo_task/F_stage_0_0", T=tf.float32.as_datatype_enum)
    return "'kept'.*F_0/Relu"


def a_slice_of_others(graph_def):
    begin, end = (
        next(n for n in graph_def.node if n.name == name)
        for name in ("strided_slice/stack", "strided_slice_1/stack")
    )
    begin.attr["value"].CopyFrom(end.attr["value"])
    return "'attributes'.*strided_slice/stack"


TAMPERED = [
    another_attribute, another_op, swapped_inputs, swapped_arguments, swapped_results,
    a_result_is_an_argument,
    another_constant, another_function, no_function, another_op_in_a_function, an_op_less_in_a_function,
    no_call, another_device, an_update_on_another_device, no_update, no_result, an_update_that_does_not_wait,
    one_more_wait, a_cycle, the_other_micro_batch, an_op_more, an_op_twice, a_slice_of_others,
]  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    return traced_training().parts()


def test_what_nobody_touched_passes(parts):
    compile_tasks.check(*parts)


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_what_was_tampered_with_is_refused(parts, tamper):
    chosen, after, called = parts
    changed = graph_pb2.GraphDef()
    changed.CopyFrom(after)
    said = tamper(changed)
    with pytest.raises(VerifyError, match=said):
        compile_tasks.check(chosen, changed, called)


def test_what_may_not_be_in_a_call_is_refused():
    """Even where the graph with calls was made of the same choice."""
    traced = traced_training()
    chosen, _, _ = traced.parts()
    (call,) = [call for call in chosen.calls if call.key.kind == "U"]
    i = chosen.index.index["AssignSubVariableOp"]
    object.__setattr__(call, "ops", (*call.ops, i))
    after, called = compile_tasks.with_calls(traced.before, chosen, traced.general)
    with pytest.raises(VerifyError, match="'calls'.*AssignSub.*may not be in a call"):
        compile_tasks.check(chosen, after, called)
