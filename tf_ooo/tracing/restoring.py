"""A step that is looked at and leaves no trace in the model."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ooo.tracing.reads_after import READS


class RestoringFunction:
    """A traced function; after its calls all variables are as they were.

    Values of those that it changes (``changed``) wait in the memory of this process' host meanwhile.
    """

    def __init__(self, concrete: Any) -> None:
        self.concrete, graph = concrete, concrete.graph
        inside = {id(outer): inner for outer, inner in graph.captures}
        self.changed = [
            variable
            for variable in graph.variables
            if any(op.type not in READS for op in inside[id(variable.handle)].consumers())
        ]
        self._before: list[Any] = []

    def __enter__(self) -> RestoringFunction:
        """Begin several calls, after which all is put back once."""
        self._before = [variable.numpy() for variable in self.changed]
        return self

    def __exit__(self, *_: object) -> None:
        for variable, value in zip(self.changed, self._before, strict=True):
            variable.assign(value)
        self._before = []

    def __call__(self, batch: Any) -> Any:
        tensors = tf.nest.flatten(batch, expand_composites=True)
        return self.concrete(*(tensor for tensor in tensors if tensor is not None))
