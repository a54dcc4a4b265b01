"""Traces a training step as one flat graph, whose batches may have any number of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.dependencies import GraphIndex, has_side_effects, only_reads, states_of
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.graph.variables import VARIABLE_ATTR
from grappler_passes.passes.base import Pass, PassPipeline, relaxed_by
from grappler_passes.passes.gates import GatesPass
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.compat import func_graphs, keras_layers, keras_variables, nests, tf_functions, train_function
from tf_ooo.compat.keras_fits import trained_variables
from tf_ooo.compat.nests import Packed
from tf_ooo.errors import GraphError, OOOError
from tf_ooo.rewriting.passes import Folder
from tf_ooo.rewriting.step_graph import Known, StepGraph
from tf_ooo.rewriting.tasks import assign
from tf_ooo.tracing.assigned import refuse_reads_after
from tf_ooo.tracing.flat import FlatTrace
from tf_ooo.tracing.intercepting import Update, intercepted, ops_so_far, refuse_twice
from tf_ooo.tracing.step import refuse_no_gradient
from tf_ooo.tracing.variables import all_variables, optimizers_of

if TYPE_CHECKING:
    import keras


# (kind, layer) by op, and what ops give.
Where = Mapping[str, tuple[str, int]]
Outputs = Mapping[str, Sequence[OutputInfo]]

_NUMBER = re.compile(r"_\d+$")
_ENTERS = ("Enter", "RefEnter")
_LOOPS = (*_ENTERS, "Switch", "RefSwitch", "Merge")
_APPLY_ONCE = (
    "mode='layerpipe' applies them once a step: give each part of the model its own optimizer, or take "
    "another mode"
)


@dataclass(frozen=True)
class Traced:
    """Holds a step that has been traced and classified.

    Attributes:
        graph_def: the flat graph.
        arguments, specs: the batch's tensors, in order: names and TensorSpecs.
        captured: ``{placeholder: tensor outside}``.
        fetches: the tensors of the result, ``node:port``, which ``results`` packs as the step returned them.
        dump_dir: folder for the graph after every pass; ``ran`` passes have written into it.
    """

    graph_def: graph_pb2.GraphDef
    index: GraphIndex
    graph: TrainingGraph
    where: Where
    outputs: Outputs
    arguments: tuple[str, ...]
    specs: tuple[tf.TensorSpec, ...]
    captured: Mapping[str, tf.Tensor]
    fetches: tuple[str, ...]
    results: Packed
    dump_dir: Folder = None
    ran: int = 1

    def rewritten(self, change: Pass, where: Where, outputs: Outputs) -> Traced:
        """Return the step after a verified pass; ``where`` and ``outputs`` are of the nodes that it changes.

        Raises PassError: the pass changes more than it declares.
        """
        graph_def = _checked(change, self.graph_def, self.dump_dir, self.ran)
        return replace(
            self,
            graph_def=graph_def,
            index=GraphIndex(graph_def),
            where={**self.where, **where},
            outputs={n.name: outputs.get(n.name) or self.outputs[n.name] for n in graph_def.node},
            ran=self.ran + 1,
        )

    def as_step(self) -> StepGraph:
        """Return the step in the pipeline's form, as one micro-batch."""
        known = Known(self.graph, self.graph_def, frozenset(self.where), self.where, {})
        none, own_names = [0] * len(self.index), {name: name for name in self.index.names}
        return StepGraph(self.graph_def, self.index, none, none, 1, known, own_names)


def trace(
    model: keras.Model,
    batch: object,
    layers: Sequence[Collection[str]] | None = None,
    data_spec: object = None,
    dump_dir: Folder = None,
) -> Traced:
    """Trace a model's step; the model and its optimizers are built.

    Args:
        layers: the variables of each layer, in the order of the layers' numbers.
        data_spec: the ``element_spec`` of the data, for a step that needs to know how many rows a batch has.

    Raises:
        GraphError: it is no training step, one with loops or branches, or one with other layers.
        BackendError: it cannot be known before the call, or updates are none, twice, or followed by reads.
    """
    inputs = Packed(batch)
    traced = _open_trace(_flat_step(model, inputs), inputs, data_spec)
    graph_def = traced.graph_def()
    name_variables(graph_def, traced.captured, keras_variables.named(all_variables(model)))
    names = [text.partition(":")[0] for text in traced.fetches]
    kept = [*names, *(op.name for op in traced.concrete.graph.control_outputs)]
    flat_def = _flat(model, graph_def, kept, dump_dir)
    index = GraphIndex(flat_def)
    # The gradient of a condition on values computed from weights would differ.  Conditions on labels and on
    # counts of steps, as in losses and schedules of learning rates, are ops like others.
    weights = placeholders_of(traced.captured, trained_variables(model))
    for i in _computed_from(index, weights):
        if index.ops[i] == graph_protos.WHOLE_BRANCH:
            raise GraphError(_loop_message(model, index.names[i], False))
    graph = _numbered(classify_graph_def(flat_def, names), layers)
    where = assign(graph, index).where
    _refuse_updates_together(graph, index, where)
    return Traced(
        graph_def=flat_def,
        index=index,
        graph=graph,
        where=where,
        outputs=shape_inference.infer_some_outputs(flat_def),
        arguments=traced.arguments,
        specs=traced.specs,
        captured=traced.captured,
        fetches=traced.fetches[: len(traced.results.tensors)],
        results=traced.results,
        dump_dir=dump_dir,
    )


