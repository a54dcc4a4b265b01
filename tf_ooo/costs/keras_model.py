"""Finds the costs of a Keras model's layers: traces one training step and measures or calculates its ops."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grappler_passes.analysis.classify import classify_graph_def, flatten
from grappler_passes.compat import runtime
from grappler_passes.graph.sizes import KnownShapes, with_sizes
from grappler_passes.graph.training_graph import TrainingGraph, backward_tasks, forward_layers, unknown_sizes
from grappler_passes.passes.separate import SeparatePass
from tf_ooo.compat import keras_compiled, keras_layers, keras_variables, versions
from tf_ooo.costs import devices
from tf_ooo.costs.analytic import analytic_ops
from tf_ooo.costs.from_graph import graph_costs, places, with_occupancy
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.model_inputs import Specs, given_specs, nested, reason_of, with_rows
from tf_ooo.costs.profile import OpProfile, op_seconds, profile_ops
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OptionsError

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework import graph_pb2

_OPTIMIZER, _LOSS = "adam", "mse"
# A micro-batch has this many rows if none are given: Keras' default batch.
DEFAULT_ROWS = 32
_MEASURED_ON = "cpu-core"
# Keras' errors about an unregistered class begin with these.
_UNKNOWN = ("Could not locate class", "Unknown layer")


def load_model(text: str, is_name: bool, modules: Sequence[str] = ()) -> keras.Model:
    """Return the saved model at a path, or what ``MODULE:NAME`` stands for.

    ``modules`` are imported first: they register their classes with Keras.  OptionsError: the model cannot be
    loaded or made.
    """
    versions.check_versions()
    versions.check_keras_backend()
    for module in modules:
        _import_module(module)
    return _named_model(text) if is_name else _saved_model(text)


def _named_model(name: str) -> keras.Model:
    """Return the model that ``name`` is, or that it makes without arguments (a class or function)."""
    module, _, attribute = name.partition(":")
    model = getattr(_import_module(module), attribute, None)
    if model is None:
        raise OptionsError(f"module {module!r} has no {attribute!r}")
    if callable(model) and not hasattr(model, "train_on_batch") or isinstance(model, type):
        try:
            model = model()
        except Exception as error:  # whatever it raises
            raise OptionsError(f"{name} cannot be made without arguments: {reason_of(error)}") from error
    if not hasattr(model, "train_on_batch"):
        raise OptionsError(f"{name} is no Keras model but a {type(model).__name__}")
    return model


def _import_module(name: str) -> Any:
    """Return a module, also from the current folder.  OptionsError says why it cannot be imported."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's file raises
        raise OptionsError(f"module {name!r} cannot be imported: {reason_of(error)}") from error


def _saved_model(path: str) -> keras.Model:
    keras = versions.user_keras()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns about optimizer state, which is not needed
            return keras.saving.load_model(path)
    except Exception as error:  # whatever Keras, h5py or zipfile raise
        reason = _cause(error)
        hint = "" if versions.is_keras_2(keras) else "; if tf_keras has saved it, set TF_USE_LEGACY_KERAS=1"
        if reason.startswith(_UNKNOWN):
            hint = f"; --import MODULE imports the module that has it{hint}"
        raise OptionsError(f"{path}: Keras cannot load it: {reason}{hint}") from error


def _cause(error: Exception) -> str:
    """Return the first line of the innermost of Keras' errors, without all layers' settings."""
    text = str(error).rpartition("Exception encountered: ")[2].partition(" Full object config")[0]
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def costs_of_model(
    model: keras.Model,
    batch: int | None = None,
    device: str | None = None,
    measure: bool = False,
    *,
    precision: str | None = None,
    input_shape: object = None,
) -> CostTable:
    """Return costs of one micro-batch of ``batch`` rows of a built model; Adam and mse if not compiled.

    Args:
        model: changed only if it is not compiled, or measured.
        batch: rows of the micro-batch; None: 32.  The table's assumptions name what was not given.
        device: a name of :mod:`tf_ooo.costs.devices`; None: a V100, or with ``measure`` one CPU core.
        measure: run four steps on zeros, which changes weights; ``device`` is for ops that no profile shows.
        precision: fp32, tf32, bf16 or fp16, whose published peak counts; None: the one in which TensorFlow
            multiplies the model's types on that device.
        input_shape: for a model that is not built, or whose sizes are open: without the batch, ``(128, 64)``,
            ``"128,64"`` or ``"ids=128:int32"``; of several inputs a list or a map.

    Raises:
        OptionsError: the model is not built or cannot be traced.
        GraphError: the model trains nothing.
        CostError: the device is unknown or lacks the precision, or an op has no known costs.
    """
    inputs, targets = given_specs(model, batch or DEFAULT_ROWS, input_shape)
    named = device or (_MEASURED_ON if measure else devices.DEFAULT_DEVICE)
    devices.device(named)
    if device is None and precision in devices.PRECISIONS and named not in devices.devices_with(precision):
        raise CostError(
            f"precision={precision!r}: no device is given, and {named}, which is assumed then, has no "
            f"{precision}; device= (--device) may be {', '.join(devices.devices_with(precision))}"
        )
    types = _computed_in(model)
    usual = None if measure else devices.usual_precision(named, types)
    roofline = devices.device(named, precision or usual)
    assumed = _assumed(roofline, types, measure, (batch, device, precision))
    batch = batch or DEFAULT_ROWS
    step = _Step(model, (with_rows(inputs, batch), with_rows(targets, batch)))
    graph_def, graph = step.classified(batch)
    profile = step.profiled() if measure else None
    tasks, forward = backward_tasks(graph).ops, forward_layers(graph)
    seconds = op_seconds(graph_def, roofline, profile, places(graph, tasks, forward))
    costs = graph_costs(graph, seconds.seconds, tasks, forward)
    layers = with_occupancy(costs.layers, graph, analytic_ops(graph_def, roofline).work, roofline)
    notes = (*step.notes, *costs.notes, *seconds.notes, *_left_out(costs.left_out_s))
    where = roofline.name
    if profile is not None:
        times = f"step {profile.step_s * 1e3:.3g} ms, profiling {profile.overhead_s:.2g} s"
        where = f"this machine ({times})"
    assumed = (f"micro-batches of {batch} rows", *assumed)
    return CostTable(layers, Link(), seconds.source, where, assumed, notes, dict(seconds.seconds), batch)


