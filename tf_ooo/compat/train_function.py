"""Gets, sets and calls the functions that ``fit``, ``evaluate`` and ``predict`` run for each batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from tf_ooo.compat import keras_fits, keras_layers, tf_functions, versions

if TYPE_CHECKING:
    import keras


def is_iterator(value: object) -> bool:
    """Return whether ``value`` hands out the elements of a ``tf.data.Dataset`` on one device."""
    return isinstance(value, tf.data.Iterator)


def take(iterator: Any, count: int) -> list[Any]:
    """Return up to ``count`` elements; fewer if the data end."""
    return [element for _, element in zip(range(count), iterator, strict=False)]


def iterator_over(elements: list[Any], like: Any) -> Any:
    """Return an iterator over ``elements`` that functions traced for the iterator ``like`` accept.

    The public ``iter(dataset)`` would have the elements' own, more precise shapes, and need another trace.
    """
    from tensorflow.python.data.ops import iterator_ops

    dataset = tf.data.Dataset.from_tensors(elements[0])
    for element in elements[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))
    inner = iter(dataset)
    out = iterator_ops.OwnedIterator(components=[inner._iterator_resource], element_spec=like.element_spec)
    out._ooo_inner = inner  # keeps the dataset alive
    return out


OTHER_OPTIMIZER = (
    "model.optimizer is another one than in the steps before, and stock Keras goes on with that one until "
    "the model is compiled again: call model.compile(optimizer=...)"
)
_FUNCTIONS = ("train_function", "train_tf_function")
_EVALUATING = ("test_function", "predict_function")


def train_function_of(model: keras.Model) -> Callable[..., Any]:
    """Return the function that ``fit`` calls for each batch; makes it if there is none.

    Keras' own function, if not traced yet, is made anew once: a later fit without us then also traces it as
    its first trace would have been.
    """
    if model.train_function is None:
        model.make_train_function()
    if _may_be_traced_later(model):
        as_first_fit = functools.partial(keras_fits.as_first_fit, model, model.train_step)
        model.train_function = new_train_function(model, as_first_fit)
        model.train_function.ooo_made_anew = True
    function: Callable[..., Any] = model.train_function
    return function


def _may_be_traced_later(model: keras.Model) -> bool:
    """Return whether the train function is Keras 3's own, and its step is not traced yet."""
    made_by, kerass = getattr(model.make_train_function, "__func__", None), versions.keras_of(model).Model
    if (
        made_by is not kerass.make_train_function
        or versions.is_of_keras_2(model)
        or hasattr(model.train_function, "ooo_made_anew")
    ):
        return False
    steps = tf_functions.functions_of(model.train_function)
    return bool(steps) and not any(map(tf_functions.concrete_functions_of, steps))


