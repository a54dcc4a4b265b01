"""Finds the shapes and types of a Keras model's inputs: as it is built, or as a user gives them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import nests
from tf_ooo.errors import OptionsError

if TYPE_CHECKING:
    import keras

# An open size gets this value in an example.
_OPEN_SIZE = 128
# A spec is shape and dtype.
_Spec = tuple[tuple[int, ...], str]
Specs = _Spec | list[_Spec] | dict[str, _Spec]
# A user writes an input's shape like this: ``128,64``, ``ids=128:int32``.
_SHAPE = re.compile(r"(?:([^=:,]+)=)?([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*):?([a-z][a-z0-9]*)?", re.ASCII)
_EXPECTED = "sizes without the batch, such as 128,64, ids=128 or 128:int32"


@dataclass(frozen=True)
class _InputShape:
    """Holds the sizes of one input without the batch; ``dtype`` None: the model's own, else float32."""

    sizes: tuple[int, ...]
    dtype: str | None = None


_Shapes = _InputShape | list[_InputShape] | dict[str, _InputShape]


def _input_shapes(value: object) -> _Shapes:
    """Return one shape, or one per input, by name or in order, from ``128,64``, (128, 64), lists, maps."""
    if isinstance(value, Mapping):
        return {str(name): _input_shape(shape)[1] for name, shape in value.items()}
    if not isinstance(value, Sequence):
        raise OptionsError(f"input_shape={value!r:.80}: expected {_EXPECTED}")
    alone = isinstance(value, str) or all(isinstance(size, int) for size in value)
    values = [value] if alone else value
    shapes = [_input_shape(each) for each in values]
    names = [name for name, _ in shapes if name is not None]
    if names and (len(names) < len(shapes) or len(set(names)) < len(names)):
        raise OptionsError(f"input shapes {', '.join(map(str, values))!r:.80}: name each input once, or none")
    if names:
        return {str(name): shape for name, shape in shapes}
    return shapes[0][1] if len(shapes) == 1 else [shape for _, shape in shapes]


def _input_shape(value: object) -> tuple[str | None, _InputShape]:
    """Return an input's name, if a text gives one, and its shape."""
    if isinstance(value, str):
        match = _SHAPE.fullmatch(value.replace(" ", ""))
        if match is None:
            raise OptionsError(f"input shape {value!r:.80}: expected {_EXPECTED}")
        return match[1], _InputShape(tuple(map(int, match[2].split(","))), match[3])
    sizes = tuple(value) if isinstance(value, Sequence) else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not sizes or not whole:
        raise OptionsError(f"input_shape={value!r:.80}: expected {_EXPECTED}")
    return None, _InputShape(sizes)


def given_specs(model: keras.Model, batch: int, input_shape: object) -> tuple[Specs, Specs]:
    """Return the inputs and targets of a step; ``input_shape`` is as a user gives it, or None."""
    if input_shape is not None:
        return _called(model, _input_shapes(input_shape))
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if not inputs or not outputs:
        raise OptionsError(
            f"model {model.name!r} is not built, or has no inputs of known shape; say it, without the batch: "
            "--input-shape 128,64 (input_shape=(128, 64))"
        )
    specs = [_spec(tensor, batch, _shapes_hint(model)) for tensor in inputs]
    targets = [_target(_loss_of(model, place), _spec(out, batch)) for place, out in enumerate(outputs)]
    # A Sequential model has neither input nor output as attributes; its one of each goes in alone.
    inputs_like, outputs_like = getattr(model, "input", None), getattr(model, "output", None)
    return _like(inputs_like, specs), _like(outputs_like, targets)


