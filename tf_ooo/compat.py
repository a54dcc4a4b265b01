"""Every TensorFlow and Keras version check and private API of ``tf_ooo``, each with a test.

Seen working on TensorFlow 2.21 and Keras 3.15.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grappler_passes.plugin.compat import TOO_NEW as TOO_NEW_TENSORFLOW
from tf_ooo.errors import BackendError

# The plug-in alone also works with older ones, see there.
OLDEST_TENSORFLOW = (2, 21)


def check_versions() -> None:
    """Raises BackendError, naming the version and the way out, outside the supported range."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise BackendError(
            f"TensorFlow cannot be imported ({error}); pip install 'tf_ooo[cpu]' or 'tf_ooo[gpu]'"
        ) from error
    if not OLDEST_TENSORFLOW <= _version(tf.__version__) < TOO_NEW_TENSORFLOW:
        oldest, too_new = (f"{major}.{minor}" for major, minor in (OLDEST_TENSORFLOW, TOO_NEW_TENSORFLOW))
        raise BackendError(
            f"TensorFlow {tf.__version__} is not supported; pip install 'tensorflow>={oldest},<{too_new}'"
        )


def check_keras_backend() -> None:
    """Raises BackendError unless Keras is version 3 on TensorFlow."""
    import keras

    if _version(keras.__version__) < (3, 0):
        raise BackendError(f"Keras {keras.__version__} is not supported; pip install 'keras>=3'")
    if keras.backend.backend() != "tensorflow":
        raise BackendError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def train_function_of(model: Any) -> Callable[..., Any]:
    """The function that ``fit`` calls for each batch; makes it if there is none."""
    if model.train_function is None:
        model.make_train_function()
    function: Callable[..., Any] = model.train_function
    return function


