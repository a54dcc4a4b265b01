"""Names by which the variables of a model are known in its graphs, and the layer that each runs with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from grappler_passes import plugin
from tf_ooo.compat import keras_trainable, keras_variables
from tf_ooo.rewriting.step_graph import StepGraph

if TYPE_CHECKING:
    import keras

    from grappler_passes.plugin.requests import Describe, VariableInfo


def describe(model: keras.Model, variables: Callable[[], Sequence[keras.Variable]]) -> Describe:
    """Tell graphs the names of variables, and which Keras takes for trainable."""

    def infos() -> Iterator[tuple[Any, VariableInfo]]:
        trainable = {id(variable) for variable in keras_trainable.trained_variables(model)}
        for name, variable in keras_variables.named(variables()).items():
            value = keras_variables.value_of(variable)
            if value is not None:
                yield value.handle, {"name": name, "trainable": id(variable) in trainable}

    return plugin.described_by_handle(infos)


def variable_layers(step: StepGraph) -> dict[str, int]:
    """Return the layer that each variable is used with; those that several layers' updates use are left out.

    A slot that of its weight; a state or a metric that of the forward ops on it, or computed from it.
    """
    layers: dict[str, int] = {}
    by_name = {variable.name: variable for variable in step.graph.variables}
    for layer in step.graph.layers:
        for name in layer.variables:
            layers[name] = layer.index
            layers.update(dict.fromkeys(by_name[name].slots, layer.index))
    arguments_of: dict[str, list[int]] = {}
    for argument, name in step.variables.items():
        arguments_of.setdefault(name, []).append(step.index.index[argument])
    for name, arguments in arguments_of.items():
        if name not in layers:
            used_with = _used_with(step, arguments)
            if used_with is not None:
                layers[name] = used_with
    return layers


def _used_with(step: StepGraph, arguments: Sequence[int]) -> int | None:
    index = step.index
    users = [s for i in arguments for s in index.succs[i]]
    near = [
        *users,
        *(p for u in users for p, _ in index.data_preds[u]),
        *(s for u in users for s in index.succs[u]),
    ]
    for nodes in (users, near):
        places = [step.where[index.names[i]] for i in nodes if index.names[i] in step.where]
        layers = [layer for kind, layer, _ in places if kind == "F"]
        if layers:
            return max(layers)
    return None
