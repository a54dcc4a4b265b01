"""A set-up as a program of plain lines, which is what runs, and what a person gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tests.fuzz.catalogue import LAYERS, LOSSES, RANKS, WORDS
from tests.fuzz.setups import Branch, Output, Part, Pipeline, Ranks, Setup, Shared, Skip, Step, rank_after
from tests.fuzz.several import LAUNCHES

IMPORTS = """\
import keras
import numpy as np
from keras import layers

from tests.fuzz.compared import Fits
"""
DEVICES = """
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
"""
CLUSTER = """\
import json
import os

workers = ["127.0.0.1:23451", "127.0.0.1:23452"]
task = {"type": "worker", "index": int(os.environ["HOROVOD_RANK"])}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

"""
# Stock Horovod is what both engines are compared with.
CONNECT = """\
import horovod.tensorflow as hvd
from tf_ooo import data_parallel

ranks = data_parallel.connect("{engine}")
hvd.init()
"""


def program(setup: Setup) -> str:
    """A script that ends with an AssertionError where stock and rewritten steps differ."""
    how, before = "", ""
    if setup.ranks:
        variables = "".join(f"{name}={value} " for name, value in LAUNCHES[setup.ranks.launch].items())
        how = f": {variables}horovodrun -np 2 python FILE"
        before = CLUSTER if setup.ranks.engine == "collectives" else ""
    most = max((pipeline.devices for pipeline in setup.pipelines), default=0)
    after = DEVICES.format(devices=most) if most else ""
    return f'"""Set-up {setup.number} of tests/fuzz{how}."""\n\n{before}{IMPORTS}{after}\n{body(setup)}'


def body(setup: Setup) -> str:
    """The script without its imports: those of TensorFlow's devices would come too late in a process."""
    return "\n".join(
        [
            *([CONNECT.format(engine=setup.ranks.engine)] if setup.ranks else []),
            f"keras.utils.set_random_seed({setup.number % 2**31})",
            *([f'keras.config.set_dtype_policy("{setup.policy}")'] if setup.policy != "float32" else []),
            "",
            *_model(setup),
            "",
            *_compile(setup),
            "",
            *_data(setup),
            *_build(setup),
            f"fits = Fits(model, x, y{_fit_arguments(setup)})",
            _comparison(setup),
            "",
        ]
    )


def _comparison(setup: Setup) -> str:
    if setup.pipelines:
        first, second = (
            {**_options(pipeline), "microbatches": setup.microbatches} for pipeline in setup.pipelines
        )
        return f"fits.pipelines(\n    {first},\n    {second},\n)"
    options: dict[str, Any] = {"profile_steps": setup.profile_steps}
    if setup.ranks:
        options |= {**_options(setup.ranks), "engine": setup.ranks.engine}
        del options["launch"]
    else:
        options["schedule"] = setup.schedule
    kind = "data_parallel" if setup.ranks else "single"
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"fits.{kind}(moves={setup.has_chain()}, {given})"


def _options(value: Pipeline | Ranks) -> dict[str, Any]:
    options = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: option for name, option in options.items() if option is not None}


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


def _build(setup: Setup) -> Iterator[str]:
    """Makes the variables of metrics, one for each of several losses, too: a step in whose trace they are
    made is traced twice."""
    if len(setup.outputs) > 1 or setup.outputs[0].metrics:
        yield "model._symbolic_build(data_batch=(x, y))"


def _fit_arguments(setup: Setup) -> str:
    ranks = ", ranks=ranks" if setup.ranks else ""
    weights = ", sample_weight=weights" if setup.sample_weights else ""
    return f"{ranks}{weights}, epochs={setup.epochs}"