def _called(model: keras.Model, shapes: _Shapes) -> tuple[Specs, Specs]:
    """Call, and so build, a model on a row of zeros; return the specs of its inputs and outputs."""
    import tensorflow as tf

    def spec(shape: _InputShape, tensor: object = None) -> _Spec:
        own = "float32" if tensor is None else nests.dtype_name(tensor)
        return (1, *shape.sizes), shape.dtype or own

    specs: Specs
    known = getattr(model, "input", None) if getattr(model, "inputs", None) else None
    if isinstance(shapes, dict):
        of_name = known if isinstance(known, dict) else {}
        specs = {name: spec(shape, of_name.get(name)) for name, shape in shapes.items()}
    elif isinstance(shapes, list):
        specs = [spec(shape) for shape in shapes]
    elif isinstance(known, dict):
        specs = {name: spec(shapes, tensor) for name, tensor in known.items()}
    else:
        specs = spec(shapes, known if hasattr(known, "dtype") else None)
    try:
        outputs = model(nested(lambda each: tf.zeros(*each), specs))
    except Exception as error:  # whatever the user's layers raise
        raise OptionsError(f"model {model.name!r} does not take these inputs: {reason_of(error)}") from error
    places = itertools.count()

    def target(tensor: Any) -> _Spec:
        own = tuple(tensor.shape), nests.dtype_name(tensor)
        return _target(_loss_of(model, next(places)), own)

    return specs, nested(target, list(outputs) if isinstance(outputs, tuple) else outputs)


def with_rows(specs: Specs, batch: int) -> Specs:
    """Return the same specs for batches of ``batch`` rows."""
    return nested(lambda spec: ((batch, *spec[0][1:]), spec[1]), specs)  # type: ignore[no-any-return]


def reason_of(error: Exception) -> str:
    """Return the first line of what was raised, without Keras' own above it and its colours; or the name."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Exception encountered when calling")]
    return (lines or [type(error).__name__])[0]


def _like(structure: object, values: Sequence[_Spec]) -> Specs:
    """Return the values as the model's own inputs are given: a single value, a list, or a dictionary."""
    if isinstance(structure, dict):
        return dict(zip(structure, values, strict=True))
    return list(values) if isinstance(structure, (list, tuple)) else values[0]


def nested(make: Callable[[Any], Any], value: Any) -> Any:
    """Apply the function to a value, or to each one in a list or dictionary."""
    if isinstance(value, dict):
        return {key: make(each) for key, each in value.items()}
    return list(map(make, value)) if isinstance(value, list) else make(value)


def _spec(tensor: keras.KerasTensor, batch: int, hint: str = "") -> _Spec:
    """Return the shape and the type; ``hint`` says how open sizes of an input are given."""
    shape = (batch, *tensor.shape[1:])
    if None in shape:
        raise OptionsError(
            f"input or output {tensor.name!r} has an open shape {tensor.shape}: only the batch may be open"
            + hint
        )
    return shape, nests.dtype_name(tensor)


def _shapes_hint(model: keras.Model) -> str:
    """Say how to give the sizes of all inputs, with 128 for each that is open."""

    def text(tensor: keras.KerasTensor) -> str:
        dtype = nests.dtype_name(tensor)
        sizes = ",".join(str(size or _OPEN_SIZE) for size in tensor.shape[1:])
        return sizes if dtype == "float32" else f"{sizes}:{dtype}"

    known = getattr(model, "input", None)
    if isinstance(known, dict):
        shapes = [f"{name}={text(tensor)}" for name, tensor in known.items()]
    else:
        shapes = [text(tensor) for tensor in model.inputs]
    options = " ".join(f"--input-shape {shape}" for shape in shapes)
    return f"; say all sizes, without the batch, such as {options} (input_shape={shapes})"


def _loss_of(model: keras.Model, place: int) -> Any:
    loss = getattr(model, "loss", None)  # not there before compile
    loss = list(loss.values()) if isinstance(loss, dict) else loss
    if isinstance(loss, (list, tuple)):
        return loss[place] if place < len(loss) else None
    return loss


def _target(loss: object, output: _Spec) -> _Spec:
    """Return class numbers as targets for a sparse loss, else targets like the output."""
    shape, dtype = output
    name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
    return (shape[:-1], "int32") if str(name).startswith("sparse_") else (shape, dtype)
