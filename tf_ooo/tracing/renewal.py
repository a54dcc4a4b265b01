"""Variables that were made before a cluster was joined."""

from __future__ import annotations

import weakref
from typing import Any

from tf_ooo.compat import forget_traces, parts_of
from tf_ooo.compat import pipeline as private
from tf_ooo.tracing.variables import all_variables

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def renew(model: Any) -> None:
    """Gives a model's variables new ``tf.Variable``s with the same values, once, and forgets its functions.

    After TensorFlow has joined a cluster, functions that are traced lose updates of some older variables
    (2.21: Keras' count of an optimizer's steps stays 0); those of variables made since are right.
    """
    if model in _renewed:
        return
    for variable in all_variables(model):
        old = private.value_of(variable)
        if old is not None:
            private.set_value_of(variable, private.copy_on(old.device, old))
    model.train_function = None
    for part in parts_of(model):
        private.set_functions_of(part, dict.fromkeys(private.functions_of(part)))
        forget_traces(part)
    _renewed.add(model)
