"""Variables that were made before a cluster was joined."""

from __future__ import annotations

import weakref
from typing import Any

from tf_ooo.compat import keras_layers, keras_variables, tf_functions, train_function
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
        old = keras_variables.value_of(variable)
        if old is not None:
            keras_variables.set_value_of(variable, keras_variables.copy_on(old.device, old))
    model.train_function = None
    for part in keras_layers.parts_of(model):
        train_function.set_functions_of(part, dict.fromkeys(train_function.functions_of(part)))
        tf_functions.forget_traces(part)
    _renewed.add(model)