def _flat_step(model: keras.Model, inputs: Packed) -> Callable[..., Any]:
    """Return the step on the tensors of a batch, in which each optimizer may apply gradients once."""
    # Not within another function: what is read behind an update is looked for in this one.
    step = train_function.step_on_data(model, tf_functions.undecorated(model.train_step))

    def flat(*tensors: tf.Tensor) -> Any:
        applied: list[Any] = []
        updates: list[tuple[list[Any], int]] = []

        def apply_once(update: Update) -> Any:
            refuse_twice(update.optimizer, applied, _APPLY_ONCE)
            applied.append(update.optimizer)
            try:
                return update.proceed(update.grads)
            finally:
                updates.append((update.variables, ops_so_far()))

        with intercepted(optimizers_of(model), apply_once):
            results = nests.as_tensors(step(inputs.unpack(tensors)))  # which may read variables
        refuse_no_gradient(model, updates)
        refuse_reads_after(updates)
        return results

    return flat


def _open_trace(flat: Callable[..., Any], inputs: Packed, data_spec: object) -> FlatTrace:
    """Return the trace for any number of rows, or for the data's, if the step needs a fixed number.

    A fixed number is avoided: graph optimizers then change last bits, and a fit may go on with other data.
    """
    specs = tuple(map(nests.open_rows, inputs.specs))
    try:
        return FlatTrace(flat, specs)
    except OOOError:
        raise
    except Exception:  # of any kind: the model's own
        known = tuple(map(nests.open_rows, inputs.specs, inputs.specs_in(data_spec)))
        if known == specs:
            raise
        return FlatTrace(flat, known)


def name_variables(
    graph_def: graph_pb2.GraphDef, captured: Mapping[str, tf.Tensor], variables: Mapping[str, keras.Variable]
) -> None:
    """Name in a graph, changed in place, the Keras variables behind its placeholders, uniquely."""
    values = {name: keras_variables.value_of(variable) for name, variable in variables.items()}
    by_handle = {id(value.handle): name for name, value in values.items() if value is not None}
    for node in graph_def.node:
        name = by_handle.get(id(captured.get(node.name)))
        if name is not None:
            # Legacy optimizers give fused ops the handles of their slots alone: of those nothing is known.
            known = node.attr[VARIABLE_ATTR].s if VARIABLE_ATTR in node.attr else b'{"trainable": false}'
            node.attr[VARIABLE_ATTR].s = json.dumps({**json.loads(known), "name": name}).encode()


def _flat(
    model: keras.Model, graph_def: graph_pb2.GraphDef, kept: Sequence[str], dump_dir: Folder
) -> graph_pb2.GraphDef:
    """Return the graph without function calls; ``kept`` ops stay. GraphError: loops or branches."""
    whole = graph_protos.with_whole_branches(graph_def)
    flat_def = graph_protos.inline_graph_def(whole, list(dict.fromkeys(kept)))
    flat_def = _checked(GatesPass(), flat_def, dump_dir, 0)
    if (loop := next((node.name for node in flat_def.node if node.op in _LOOPS), None)) is not None:
        raise GraphError(_loop_message(model, loop, any(node.op in _ENTERS for node in flat_def.node)))
    func_graphs.leave_sums(flat_def)
    return flat_def


def _checked(change: Pass, graph_def: graph_pb2.GraphDef, dump_dir: Folder, ran: int) -> graph_pb2.GraphDef:
    """Return the graph after a verified pass; ``ran`` passes have run before."""
    result = PassPipeline([change], dump_dir, ran)(graph_def)
    VerifyPass(graph_def, result.replaced, relaxed_by(change))(result.graph_def)
    return result.graph_def