def new_train_function(
    model: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """A second, untraced train function; the model keeps its first one.

    ``wrap`` makes of the model's ``train_step`` the one that the function is made of.
    """
    kept = model.train_function
    if wrap is not None:
        shadow(model, "train_step", wrap(model.train_step))
    try:
        model.train_function = None
        model.make_train_function()
        function: Callable[..., Any] = model.train_function
        return function
    finally:
        model.train_function = kept
        if wrap is not None:
            unshadow(model, "train_step")


def step_on_data(model: Any, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """What Keras' train function does with one batch, not made into a ``tf.function``."""

    def step(data: Any) -> Any:
        return model.distribute_strategy.run(model._autoconvert_optionals(train_step), args=(data,))

    return step


def traced_once(function: Any, signature: Any) -> Any:
    """A ``tf.function`` with one trace; TensorFlow does not warn that there are several such functions."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function), input_signature=signature)
    made._omit_frequent_tracing_warning = True
    return made


def same_spec(a: Any, b: Any) -> bool:
    """Whether two nests of type specs are equal."""
    import tensorflow as tf

    try:
        tf.nest.assert_same_structure(a, b)
    except (TypeError, ValueError):
        return False
    return bool(tf.nest.flatten(a) == tf.nest.flatten(b))


@contextlib.contextmanager
def numbered_step(number: int, attribute: str, scope: str) -> Iterator[None]:
    """Ops made inside say which step they belong to: by an attribute, and by their name's scope."""
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    graph = tf.compat.v1.get_default_graph()
    mark = {attribute: attr_value_pb2.AttrValue(i=number)}
    with graph._attr_scope(mark), tf.name_scope(f"{scope}{number}"):
        yield


_SHADOWED = "_ooo_shadowed"


def shadow(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of this one object, behind Keras' tracking, until :func:`unshadow`."""
    before = vars(owner).setdefault(_SHADOWED, {})
    before.setdefault(name, []).append(vars(owner).get(name, _SHADOWED))
    object.__setattr__(owner, name, value)


def unshadow(owner: Any, name: str) -> None:
    """Puts back what was there before the latest :func:`shadow` of ``name``."""
    before = vars(owner)[_SHADOWED]
    value = before[name].pop()
    if value is _SHADOWED:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)
    if not any(before.values()):
        del vars(owner)[_SHADOWED]


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is a Keras 3 optimizer."""
    import keras

    return isinstance(value, keras.optimizers.Optimizer)


def is_layer(value: Any) -> bool:
    """Whether ``value`` is a Keras layer or model."""
    import keras

    return isinstance(value, keras.layers.Layer)


def parts_of(model: Any) -> list[Any]:
    """The model and all layers and models in it."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def attributes_of(owner: Any) -> list[Any]:
    """The values of an object's own attributes."""
    return list(vars(owner).values())


def variables_to_apply(optimizer: Any, given: Any) -> list[Any]:
    """The variables that ``optimizer.apply(grads, given)`` updates."""
    return list(optimizer._trainable_variables if given is None else given)


def state_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer; also of Horovod's wrapper, whose own property fails with Keras 3."""
    import keras

    inner = getattr(optimizer, "inner_optimizer", None)
    own = list(keras.optimizers.Optimizer.variables.fget(optimizer))
    return own if inner is None else own + state_of(inner)


def path_of(variable: Any) -> str:
    """The name of a Keras or TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


def is_overwritten_with_gradient(variable: Any) -> bool:
    """Whether an optimizer assigns the gradient to the variable instead of stepping along it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def ops_called_by(op: Any) -> list[str]:
    """The types of the ops in the functions that a graph op calls directly."""
    keys = {attr.name for attr in op.op_def.attr} & {"f", "then_branch", "else_branch"}
    functions = [op.graph._get_function(op.get_attr(key).name) for key in sorted(keys)]
    return [node.op for f in functions if f is not None for node in f.cached_definition.node_def]


def start_epoch_of(model: Any) -> int:
    """The epoch that ``BackupAndRestore`` wants ``fit`` to begin with; 0 if none."""
    return int(model._initial_epoch or 0)


def set_start_epoch(model: Any, epoch: int) -> None:
    """See :func:`start_epoch_of`."""
    model._initial_epoch = epoch or None


def samples_seen(model: Any) -> float:
    """How many samples the model's loss has been averaged over since its metrics were reset; 0 unknown."""
    tracker = getattr(model, "_loss_tracker", None)
    return 0.0 if tracker is None else float(tracker.count.numpy())


HIDDEN_BY_XLA = "jit_compile=True: XLA compiles the step, TensorFlow's graph optimizers see one opaque call"
RUN_EAGERLY = "tf.config.run_functions_eagerly(True): there is no graph to rewrite"


def functions_run_eagerly() -> bool:
    """Whether ``tf.function`` is switched off for the whole process."""
    import tensorflow as tf

    return bool(tf.config.functions_run_eagerly())


def why_not_rewritable(model: Any) -> str | None:
    """Why no graph of this model's step can be rewritten; None where one can."""
    if model.run_eagerly:
        return "run_eagerly=True: every op runs at once, there is no graph to rewrite"
    if model.jit_compile is True:
        return HIDDEN_BY_XLA
    if functions_run_eagerly():
        return RUN_EAGERLY
    # A model without any weights is not built yet: its first step builds it.
    if model.weights and not model.trainable_weights:
        return "the model has no trainable weights: there is no backward pass to reorder"
    return None


def is_concrete_function(value: Any) -> bool:
    """Whether ``value`` is a traced tf.function."""
    return (
        hasattr(value, "graph") and hasattr(value, "captured_inputs") and hasattr(value, "structured_outputs")
    )


def untraced_copy(function: Any) -> Any:
    """A ``tf.function`` with the settings of ``function`` (input_signature and so on), not traced yet."""
    return function._clone(None)


def compiles_with_xla(function: Any) -> bool:
    """Whether a ``tf.function`` was made with ``jit_compile=True``."""
    return bool(getattr(function, "_jit_compile", None))


def synchronize(outputs: Any) -> None:
    """Waits until all tensors of a nest are computed (a GPU runs behind the Python program)."""
    import tensorflow as tf

    for value in tf.nest.flatten(outputs):
        if hasattr(value, "numpy"):
            value.numpy()


def shapes_of(values: Any) -> tuple[tuple[int, tuple[int | None, ...]], ...]:
    """(number of the dtype, shape) of every tensor and array in a nest, each once."""
    import tensorflow as tf

    flat = tf.nest.flatten(values, expand_composites=True)
    tensors = [value for value in flat if hasattr(value, "shape") and hasattr(value, "dtype")]
    found = [(tf.as_dtype(t.dtype), tf.TensorShape(t.shape)) for t in tensors]
    return tuple({(d.as_datatype_enum, tuple(s.as_list())): None for d, s in found if s.rank is not None})


def is_iterator(value: Any) -> bool:
    """Whether ``value`` hands out the elements of a ``tf.data.Dataset`` on one device."""
    import tensorflow as tf

    return isinstance(value, tf.data.Iterator)


def take(iterator: Any, count: int) -> list[Any]:
    """Up to ``count`` elements; fewer where the data end."""
    return [element for _, element in zip(range(count), iterator, strict=False)]


def iterator_over(elements: list[Any], like: Any) -> Any:
    """An iterator over ``elements`` that functions traced for the iterator ``like`` accept as it is.

    The public ``iter(dataset)`` would have the elements' own, more precise shapes: another trace.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops

    dataset = tf.data.Dataset.from_tensors(elements[0])
    for element in elements[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))
    inner = iter(dataset)
    out = iterator_ops.OwnedIterator(components=[inner._iterator_resource], element_spec=like.element_spec)
    out._ooo_inner = inner  # keeps the dataset alive
    return out


def install_train_function(model: Any, ours: Callable[..., Any], stock: Callable[..., Any]) -> None:
    """Makes ``fit`` call ``ours`` until :func:`remove_train_function` or the next ``fit``.

    ``fit`` begins with ``make_train_function()`` and skips ``on_train_end`` when training raises, so
    the model's ``make_train_function`` is shadowed by one that first puts ``stock`` back.
    """
    make = model.make_train_function

    def restore_and_make(*args: Any, **kwargs: Any) -> Any:
        remove_train_function(model)
        return make(*args, **kwargs)

    restore_and_make.ooo = (ours, stock)  # type: ignore[attr-defined]
    object.__setattr__(model, "make_train_function", restore_and_make)
    model.train_function = ours


def remove_train_function(model: Any) -> None:
    """Undoes :func:`install_train_function`; keeps a train function that was set in between."""
    shadow = vars(model).get("make_train_function")
    if shadow is None or not hasattr(shadow, "ooo"):
        return
    object.__delattr__(model, "make_train_function")
    ours, stock = shadow.ooo
    if model.train_function is ours:
        model.train_function = stock


STEP_MARK = "tf_ooo_step"


@dataclass(frozen=True)
class TracedEvent:
    """One event of TensorFlow's profiler; times in seconds since the same moment.

    ``line`` is the thread or GPU stream, ``label`` the event's name, or for a GPU kernel the
    ``<node>:<op>`` that issued it.
    """

    plane: str
    line: str
    label: str
    begin_s: float
    duration_s: float


@contextlib.contextmanager
def traced_events(events: list[TracedEvent]) -> Iterator[None]:
    """Fills ``events`` with what TensorFlow's profiler sees inside the block.

    Raises BackendError if the profiler is in use (``TensorBoard(profile_batch=...)`` uses it too).
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="tf_ooo_profile_") as folder:
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.AlreadyExistsError as error:
            raise BackendError("TensorFlow's profiler is already running; stop it first") from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(tf.errors.UnavailableError):
                tf.profiler.experimental.stop(save=False)
            raise
        try:
            tf.profiler.experimental.stop()
        except tf.errors.UnavailableError as error:
            raise BackendError("TensorFlow's profiler was stopped while it ran for the costs") from error
        for path in Path(folder).rglob("*.xplane.pb"):
            events += _read_xplane(path.read_bytes())


def mark_step(number: int) -> Any:
    """A context manager: what runs inside is one step, in the trace an event named STEP_MARK."""
    import tensorflow as tf

    return tf.profiler.experimental.Trace(STEP_MARK, step_num=number)


def _read_xplane(content: bytes) -> Iterator[TracedEvent]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(content)
    for plane in space.planes:
        tf_op = {key for key, meta in plane.stat_metadata.items() if meta.name == "tf_op"}
        for line in plane.lines:
            for event in line.events:
                label = plane.event_metadata[event.metadata_id].name
                for stat in event.stats:
                    if stat.metadata_id in tf_op:
                        label = stat.str_value or plane.stat_metadata[stat.ref_value].name
                begin_s = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                yield TracedEvent(plane.name, line.name, label, begin_s, event.duration_ps * 1e-12)
