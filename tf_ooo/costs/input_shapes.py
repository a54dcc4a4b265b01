"""Shapes of inputs as a user gives them: ``128,64``, ``ids=128:int32``, (128, 64), lists, maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_ooo.errors import OptionsError

_TEXT = re.compile(r"(?:([^=:,]+)=)?([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*):?([a-z][a-z0-9]*)?", re.ASCII)
_EXPECTED = "sizes without the batch, such as 128,64, ids=128 or 128:int32"


@dataclass(frozen=True)
class InputShape:
    """Sizes of one input without the batch; ``dtype`` None: the model's own, else float32."""

    sizes: tuple[int, ...]
    dtype: str | None = None


def parse_input_shape(text: str) -> tuple[str | None, InputShape]:
    """Return the name, where one is given, and the shape.  OptionsError says what was expected."""
    match = _TEXT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise OptionsError(f"input shape {text!r:.80}: expected {_EXPECTED}")
    return match[1], InputShape(tuple(map(int, match[2].split(","))), match[3])


def input_shapes(value: object) -> InputShape | list[InputShape] | dict[str, InputShape]:
    """Return one shape, or one for each input, by name or in order.  OptionsError: it is none."""
    if isinstance(value, Mapping):
        return {str(name): _single(shape) for name, shape in value.items()}
    is_sizes = isinstance(value, Sequence) and all(isinstance(size, int) for size in value)
    if isinstance(value, str) or is_sizes:
        return _named([value])
    if isinstance(value, Sequence):
        return _named(value)
    raise OptionsError(f"input_shape={value!r:.80}: expected {_EXPECTED}")


def _named(values: Sequence[Any]) -> InputShape | list[InputShape] | dict[str, InputShape]:
    parsed = [parse_input_shape(v) if isinstance(v, str) else (None, _single(v)) for v in values]
    names = [name for name, _ in parsed if name is not None]
    if names and (len(names) < len(parsed) or len(set(names)) < len(names)):
        raise OptionsError(f"input shapes {', '.join(map(str, values))!r:.80}: name each input once, or none")
    if names:
        return {str(name): shape for name, shape in parsed}
    return parsed[0][1] if len(parsed) == 1 else [shape for _, shape in parsed]


def _single(value: object) -> InputShape:
    if isinstance(value, str):
        return parse_input_shape(value)[1]
    sizes = tuple(value) if isinstance(value, Sequence) else ()
    if not sizes or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
    ):
        raise OptionsError(f"input_shape={value!r:.80}: expected {_EXPECTED}")
    return InputShape(sizes)
