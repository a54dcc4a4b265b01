"""Optimizers of Keras 3 and Keras 2, and ``keras.optimizers.legacy``, which tensorflow-addons extends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.compat import keras_values
from tf_ooo.compat import keras_layers, keras_variables, nests, tf_functions, versions

if TYPE_CHECKING:
    import keras

Apply = Callable[..., Any]


def is_optimizer(value: object) -> bool:
    """Return whether ``value`` is an optimizer of any Keras that is loaded."""
    modules = [keras.optimizers for keras in versions.loaded_keras()]
    modules += [keras.optimizers.legacy for keras in versions.loaded_keras() if versions.is_keras_2(keras)]
    return any(isinstance(value, module.Optimizer) for module in modules)


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the optimizers inside a wrapper: loss scaling, MultiOptimizer, Horovod, tensorflow-addons."""
    own = vars(optimizer)
    candidates = [own.get("inner_optimizer"), own.get("_optimizer"), *(own.get("_inner_optimizers") or ())]
    return [inner for inner in candidates if is_optimizer(inner)]


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Creates the optimizer's variables; those that are there stay as they are.

    What Keras 3's optimizers assign to them while they are built is lost, as in its ``fit``, which builds
    them in a trace that is thrown away.
    """
    if _is_legacy(optimizer):
        optimizer.iterations  # noqa: B018 - a property that creates it
        optimizer._create_all_weights(list(variables))
    elif not is_built(optimizer) and versions.is_of_keras_2(optimizer):
        optimizer.build(list(variables))
    elif not is_built(optimizer):

        def built() -> None:
            with tf_functions.variables_made_at_once():
                optimizer.build(list(variables))

        tf_functions.concrete_function(built, [])


def to_be_built(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[Any] | None:
    """Stand-ins of what :func:`build_optimizer` would create, to be asked for shapes; empty: it is there.

    Another optimizer of the same settings is built in a graph that never runs, so that nothing is allocated.
    None: it cannot be made from its settings, or is one of the older ones.
    """
    if is_built(optimizer) or _is_legacy(optimizer):
        return [] if is_built(optimizer) else None
    variable_of = getattr(versions.keras_of(optimizer), "Variable", None)
    try:
        settings = optimizer.get_config()
        with tf.Graph().as_default():
            stand_ins = [
                tf.Variable(tf.zeros(v.shape, v.dtype), name="stand_in")
                if variable_of is None
                else variable_of(initializer="zeros", shape=v.shape, dtype=v.dtype, name="stand_in")
                for v in variables
            ]
            other = type(optimizer).from_config(settings)
            other.build(stand_ins)
            return state_of(other)
    except Exception:  # a class of the user's own may take whatever it likes
        return None


def is_built(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the optimizer's variables exist; the older ones cannot tell, so False."""
    built = getattr(optimizer, "built", None) if not versions.is_of_keras_2(optimizer) else None
    return bool(getattr(optimizer, "_built", False) if built is None else built)


def _is_legacy(optimizer: keras.optimizers.Optimizer) -> bool:
    return hasattr(optimizer, "_create_all_weights")


def shadow_update(optimizer: keras.optimizers.Optimizer, make: Callable[[Apply], Apply]) -> None:
    """Has updates go through ``make(apply)`` until :func:`unshadow_update`.

    ``apply(grads, trainable_variables=None)`` is the method of Keras 3, or what does the same in Keras 2.
    """
    if not versions.is_of_keras_2(optimizer):
        keras_layers.shadow(optimizer, "apply", make(optimizer.apply))
        return
    inner = optimizer.apply_gradients

    def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            return inner(list(zip(grads, variables, strict=True)), *args, **kwargs)

        return make(apply)([grad for grad, _ in pairs], variables)

    keras_layers.shadow(optimizer, "apply_gradients", apply_gradients)


def unshadow_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Undoes :func:`shadow_update`."""
    keras_layers.unshadow(optimizer, "apply_gradients" if versions.is_of_keras_2(optimizer) else "apply")


def loss_scaling(optimizer: keras.optimizers.Optimizer) -> str:
    """Return the name of the optimizer's method that scales losses; empty: it returns them as they are."""
    if versions.is_of_keras_2(optimizer):
        return "get_scaled_loss" if hasattr(optimizer, "get_scaled_loss") else ""
    by_itself = isinstance(optimizer, versions.keras_of(optimizer).optimizers.LossScaleOptimizer)
    return "scale_loss" if by_itself or optimizer.loss_scale_factor is not None else ""


def update(
    optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Any] | None
) -> None:
    """Updates variables, None: those that the optimizer was built with, from gradients in their order."""
    if versions.is_of_keras_2(optimizer):
        optimizer.apply_gradients(list(zip(grads, variables_to_apply(optimizer, variables), strict=True)))
    else:
        optimizer.apply(grads, variables)


def variables_to_apply(optimizer: keras.optimizers.Optimizer, given: Any) -> list[Any]:
    """Return the variables that ``optimizer.apply(grads, given)`` updates."""
    return keras_variables.made_trainable(optimizer) if given is None else list(given)


def state_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables of an optimizer; also of Horovod's wrapper, whose own property fails with Keras 3."""
    keras = versions.keras_of(optimizer)
    numbers: list[Any] = []
    if not versions.is_keras_2(keras):
        own = keras.optimizers.Optimizer.variables.fget(optimizer)
    elif _is_legacy(optimizer):
        own, numbers = optimizer._weights, list(optimizer._hyper.values())
    else:
        own, numbers = optimizer.variables, [_own_rate(optimizer)]
    within = [variable for inner in inner_optimizers(optimizer) for variable in state_of(inner)]
    return nests.each_once([*own, *(value for value in numbers if hasattr(value, "assign")), *within])


def horovod_averages(optimizer: keras.optimizers.Optimizer) -> bool:
    """Say whether ``hvd.DistributedOptimizer`` made it and it averages: Keras 3 calls none of its hooks."""
    return is_horovod_optimizer(optimizer) and versions.is_of_keras_2(optimizer)


def is_horovod_optimizer(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether ``hvd.DistributedOptimizer`` made it."""
    return hasattr(optimizer, "_allreduce_grads") and hasattr(optimizer, "_agg_helper")


def _own_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    return getattr(optimizer, "_learning_rate", None)


def is_plain_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an update only subtracts the gradient times a number that is always the same."""
    keras = versions.keras_of(optimizer)
    if versions.is_keras_2(keras) and isinstance(optimizer, keras.optimizers.legacy.SGD):
        return not optimizer._momentum  # its ``momentum`` is a variable
    more = ("momentum", "weight_decay", "clipnorm", "clipvalue")
    if not isinstance(optimizer, keras.optimizers.SGD) or any(getattr(optimizer, name) for name in more):
        return False
    # A schedule is no variable.
    return hasattr(keras_values.variable_of_keras(_own_rate(optimizer)), "handle")