def renumbered(traced: Traced, layers: Sequence[Collection[str]]) -> Traced:
    """Return the step with its layers in another order; GraphError: it has other layers."""
    graph = _numbered(traced.graph, layers)
    return replace(traced, graph=graph, where=assign(graph, traced.index).where)


def placeholders_of(
    captured: Mapping[str, tf.Tensor], variables: Iterable[keras.Variable | tf.Variable]
) -> set[str]:
    """Return the placeholders of those variables that a step uses."""
    values = map(keras_variables.value_of, variables)
    handles = {id(value.handle) for value in values if value is not None}
    return {name for name, outside in captured.items() if id(outside) in handles}


def _computed_from(index: GraphIndex, names: Collection[str]) -> Iterator[int]:
    """Yield these ops and all that depend on them, in topological order."""
    computed: set[int] = set()
    for i in index.order:
        if index.names[i] in names or any(p in computed for p, _ in index.data_preds[i]):
            computed.add(i)
            yield i


def _refuse_updates_together(graph: TrainingGraph, index: GraphIndex, where: Where) -> None:
    """Raise GraphError if the last layer's update depends on the first layer's gradient."""
    last = len(graph.layers) - 1
    of_first = {name for name, at in where.items() if last and at == ("dW", 0)}
    if any(where.get(index.names[i]) == ("U", last) for i in _computed_from(index, of_first)):
        raise GraphError(
            f"the update of {graph.layers[last].name} needs the gradient of {graph.layers[0].name}: in "
            "mode='layerpipe' layers are updated at different times; train without what needs all gradients "
            "at once (a global norm, loss scaling, sharpness-aware steps), or with another mode"
        )


def _numbered(graph: TrainingGraph, layers: Sequence[Collection[str]] | None) -> TrainingGraph:
    numbered = graph if layers is None else graph.numbered_as(layers)
    if numbered is None:
        planned = [set(layer) for layer in layers or ()]
        other = [layer.name for layer in graph.layers if set(layer.variables) not in planned]
        raise GraphError(
            f"the step has {len(graph.layers)} layers, not the {len(planned)} that were planned (others: "
            f"{', '.join(other) or 'none'}); give costs= of such a step, which is then traced only once"
        )
    return numbered


def _loop_message(model: keras.Model, op: str, loops: bool) -> str:
    """Return a message that names the layer of a loop or branch."""
    layers = [part for part in keras_layers.parts_of(model) if part is not model]
    # TensorFlow numbers scopes of one name: lstm_1 is the second one of layer "lstm".
    scopes = [_NUMBER.sub("", scope) for scope in op.split("/")] + op.split("/")
    layer = next((part for scope in scopes for part in layers if part.name == scope), None)
    hidden = f"has a loop or a branch (op {op}), which mode='layerpipe' cannot spread over rounds"
    conditions = (
        "do without loss scaling, gradient_accumulation_steps= and ema_overwrite_frequency=, and with no "
        "condition (tf.cond, ops.cond) on what weights compute"
    )
    if layer is None:
        return f"the step {hidden}: take it out of train_step, or {conditions}, or train on one device"
    title = f"layer {layer.name!r} ({type(layer).__name__})"
    if not loops:
        hidden = (
            f"has a condition on tensors (tf.cond, ops.cond; op {op}) that decides by what weights compute, "
            "or reads variables; mode='layerpipe' cannot give it the version of weights that a batch needs"
        )
    instead = "make recurrent layers with unroll=True" if loops else "leave that condition out"
    return f"{title} {hidden}: {instead}, or train with mode='pipeline', which runs the layer as one task"


@dataclass(frozen=True)
class Access:
    """Describes an op with side effects; ``states``: placeholders of variables that it reads or changes."""

    name: str
    op: str
    states: frozenset[str]
    writes: bool


def accesses(index: GraphIndex) -> list[Access]:
    """Return the accesses in topological order."""
    return [
        Access(index.names[i], op, frozenset(states_of(index, i)), not only_reads(op))
        for i in index.order
        if has_side_effects(op := index.ops[i])
    ]


def read_where_it_is(
    handle: tf.Tensor, dtype: tf.DType | str, shape: Iterable[int | None] | None
) -> tf.Tensor:
    """Return the present value of a variable, read on its device."""
    with tf.device(handle.device):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(dtype))
    value.set_shape(shape)
    return value


def zeros_on(device: str, info: OutputInfo) -> tf.Variable:
    """Return an untrained variable of zeros, with the shape and type of an op's output."""
    return keras_variables.zeros_on(device, tf.as_dtype(info.dtype), info.shape)
