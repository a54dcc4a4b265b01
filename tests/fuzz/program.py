"""A set-up as a program of plain lines, which is what runs, and what a person gets to see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from tests.fuzz.setups import Pipeline, Ranks, Setup
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
            *(['keras.config.set_floatx("float64")'] if setup.wide else []),
            "",
            *_model(setup),
            "",
            *_compile(setup),
            "",
            *_fits(setup),
            _comparison(setup),
            "",
        ]
    )


def _comparison(setup: Setup) -> str:
    if setup.pipelines:
        first, second = (
            {**_options(pipeline), "microbatches": setup.microbatches} for pipeline in setup.pipelines
        )
        compared = "compiled_pipelines" if setup.mode == "compiled_pipeline" else "pipelines"
        return f"fits.{compared}(\n    {first},\n    {second},\n)"
    options: dict[str, Any] = {"profile_steps": setup.profile_steps}
    if setup.ranks:
        options |= {**_options(setup.ranks), "engine": setup.ranks.engine}
        del options["launch"]
    else:
        options["schedule"] = setup.schedule
    kind = setup.mode.replace("compiled_data_parallel", "compiled_ranks")
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"fits.{kind}(moves={setup.moves}, {given})"


def _options(value: Pipeline | Ranks) -> dict[str, Any]:
    options = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: option for name, option in options.items() if option is not None}


def several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _model(setup: Setup) -> Iterator[str]:
    for line in setup.model:  # TensorFlow's bilinear op gives float32
        yield line.replace("bilinear", "nearest") if setup.wide else line
    output_type = "float64" if setup.policy == "float64" else "float32"
    for number, _ in enumerate(setup.outputs):
        yield f'output_{number} = layers.Dense(units=3, dtype="{output_type}")(h)'
    inputs = several([f"input_{number}" for number, _ in enumerate(setup.inputs)])
    outputs = several([f"output_{number}" for number, _ in enumerate(setup.outputs)])
    yield f"model = keras.Model({inputs}, {outputs})"


def _compile(setup: Setup) -> Iterator[str]:
    yield "model.compile("
    yield f"    {setup.optimizer},"
    yield f"    loss={several([output.loss for output in setup.outputs])},"
    if any(output.loss_weight is not None for output in setup.outputs):
        weights = [str(1.0 if o.loss_weight is None else o.loss_weight) for o in setup.outputs]
        yield f"    loss_weights={several(weights)},"
    if any(output.metrics for output in setup.outputs):
        yield f"    metrics={several([repr(list(output.metrics)) for output in setup.outputs])},"
    if setup.steps_per_execution > 1:
        yield f"    steps_per_execution={setup.steps_per_execution},"
    yield "    jit_compile=False,"
    yield ")"


def _fits(setup: Setup) -> Iterator[str]:
    seed = f"[{setup.number}, ranks.rank]" if setup.ranks else setup.number
    yield f"random, rows = np.random.default_rng({seed}), {setup.rows}"
    yield f"x = {several(setup.inputs)}"
    yield f"y = {several([output.targets for output in setup.outputs])}"
    arguments = ", ranks=ranks" if setup.ranks else ""
    if setup.sample_weights:
        weights = ['random.uniform(0.1, 2.0, rows).astype("float32")'] * len(setup.outputs)
        yield f"weights = {several(weights)}"
        arguments += ", sample_weight=weights"
    if len(setup.outputs) > 1 or setup.outputs[0].metrics:
        # Makes the variables of metrics, one for each of several losses, too: a step in whose trace they are
        # made is traced twice.
        yield "model._symbolic_build(data_batch=(x, y))"
    yield f"fits = Fits(model, x, y{arguments}, epochs={setup.epochs})"
