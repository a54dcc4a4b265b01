"""Handles what a model is compiled with (optimizers, losses, metrics) in Keras 3, Keras 2 and legacy."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.compat import keras_values
from tf_ooo.compat import keras_layers, keras_variables, nests, tf_functions, versions

if TYPE_CHECKING:
    import keras

Apply = Callable[..., Any]


def is_optimizer(value: object) -> bool:
    """Return whether ``value`` is an optimizer of a loaded Keras."""
    modules = [keras.optimizers for keras in versions.loaded_keras()]
    modules += [keras.optimizers.legacy for keras in versions.loaded_keras() if versions.is_keras_2(keras)]
    return any(isinstance(value, module.Optimizer) for module in modules)


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the optimizers inside a wrapper: loss scaling, MultiOptimizer, Horovod, tensorflow-addons."""
    own = vars(optimizer)
    candidates = [own.get("inner_optimizer"), own.get("_optimizer"), *(own.get("_inner_optimizers") or ())]
    return [inner for inner in candidates if is_optimizer(inner)]


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Create the optimizer's variables; existing ones stay as they are.

    Values that Keras 3's optimizers assign to them while being built are lost, as in Keras' ``fit``, which
    builds them in a trace that is thrown away.
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
    """Return stand-ins for the shapes of what :func:`build_optimizer` would create; empty if it exists.

    Another optimizer with the same settings is built in a graph that never runs, so that nothing is
    allocated. None: it cannot be made from its settings, or is a legacy one.
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
    """Return whether the optimizer's variables exist; False for legacy ones, which cannot tell."""
    built = getattr(optimizer, "built", None) if not versions.is_of_keras_2(optimizer) else None
    return bool(getattr(optimizer, "_built", False) if built is None else built)


def _is_legacy(optimizer: keras.optimizers.Optimizer) -> bool:
    return hasattr(optimizer, "_create_all_weights")


def shadow_update(optimizer: keras.optimizers.Optimizer, make: Callable[[Apply], Apply]) -> None:
    """Pass updates through ``make(apply)`` until :func:`unshadow_update`.

    ``apply(grads, trainable_variables=None)`` is Keras 3's method, or does the same in Keras 2.
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
    """Undo :func:`shadow_update`."""
    keras_layers.unshadow(optimizer, "apply_gradients" if versions.is_of_keras_2(optimizer) else "apply")


def loss_scaling(optimizer: keras.optimizers.Optimizer) -> str:
    """Return the name of the optimizer's method that scales losses; empty if it scales none."""
    if versions.is_of_keras_2(optimizer):
        return "get_scaled_loss" if hasattr(optimizer, "get_scaled_loss") else ""
    by_itself = isinstance(optimizer, versions.keras_of(optimizer).optimizers.LossScaleOptimizer)
    return "scale_loss" if by_itself or optimizer.loss_scale_factor is not None else ""


def update(
    optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Any] | None
) -> None:
    """Update variables from gradients in their order; None: those that the optimizer was built with."""
    if versions.is_of_keras_2(optimizer):
        optimizer.apply_gradients(list(zip(grads, variables_to_apply(optimizer, variables), strict=True)))
    else:
        optimizer.apply(grads, variables)


def variables_to_apply(optimizer: keras.optimizers.Optimizer, given: Any) -> list[Any]:
    """Return the variables that ``optimizer.apply(grads, given)`` updates."""
    return keras_variables.made_trainable(optimizer) if given is None else list(given)


def state_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return an optimizer's variables, also of Horovod's wrapper, whose own property fails with Keras 3."""
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
    """Return whether ``hvd.DistributedOptimizer`` made the optimizer."""
    return hasattr(optimizer, "_allreduce_grads") and hasattr(optimizer, "_agg_helper")


def _own_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    return getattr(optimizer, "_learning_rate", None)


def is_plain_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an update only subtracts the gradient times a number that never changes."""
    keras = versions.keras_of(optimizer)
    if versions.is_keras_2(keras) and isinstance(optimizer, keras.optimizers.legacy.SGD):
        return not optimizer._momentum  # its ``momentum`` is a variable
    more = ("momentum", "weight_decay", "clipnorm", "clipvalue")
    if not isinstance(optimizer, keras.optimizers.SGD) or any(getattr(optimizer, name) for name in more):
        return False
    # If the rate is a schedule there is no variable behind it.
    return hasattr(keras_values.variable_of_keras(_own_rate(optimizer)), "handle")


def summed_losses(model: keras.Model) -> list[str]:
    """Return the names of compiled losses that add up a batch instead of averaging it.

    If a loss has no reduction, the gradient is the sum's, unless the model's own code averages it.
    """
    summed = {"sum"} if _has_own_loss_code(model) else {"sum", "none", None}
    return [loss.name for loss in _losses(model) if loss.reduction in summed]


