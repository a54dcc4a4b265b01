"""Every TensorFlow and Keras version check and private API of ``tf_ooo``, each with a test.

Seen working on TensorFlow 2.15 (Keras 2), 2.18 and 2.21 (Keras 3 and tf_keras).
"""

from __future__ import annotations

from tf_ooo.compat.functions import (
    compiles_with_xla,
    is_concrete_function,
    is_iterator,
    iterator_over,
    numbered_step,
    ops_called_by,
    same_spec,
    shapes_of,
    synchronize,
    take,
    traced_once,
    untraced_copy,
)
from tf_ooo.compat.parts import (
    attributes_of,
    is_layer,
    is_optimizer,
    is_overwritten_with_gradient,
    parts_of,
    path_of,
    shadow,
    state_of,
    unshadow,
    variables_to_apply,
)
from tf_ooo.compat.profiler import STEP_MARK, TracedEvent, mark_step, trace_workers, traced_events
from tf_ooo.compat.train_function import (
    RUN_EAGERLY,
    functions_run_eagerly,
    install_train_function,
    new_train_function,
    remove_train_function,
    samples_seen,
    set_start_epoch,
    start_epoch_of,
    step_on_data,
    train_function_of,
    why_not_rewritable,
)
from tf_ooo.compat.versions import OLDEST_TENSORFLOW, check_keras_backend, check_versions

__all__ = [
    "attributes_of",
    "check_keras_backend",
    "check_versions",
    "compiles_with_xla",
    "functions_run_eagerly",
    "install_train_function",
    "is_concrete_function",
    "is_iterator",
    "is_layer",
    "is_optimizer",
    "is_overwritten_with_gradient",
    "iterator_over",
    "mark_step",
    "new_train_function",
    "numbered_step",
    "OLDEST_TENSORFLOW",
    "ops_called_by",
    "parts_of",
    "path_of",
    "remove_train_function",
    "RUN_EAGERLY",
    "same_spec",
    "samples_seen",
    "set_start_epoch",
    "shadow",
    "shapes_of",
    "start_epoch_of",
    "state_of",
    "STEP_MARK",
    "step_on_data",
    "synchronize",
    "take",
    "trace_workers",
    "traced_events",
    "traced_once",
    "TracedEvent",
    "train_function_of",
    "unshadow",
    "untraced_copy",
    "variables_to_apply",
    "why_not_rewritable",
]
