"""Gets and sets the functions that ``fit``, ``evaluate`` and ``predict`` call for each batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_attributes, keras_layers, keras_trainable, tf_functions, versions

if TYPE_CHECKING:
    import keras

OTHER_OPTIMIZER = (
    "model.optimizer is another one than in the steps before, and stock Keras goes on with that one until "
    "the model is compiled again: call model.compile(optimizer=...)"
)
_FUNCTIONS = ("train_function", "train_tf_function")
_EVALUATING = ("test_function", "predict_function")


def train_function_of(model: keras.Model) -> Callable[..., Any]:
    """The function that ``fit`` calls for each batch; makes it if there is none.

    Keras' own that is not traced yet is made anew, once: it is traced as its first trace would have been,
    also by a later fit without us.
    """
    if model.train_function is None:
        model.make_train_function()
    if _may_be_traced_later(model):
        as_first_fit = functools.partial(keras_trainable.as_first_fit, model, model.train_step)
        model.train_function = new_train_function(model, as_first_fit)
        model.train_function.ooo_made_anew = True
    function: Callable[..., Any] = model.train_function
    return function


def _may_be_traced_later(model: keras.Model) -> bool:
    """Return whether the train function is Keras 3's own, and its step is not traced yet."""
    made_by = getattr(model.make_train_function, "__func__", None)
    of_keras = made_by is versions.keras_of(model).Model.make_train_function
    if not of_keras or versions.is_of_keras_2(model) or hasattr(model.train_function, "ooo_made_anew"):
        return False
    steps = tf_functions.functions_of(model.train_function)
    return bool(steps) and not any(map(tf_functions.concrete_functions_of, steps))


