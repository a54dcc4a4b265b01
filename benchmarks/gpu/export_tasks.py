"""Write the HLO of a pipeline's compiled tasks, and of the same layers in one module, for run_hlo to count.

Kernels of a stage are those of its calls; beside them stand those of one micro-batch's calls of that stage as
one module, as XLA on one device would have them, and those of Keras's own step in one module.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

import tf_ooo
from benchmarks import models
from grappler_passes.compat.graph_protos import data_inputs, split_input
from tf_ooo.compat import xla, xla_calls

NETWORKS = models.NETWORKS["TASKS"]
# These start no kernel of a step: XLA's calls on a GPU find them as they are.
_NO_KERNEL = frozenset({
    "AssignVariableOp", "Const", "Identity", "NoOp", "PlaceholderWithDefault", "ReadVariableOp",
    "StatelessRandomGetKeyCounter", "_Arg", "_Retval",
})  # fmt: skip
ONE_DEVICE, UPDATE = "one-device", "one-device-update"


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("network", type=click.Choice(list(NETWORKS)))
@click.option("--devices", type=click.IntRange(2), default=2, show_default=True)
@click.option("--microbatches", type=click.IntRange(2), default=4, show_default=True)
@click.option("--schedule", default="1f1b", show_default=True)
def main(folder: Path, network: str, devices: int, microbatches: int, schedule: str) -> None:
    """Write FOLDER/STEM_MODULE.hlo.gz for each module, and what is called in FOLDER/STEM.json.

    FOLDER/STEM.modules has the names of the modules, as arguments of run_hlo.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models.make_devices(devices)
    model, x, y = models.make(NETWORKS[network], microbatches)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    mode = tf_ooo.Pipeline(
        devices=devices, microbatches=microbatches, schedule=schedule, first_steps="whole", compile_tasks=True
    )
    ours = tf_ooo.OOOBackprop(mode)
    data = [np.concatenate([array] * 8) for array in (x, y)]
    model.fit(*data, batch_size=len(x), verbose=0, callbacks=[ours])
    click.echo(f"{network}: {ours.report.compiled_tasks}")
    graph_def, stem = ours.report.rewritten_graph, f"{network}_{schedule}"
    modules = dict(_tasks(graph_def)) | _one_device(model, loss, x, y, len(x) // microbatches)
    for name, hlo in modules.items():
        (folder / f"{stem}_{name}.hlo.gz").write_bytes(gzip.compress(hlo.encode()))
    (folder / f"{stem}.json").write_text(
        json.dumps({
            "network": network, "schedule": schedule, "microbatches": microbatches,
            "calls": [[*call, count] for call, count in Counter(map(_place, _calls(graph_def))).items()],
            "op_by_op": Counter(node.op for node in graph_def.node if _launches(node)),
        })
    )  # fmt: skip
    (folder / f"{stem}.modules").write_text(" ".join(modules))
    click.echo(f"{folder}/{stem}: {len(modules)} modules")


def _calls(graph_def: graph_pb2.GraphDef) -> list[Any]:
    return [node for node in graph_def.node if xla_calls.is_call(node)]


def _launches(node: Any) -> bool:
    return node.op not in _NO_KERNEL and not xla_calls.is_call(node)


def _place(call: Any) -> tuple[int, str]:
    return call.attr["_ooo_stage"].i, call.attr["f"].func.name


def _tasks(graph_def: graph_pb2.GraphDef) -> Iterator[tuple[str, str]]:
    """Yield the HLO of each function that is called, and of each stage's calls for one micro-batch."""
    calls, functions = _calls(graph_def), graph_def.library.function
    first = {call.attr["f"].func.name: call for call in calls}
    yield from ((name, _hlo_of_calls([call], functions, ())) for name, call in first.items())
    for stage in sorted({_place(call)[0] for call in calls}):
        own = [call for call in calls if _place(call)[0] == stage and _is_of_second(call)]
        names = {call.name for call in own}
        read = {text for node in graph_def.node if node.name not in names for text in data_inputs(node)}
        returned = sorted(text for text in read if split_input(text)[0] in names)
        yield f"stage-{stage}", _hlo_of_calls(own, functions, returned)


def _is_of_second(call: Any) -> bool:
    """Return whether a call is of the second micro-batch, whose gradients are added to those of the first."""
    task = call.name.split("/")[1]
    return task.endswith("_1") and not task.startswith("U_")


def _hlo_of_calls(calls: Sequence[Any], functions: Iterable[Any], returned: Sequence[str]) -> str:
    """Return the HLO of calls in one module that returns these tensors, or all of a single call."""
    names = {call.name for call in calls}
    given = {
        text: tf.TensorSpec(shape, dtype)
        for call in calls
        for text, shape, dtype in zip(
            data_inputs(call), xla_calls.shapes_of(call), call.attr["Tin"].list.type, strict=True
        )
        if split_input(text)[0] not in names
    }
    arguments = {text: f"given_{place}" for place, text in enumerate(given)}
    graph_def = graph_pb2.GraphDef()
    graph_def.library.function.extend(functions)
    for call in calls:
        node = graph_def.node.add()
        node.CopyFrom(call)
        node.device = ""
        node.input[:] = [arguments.get(text, text) for text in data_inputs(call)]
    results = returned or [
        f"{call.name}:{port}" for call in calls for port, _ in enumerate(call.attr["Tout"].list.type)
    ]

    def body(*tensors: Any) -> Any:
        fed = {f"{name}:0": tensor for name, tensor in zip(arguments.values(), tensors, strict=True)}
        fetched = [text if ":" in text else f"{text}:0" for text in results]
        return tf.graph_util.import_graph_def(graph_def, fed, fetched, name="")

    specs = list(given.values())
    return xla.hlo_of(tf.function(body, input_signature=specs, jit_compile=True), specs)


def _one_device(model: keras.Model, loss: Any, x: np.ndarray, y: np.ndarray, rows: int) -> dict[str, str]:
    """Return the HLO of one micro-batch of Keras's step, which adds its gradients up, and of the update."""
    weights = model.trainable_variables
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(weights)
    zeros = [tf.zeros(weight.shape) for weight in weights]

    def gradients(inputs: Any, labels: Any, *sums: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True))
        new = tape.gradient(value, [weight.value for weight in weights])
        return [value, *(total + tf.convert_to_tensor(added) for total, added in zip(sums, new, strict=True))]

    def update(*sums: Any) -> None:
        optimizer.apply(sums, weights)

    def hlo(function: Any, *arguments: Any) -> str:
        return xla.hlo_of(tf.function(function, jit_compile=True), list(arguments))

    return {
        ONE_DEVICE: hlo(gradients, tf.constant(x[:rows]), tf.constant(y[:rows]), *zeros),
        UPDATE: hlo(update, *zeros),
    }


if __name__ == "__main__":
    main()