def masks(model: keras.Model) -> list[str]:
    """Name the layers that make masks, and the losses that divide by something else than rows."""
    masking = versions.keras_of(model).layers.Masking
    return [
        keras_layers.title_of(layer)
        for layer in keras_layers.parts_of(model, itself=False)
        if getattr(layer, "mask_zero", False) or isinstance(layer, masking)
    ] + [
        loss.name
        for loss in _losses(model)
        if _ignored_class(loss) is not None or loss.reduction == "mean_with_sample_weight"
    ]


def is_kerass_own(loss: object) -> bool:
    """Say whether a loss is an object of one of Keras' own classes: ``get_config`` tells its settings."""
    return hasattr(loss, "get_config") and type(loss).__module__.split(".")[0] in keras_layers.OWN_MODULES


def own_loss_code(model: keras.Model) -> list[str]:
    """Name, in words, code outside of Keras that may decide how a loss depends on the rows of a batch."""
    said = [type(model).__name__] if _has_own_loss_code(model) else []
    for loss in tf.nest.flatten(getattr(model, "loss", None)):
        if callable(loss) and not _is_known(loss):
            name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or type(loss).__name__
            said.append(f"loss {name}")
    for layer in keras_layers.parts_of(model, itself=False):
        if getattr(layer, "activity_regularizer", None) is not None:
            said.append(f"activity_regularizer of {keras_layers.title_of(layer)}")
        elif not keras_layers.is_of_kerass_family(layer):
            said.append(f"layer {keras_layers.title_of(layer)}")
    return said


def _is_known(loss: object) -> bool:
    """Return whether a loss is one of Keras' own functions, wrapped or not."""
    function, kinds = getattr(loss, "fn", loss), tuple(k.losses.Loss for k in versions.loaded_keras())
    return all(
        str(getattr(part, "__module__", "")).split(".")[0] in keras_layers.OWN_MODULES
        for part in (type(loss) if isinstance(loss, kinds) else loss, function)
    )


def loss_weights(model: keras.Model) -> Any:
    """Return the compiled loss weights as JSON types; None if there are none or they are unknown."""
    with contextlib.suppress(Exception):  # a loss that cannot be serialized
        given = model.get_compile_config()["loss_weights"]
        return json.loads(json.dumps(given, default=float))
    return None


def _losses(model: keras.Model) -> list[Any]:
    kind = versions.keras_of(model).losses.Loss
    return [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if isinstance(loss, kind)]


def _ignored_class(loss: object) -> Any:
    """Return the class that a loss ignores; with Keras 2 it is an argument of the loss function."""
    return getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))


def _has_own_loss_code(model: keras.Model) -> bool:
    own, kerass = type(model), versions.keras_of(model).Model
    names = ("train_step", "compute_loss")
    return any(getattr(own, name, None) is not getattr(kerass, name, None) for name in names)


@contextlib.contextmanager
def weighted_means(model: keras.Model, weight: object) -> Iterator[None]:
    """Make a number given to a ``Mean`` of the model inside the block count ``weight`` by default.

    Keras 3 weighs the means of each output's loss by the rows that its trace knows.  ``fit`` traces with open
    rows, so that each batch counts the same; here each micro-batch counts its share of that.
    """
    kind = versions.keras_of(model).metrics.Mean
    loss: Any = getattr(model, "_compile_loss", None)
    of_outputs = nests.each_once(getattr(loss, "metrics", ()))
    whole = isinstance(weight, float) and weight == 1.0
    means = [] if whole else [metric for metric in model.metrics if type(metric) is kind]
    with contextlib.ExitStack() as shadows:

        def weigh(metric: Any, always: bool) -> None:
            update = functools.partial(_update_mean, metric.update_state, weight, always)
            shadows.enter_context(keras_layers.shadowed(metric, "update_state", update))

        def build_and_weigh(build: Any, *args: Any) -> None:
            build(*args)
            for metric in loss.metrics:
                weigh(metric, always=True)

        for metric in nests.each_once([*of_outputs, *means]):
            weigh(metric, always=any(metric is each for each in of_outputs))
        if hasattr(loss, "metrics") and not loss.built:  # its first call makes the outputs' means
            build = functools.partial(build_and_weigh, loss.build)
            shadows.enter_context(keras_layers.shadowed(loss, "build", build))
        yield


def _update_mean(update: Any, weight: Any, always: bool, values: Any, sample_weight: Any = None) -> Any:
    """Update a mean; with ``always`` the weight replaces the number of rows that the trace knows."""
    weighs = always or (sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0)
    return update(values, sample_weight=weight if weighs else sample_weight)