def new_train_function(
    model: keras.Model, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """Return a second, untraced train function of ``wrap(train_step)``; the model keeps its first one."""
    # Keras 2 keeps the tf.function under a second name.
    kept = {name: getattr(model, name) for name in _FUNCTIONS if hasattr(model, name)}
    own_step = keras_fits.as_first_traced(model, model.train_step)
    train_step = own_step if wrap is None else wrap(own_step)
    try:
        with keras_layers.shadowed(model, "train_step", train_step):
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
        with keras_layers.shadowed(model, "train_step", train_step):
            return function(iterator)

    return call


def install_train_function(
    model: keras.Model,
    ours: Callable[..., Any],
    stock: Callable[..., Any],
    before_next: Callable[[], None] | None = None,
) -> None:
    """Make ``fit`` call ``ours`` until :func:`remove_train_function` or the next ``fit``.

    ``fit`` begins with ``make_train_function()`` and skips ``on_train_end`` when training raises. So that
    method is shadowed: it first puts ``stock`` back, and then calls ``before_next``.
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
    """Undo :func:`install_train_function`; keeps a train function that was set in between."""
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
    """Return the step that Keras' train function makes with a batch, not made into a ``tf.function``.

    ``counts``: Keras 2 counts the step; False if another part of the same step does.
    """
    train_step = keras_fits.as_first_traced(model, train_step)
    if versions.is_of_keras_2(model) and counts:
        train_step = _counting(train_step, model._train_counter)

    def step(data: object) -> Any:
        convert = getattr(model, "_autoconvert_optionals", lambda function: function)
        return model.distribute_strategy.run(convert(train_step), args=(data,))

    return step


def _counting(step: Callable[..., Any], counter: Any) -> Callable[..., Any]:
    """Return the step as Keras 2 makes it: it counts a batch once the step's results are there."""

    def counted(data: object) -> Any:
        outputs = step(data)
        with tf.control_dependencies([value for value in tf.nest.flatten(outputs) if tf.is_tensor(value)]):
            counter.assign_add(1)
        return outputs

    return counted


def has_kerass_train_step(model: keras.Model) -> bool:
    """Return whether Keras' own ``train_step`` trains the model: the optimizer gets all trainable weights."""
    own = versions.keras_of(model).Model.train_step
    return getattr(model.train_step, "__func__", None) is own


def counts_steps(model: keras.Model) -> bool:
    """Say whether the ops of a step count it, so that the last of several parts differs from the others."""
    return versions.is_of_keras_2(model)


def steps_per_execution(model: keras.Model) -> int:
    """Return how many batches one call of the train function takes; Keras 2 takes fewer at an epoch's end."""
    if not versions.is_of_keras_2(model):
        return int(model.steps_per_execution)
    variable = model._steps_per_execution
    return 1 if variable is None else int(variable.numpy())


@contextlib.contextmanager
def steps_per_execution_set_to(model: keras.Model, count: int) -> Iterator[None]:
    """Make the train function take ``count`` batches inside; Keras 3 takes what is left."""
    usual = steps_per_execution(model)
    changes = versions.is_of_keras_2(model) and usual != count
    try:
        if changes:
            model._steps_per_execution.assign(count)
        yield
    finally:
        if changes:
            model._steps_per_execution.assign(usual)


def functions_of(model: keras.Model) -> dict[str, Any]:
    """Return the functions that a model keeps for evaluate and predict, as Keras made them; {} for layers."""
    kept = {name: getattr(model, name, None) for name in _EVALUATING if hasattr(model, name)}
    return {name: getattr(function, "guarded", function) for name, function in kept.items()}


def set_functions_of(model: keras.Model, functions: dict[str, Any]) -> None:
    """Set what :func:`functions_of` returned; None: the function is to be made anew."""
    for name, function in functions.items():
        setattr(model, name, function)


RUN_EAGERLY = "tf.config.run_functions_eagerly(True): there is no graph to rewrite"


def functions_run_eagerly() -> bool:
    """Return whether ``tf.function`` is switched off for the whole process."""
    return bool(tf.config.functions_run_eagerly())


def why_not_rewritable(model: keras.Model) -> str | None:
    """Say why no graph of this model's step can be rewritten; None if one can."""
    if model.run_eagerly:
        return "run_eagerly=True: every op runs at once, there is no graph to rewrite"
    if getattr(model, "_cluster_coordinator", None) is not None:
        return "ParameterServerStrategy: the step is traced by a coordinator, for other processes"
    if functions_run_eagerly():
        return RUN_EAGERLY
    if keras_fits.other_optimizer(model):
        return OTHER_OPTIMIZER
    # The first step builds what is not built yet, and may create weights then.
    built = all(layer.built for layer in keras_layers.parts_of(model))
    if model.weights and built and not keras_fits.trained_variables(model):
        return "the model has no trainable weights: there is no backward pass to reorder"
    return None


def keras_compiles_by_itself(model: keras.Model) -> bool:
    """Return whether ``jit_compile=True`` may be Keras 3's choice, not the user's, as on GPUs."""
    return not versions.is_of_keras_2(model) and any(
        device.device_type != "CPU" for device in tf.config.list_physical_devices()
    )


def is_compiled(model: keras.Model) -> bool:
    """Return whether XLA compiles the model's stock step, by the user's or Keras' choice."""
    return bool(model.jit_compile)


Kind = Literal["test", "predict"]


def makes_its_own(model: keras.Model, kind: Kind) -> bool:
    """Return whether the model's class has its own ``make_test_function`` or ``make_predict_function``."""
    made_by = getattr(type(model), f"make_{kind}_function").__module__
    return made_by.partition(".")[0] not in ("keras", "tf_keras")


def evaluation_on_data(model: keras.Model, kind: Kind) -> Callable[[Any], Any]:
    """Return Keras' test or predict step for a batch, not made into a ``tf.function``."""
    on_data = step_on_data(model, getattr(model, f"{kind}_step"), counts=False)
    return (
        _counting(on_data, getattr(model, f"_{kind}_counter")) if versions.is_of_keras_2(model) else on_data
    )


def why_not_of_outputs(model: keras.Model) -> str:
    """Say why a test step may need more than a batch's outputs; empty if Keras' own needs only these."""
    if versions.is_of_keras_2(model):
        return "that is for Keras 3"
    for name in ("test_step", "predict_step", "__call__"):
        if getattr(type(model), name).__module__.partition(".")[0] != "keras":
            return f"{type(model).__name__} has a {name} of its own"
    return ""


def outputs_on_data(model: keras.Model, noted: list[str]) -> Callable[[Any], Any]:
    """Return the forward pass of a test step on one batch.

    Notes in ``noted``, when traced, what goes to the loss beside outputs and labels.
    """
    on_data = evaluation_on_data(model, "predict")

    def outputs_of(data: object) -> Any:
        outputs = on_data(data)
        if any(getattr(tensor, "_keras_mask", None) is not None for tensor in tf.nest.flatten(outputs)):
            noted.append("masks go with the model's outputs")
        if model.losses:
            noted.append("the model adds losses of its own (regularizers, add_loss)")
        return outputs

    return outputs_of


def rest_of_test_step(model: keras.Model) -> Callable[[Any, Any], Any]:
    """Return a function that gives a test step's loss and metrics for a batch and the model's outputs."""
    on_data = evaluation_on_data(model, "test")

    def rest(data: object, outputs: object) -> Any:
        with keras_layers.shadowed(model, "call", lambda *args, **kwargs: outputs):
            return on_data(data)

    return rest


def batches_of(model: keras.Model, kind: Kind, given: Any) -> tuple[list[Any], Any]:
    """Return the batches that a call of a test or predict function takes, and their spec, None if unknown.

    ``given`` is what Keras calls the function with: an iterator, or in Keras 3's ``predict`` the batches.
    """
    if kind == "predict" and isinstance(given, list):
        return given, None
    spec = given.element_spec if is_iterator(given) else None
    return take(given, steps_per_execution(model)), spec


def given_again(given: object, batches: list[Any]) -> Any:
    """Return the argument for Keras' function after :func:`batches_of` has taken these batches."""
    if given is batches:
        return given
    return iterator_over(batches, given) if is_iterator(given) else iter(batches)


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of ``predict`` for several batches joined as Keras joins them."""
    if len(outputs) == 1:
        return outputs[0]

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(parts, 0) if parts[0].shape.rank else tf.stack(parts)

    return tf.nest.map_structure(join, *outputs)