def new_train_function(
    model: keras.Model, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """Return a second, untraced train function, of ``wrap(train_step)``; the model keeps its first one."""
    # Keras 2 keeps the tf.function a second time.
    kept = {name: getattr(model, name) for name in _FUNCTIONS if hasattr(model, name)}
    own_step = keras_trainable.as_first_traced(model, model.train_step)
    train_step = own_step if wrap is None else wrap(own_step)
    try:
        with _train_step_set_to(model, train_step):
            model.train_function = None
            model.make_train_function()
        function: Callable[..., Any] = model.train_function
    finally:
        for name, value in kept.items():
            setattr(model, name, value)
    if wrap is None or not versions.is_of_keras_2(model):
        return function

    # Keras 2 looks train_step up when the function is traced.
    def call(iterator: object) -> Any:
        with _train_step_set_to(model, train_step):
            return function(iterator)

    return call


@contextlib.contextmanager
def _train_step_set_to(model: keras.Model, train_step: Callable[..., Any]) -> Iterator[None]:
    keras_attributes.shadow(model, "train_step", train_step)
    try:
        yield
    finally:
        keras_attributes.unshadow(model, "train_step")


def install_train_function(
    model: keras.Model,
    ours: Callable[..., Any],
    stock: Callable[..., Any],
    before_next: Callable[[], None] | None = None,
) -> None:
    """Makes ``fit`` call ``ours`` until :func:`remove_train_function` or the next ``fit``.

    ``fit`` begins with ``make_train_function()`` and skips ``on_train_end`` when training raises: shadowed,
    that puts ``stock`` back first, and then calls ``before_next``.
    """
    make = model.make_train_function

    def restore_and_make(*args: Any, **kwargs: Any) -> Any:
        remove_train_function(model)
        if before_next is not None:
            before_next()
        return make(*args, **kwargs)

    restore_and_make.ooo = (ours, stock)  # type: ignore[attr-defined]
    object.__setattr__(model, "make_train_function", restore_and_make)
    model.train_function = ours


def remove_train_function(model: keras.Model) -> None:
    """Undoes :func:`install_train_function`; keeps a train function that was set in between."""
    installed = vars(model).get("make_train_function")
    if installed is None or not hasattr(installed, "ooo"):
        return
    object.__delattr__(model, "make_train_function")
    ours, stock = installed.ooo
    if model.train_function is ours:
        model.train_function = stock


def step_on_data(
    model: keras.Model, train_step: Callable[..., Any], counts: bool = True
) -> Callable[..., Any]:
    """Return the step that Keras' train function makes with one batch, not made into a ``tf.function``.

    ``counts``: Keras 2 counts the step; False where another part of the same step does.
    """
    train_step = keras_trainable.as_first_traced(model, train_step)
    if versions.is_of_keras_2(model) and counts:
        return _step_on_data_of_keras_2(model, train_step)

    def step(data: object) -> Any:
        convert = getattr(model, "_autoconvert_optionals", lambda function: function)
        return model.distribute_strategy.run(convert(train_step), args=(data,))

    return step


def has_kerass_train_step(model: keras.Model) -> bool:
    """Return whether Keras' own ``train_step`` trains the model: the optimizer gets all trainable weights."""
    own = versions.keras_of(model).Model.train_step
    return getattr(model.train_step, "__func__", None) is own


def counts_steps(model: keras.Model) -> bool:
    """Say whether the ops of a step count it, so that the last of several parts differs from the others."""
    return versions.is_of_keras_2(model)


def _step_on_data_of_keras_2(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step as Keras 2's ``make_train_function``: a batch counts once its step has succeeded."""

    def counted(data: object) -> Any:
        outputs = train_step(data)
        tensors = [value for value in tf.nest.flatten(outputs) if tf.is_tensor(value)]
        with tf.control_dependencies(tensors):
            model._train_counter.assign_add(1)
        return outputs

    return lambda data: model.distribute_strategy.run(counted, args=(data,))


def steps_per_execution(model: keras.Model) -> int:
    """Return how many batches one call of the train function takes; Keras 2 takes fewer at an epoch's end."""
    if not versions.is_of_keras_2(model):
        return int(model.steps_per_execution)
    variable = model._steps_per_execution
    return 1 if variable is None else int(variable.numpy())


@contextlib.contextmanager
def steps_per_execution_set_to(model: keras.Model, count: int) -> Iterator[None]:
    """Inside the block the train function takes ``count`` batches; Keras 3 takes what the iterator has."""
    usual = steps_per_execution(model)
    if not versions.is_of_keras_2(model) or usual == count:
        yield
        return
    model._steps_per_execution.assign(count)
    try:
        yield
    finally:
        model._steps_per_execution.assign(usual)


def functions_of(model: keras.Model) -> dict[str, Any]:
    """The functions that a model keeps for evaluate and predict, as Keras made them; {} for a layer."""
    kept = {name: getattr(model, name, None) for name in _EVALUATING if hasattr(model, name)}
    return {name: getattr(function, "guarded", function) for name, function in kept.items()}


def set_functions_of(model: keras.Model, functions: dict[str, Any]) -> None:
    """Sets what :func:`functions_of` gave; None: to be made anew."""
    for name, function in functions.items():
        setattr(model, name, function)


RUN_EAGERLY = "tf.config.run_functions_eagerly(True): there is no graph to rewrite"


def functions_run_eagerly() -> bool:
    """Return whether ``tf.function`` is switched off for the whole process."""
    return bool(tf.config.functions_run_eagerly())


def why_not_rewritable(model: keras.Model) -> str | None:
    """Say why no graph of this model's step can be rewritten; None where one can."""
    if model.run_eagerly:
        return "run_eagerly=True: every op runs at once, there is no graph to rewrite"
    if getattr(model, "_cluster_coordinator", None) is not None:
        return "ParameterServerStrategy: the step is traced by a coordinator, for other processes"
    if functions_run_eagerly():
        return RUN_EAGERLY
    if keras_trainable.other_optimizer(model):
        return OTHER_OPTIMIZER
    # The first step builds what is not built yet, and may have weights then.
    built = all(layer.built for layer in keras_layers.parts_of(model))
    if model.weights and built and not keras_trainable.trained_variables(model):
        return "the model has no trainable weights: there is no backward pass to reorder"
    return None


def keras_compiles_by_itself(model: keras.Model) -> bool:
    """Return whether ``jit_compile=True`` may be Keras 3's choice, not the user's: as on GPUs."""
    return not versions.is_of_keras_2(model) and any(
        device.device_type != "CPU" for device in tf.config.list_physical_devices()
    )


def set_jit_compile(model: keras.Model, value: bool) -> None:
    """Set it for functions that are made from now on."""
    model.jit_compile = value
