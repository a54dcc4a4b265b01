"""A set-up as a program of plain lines, which is what runs, and what a person gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fuzz.catalogue import BATCH_SIZE, LAYERS, LOSSES, RANKS, WORDS
from tests.fuzz.comparisons import LOGS, comparison, launching, ranks_of
from tests.fuzz.setups import Branch, Output, Part, Setup, Shared, Skip, Step, rank_after

IMPORTS = """\
import keras
import numpy as np
from keras import layers

import tf_ooo
"""

DEVICES = """\
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
"""

COMPARE = """\
{build}model.optimizer.build(model.trainable_variables)
beginning = [(v, np.array(v)) for v in (*model.variables, *model.optimizer.variables)]


def fit(*callbacks):
    for variable, value in beginning:
        variable.assign(value)
    history = model.fit({data}, callbacks=list(callbacks)).history
{logs}    variables = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    return [*history.items(), *((v.path, np.array(v)) for v in variables)]


def different(a, b):
    assert [name for name, _ in a] == [name for name, _ in b]
    pairs = zip(a, b, strict=True)
    return [name for (name, x), (_, y) in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()]

"""


def program(setup: Setup) -> str:
    """A script that ends with an AssertionError where stock and rewritten steps differ."""
    most = max((pipeline.devices for pipeline in setup.pipelines), default=0)
    before = f"\n{DEVICES.format(devices=most)}" if most else ""
    start, command = launching(setup)
    return f'"""Set-up {setup.number} of tests/fuzz{command}."""\n\n{start}{IMPORTS}{before}\n{body(setup)}'


def body(setup: Setup) -> str:
    """The script without its imports: those of TensorFlow's devices would come too late in a process."""
    return "\n".join(
        [
            *ranks_of(setup),
            f"keras.utils.set_random_seed({setup.number % 2**31})",
            *([f'keras.config.set_dtype_policy("{setup.policy}")'] if setup.policy != "float32" else []),
            "",
            *_model(setup),
            "",
            *_compile(setup),
            "",
            *_data(setup),
            "",
            COMPARE.format(data=_fit_arguments(setup), build=_build(setup), logs=LOGS if setup.ranks else ""),
            *comparison(setup),
            "",
        ]
    )


def text(value: Any) -> str:
    """Write a value as in a program."""
    if isinstance(value, Part):
        return f"{value.kind}({', '.join(f'{name}={text(inner)}' for name, inner in value.arguments)})"
    if isinstance(value, tuple) and any(isinstance(inner, Part) for inner in value):
        return f"[{', '.join(map(text, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _model(setup: Setup) -> Iterator[str]:
    for number, branch in enumerate(setup.branches):
        yield from _branch(number, branch, len(setup.branches) > 1)
    if len(setup.branches) > 1:
        names = [f"branch_{number}" for number in range(len(setup.branches))]
        if setup.join != "Concatenate":
            names = [f"layers.Dense(units=6)({name})" for name in (names if len(names) < 3 else names[:2])]
        yield f"h = layers.{setup.join}()([{', '.join(names)}])"
    for step in setup.trunk:
        yield from _step(step)
    for number, output in enumerate(setup.outputs):
        yield f'output_{number} = layers.Dense(units={output.units}, dtype="{_output_type(setup)}")(h)'
    inputs = several([f"input_{number}" for number in range(len(setup.branches))])
    outputs = several([f"output_{number}" for number in range(len(setup.outputs))])
    yield f"model = keras.Model({inputs}, {outputs})"


def _output_type(setup: Setup) -> str:
    return "float64" if setup.policy == "float64" else "float32"


def _branch(number: int, branch: Branch, joined: bool) -> Iterator[str]:
    words = ', dtype="int32"' if branch.kind == "tokens" else ""
    yield f"input_{number} = h = keras.Input({branch.shape}{words})"
    if branch.embedding is not None:
        yield f"h = {text(branch.embedding)}(h)"
    rank = RANKS[branch.kind]
    for step in branch.steps:
        yield from _step(step)
        rank = rank_after(step, rank) or rank
    if rank > 1:
        dimensions = "" if branch.reduced_by == "Flatten" else f"{rank - 1}D"
        yield f"h = layers.{branch.reduced_by}{dimensions}()(h)"
    if joined:
        yield f"branch_{number} = h"


def _step(step: Step) -> Iterator[str]:
    if isinstance(step, Shared):
        yield f"shared = {text(step.layer)}"
        yield "h = layers.Concatenate()([shared(h), shared(-0.5 * h)])"
    elif isinstance(step, Skip):
        yield "skip = h"
        for part in step.steps:
            yield _applied(part)
        branch = "h" if step.join == "Concatenate" else "layers.Dense(units=skip.shape[-1])(h)"
        yield f"h = layers.{step.join}()([skip, {branch}])"
    else:
        yield _applied(step)


def _applied(part: Part) -> str:
    return f"h = {text(part)}({LAYERS[part.kind.removeprefix('layers.')].takes})"


def _compile(setup: Setup) -> Iterator[str]:
    yield "model.compile("
    yield f"    {text(setup.optimizer)},"
    yield f"    loss={several([text(output.loss) for output in setup.outputs])},"
    if any(output.loss_weight is not None for output in setup.outputs):
        weights = [str(1.0 if o.loss_weight is None else o.loss_weight) for o in setup.outputs]
        yield f"    loss_weights={several(weights)},"
    if any(output.metrics for output in setup.outputs):
        yield f"    metrics={several([text(list(output.metrics)) for output in setup.outputs])},"
    if setup.steps_per_execution > 1:
        yield f"    steps_per_execution={setup.steps_per_execution},"
    yield "    jit_compile=False,"
    yield ")"


def _data(setup: Setup) -> Iterator[str]:
    seed = f"[{setup.number}, ranks.rank]" if setup.ranks else setup.number
    yield f"random = np.random.default_rng({seed})"
    inputs = [_input(branch, setup.rows) for branch in setup.branches]
    yield f"x = {several(inputs)}"
    yield f"y = {several([_target(output, setup.rows) for output in setup.outputs])}"
    if setup.sample_weights:
        yield f"weights = {several([_uniform(setup.rows)] * len(setup.outputs))}"


def _uniform(rows: int) -> str:
    return f'random.uniform(0.1, 2.0, {rows}).astype("float32")'


def _input(branch: Branch, rows: int) -> str:
    shape = (rows, *branch.shape)
    if branch.kind == "tokens":
        return f"random.integers(0, {WORDS}, {shape})"
    return f'random.normal(size={shape}).astype("float32")'


def _target(output: Output, rows: int) -> str:
    wanted = LOSSES[output.loss.kind.rpartition(".")[2]]
    shape = (rows, output.units)
    if wanted == "classes":
        return f"random.integers(0, {output.units}, {rows})"
    if wanted == "one_hot":
        return f'np.eye({output.units}, dtype="float32")[random.integers(0, {output.units}, {rows})]'
    if wanted == "binary":
        return f'random.integers(0, 2, {shape}).astype("float32")'
    return f'random.normal(size={shape}).astype("float32")'


def _build(setup: Setup) -> str:
    """Makes the variables of metrics, one for each of several losses, too: a step in whose trace they are
    made is traced twice."""
    if len(setup.outputs) == 1 and not setup.outputs[0].metrics:
        return ""
    return "model._symbolic_build(data_batch=(x, y))\n"


def _fit_arguments(setup: Setup) -> str:
    weights = ", sample_weight=weights" if setup.sample_weights else ""
    return f"x, y{weights}, batch_size={BATCH_SIZE}, epochs={setup.epochs}, shuffle=False, verbose=0"