def _assumed(
    roofline: devices.DeviceModel, types: str, measure: bool, given: tuple[int | None, str | None, str | None]
) -> tuple[str, ...]:
    """Say for which device, types and inputs the seconds hold, and which of these were not given."""
    row, precision = devices.split_device(roofline.name)
    names = ("batch", "device", "precision")
    silent = ", ".join(name for name, value in zip(names, given, strict=True) if value is None)
    peak = f"{roofline.flop_per_s / 1e12:.4g} TFLOP/s, {roofline.bytes_per_s / 1e9:.4g} GB/s"
    device = f"device {row} at {precision or 'fp32'}: {peak}, published peaks, which nothing reaches"
    where = f"measured here; what no profile shows: {device}" if measure else device
    lines = (where, f"tensors are {types}, as in the model")
    return (*lines, f"not given, so assumed: {silent}") if silent else lines


def _computed_in(model: keras.Model) -> str:
    """Return the type in which layers with weights compute; if they differ, the shortest."""
    kinds = {getattr(layer, "compute_dtype", None) for layer in model.layers if layer.weights}
    return next((kind for kind in ("bfloat16", "float16") if kind in kinds), "float32")


def _left_out(seconds: Mapping[str, float]) -> list[str]:
    """Return a note of the seconds that belong to no layer, by kind."""
    parts = [f"{left_s * 1e3:.3g} ms of {_OF_NO_LAYER[kind]}" for kind, left_s in seconds.items()]
    return [f"not in the plan, as no layer owns it: {'; '.join(parts)}"] if parts else []


# Ops of these kinds may belong to no layer.
_OF_NO_LAYER = {
    "F": "the forward pass",
    "dO": "the backward pass",
    "dW": "the backward pass",
    "U": "updates that serve all layers, such as step counters",
    "comm": "communication",
    "other": "work beside training, such as metrics",
}


class _Step:
    """Holds one training step of a model, traced for inputs and targets of fixed sizes."""

    def __init__(self, model: keras.Model, specs: tuple[Specs, Specs]) -> None:
        import tensorflow as tf

        self._model = model
        self.notes: list[str] = []
        if not getattr(model, "compiled", False) or model.optimizer is None:
            model.compile(_OPTIMIZER, _LOSS, jit_compile=False)
            self.notes.append(f"the model is not compiled: {_OPTIMIZER} and {_LOSS} assumed")
        model.jit_compile = False
        self._data = tuple(nested(lambda spec: tf.zeros(*spec), part) for part in specs)
        if keras_layers.is_wholly_built(model):
            keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
        self._function = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=False)
        try:
            self._concrete = self._function.get_concrete_function(*self._data)
        except Exception as error:  # whatever the user's layers raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise OptionsError(
                f"model {model.name!r}: its training step cannot be traced: {reason[-1]}"
            ) from error

    def classified(self, batch: int) -> tuple[graph_pb2.GraphDef, TrainingGraph]:
        """Return the flat graph with dO and dW separated, and its classification."""
        graph_def, fetches = runtime.graph_def_of(self._concrete, self._names())
        graph_def = flatten(graph_def, fetches)
        graph = classify_graph_def(graph_def, fetches)
        separated = SeparatePass()(graph_def, graph)
        if separated.modified:
            graph_def = separated.graph_def
            graph = classify_graph_def(graph_def, fetches)
        if unknown_sizes(graph):
            graph = with_sizes(graph, graph_def, KnownShapes(batch))
        return graph_def, graph

    def _names(self) -> dict[int, str]:
        """Return Keras' paths by the id of a variable's handle: names in subclassed models repeat."""
        model = self._model
        by_name = keras_variables.named([*model.variables, *keras_compiled.state_of(model.optimizer)])
        values = ((name, keras_variables.value_of(variable)) for name, variable in by_name.items())
        return {id(value.handle): name for name, value in values if value is not None}

    def profiled(self) -> OpProfile:
        return profile_ops(lambda: self._concrete(*self._data))
