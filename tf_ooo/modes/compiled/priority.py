"""Gives a GPU's main stream priority over its side streams: dW run where it leaves room."""

from __future__ import annotations

from tf_ooo.errors import BackendError, OptionsError

# CUDA's most urgent on all devices so far; lower is more urgent, 0 what streams have.
MOST_URGENT = -5


def high_priority_main_stream(memory_limit_bytes: int, priority: int = MOST_URGENT) -> None:
    """Have TensorFlow start the first GPU with an urgent compute stream; the side streams are XLA's own.

    Call it before anything runs on a GPU.  TensorFlow sets priorities only for logical devices, whose memory
    is reserved; a GPU with several of them keeps one.

    Example:
        >>> tf_ooo.high_priority_main_stream(memory_limit_bytes=30 * 2**30)
        >>> model.fit(x, y, callbacks=[tf_ooo.OOOBackprop()])

    Args:
        memory_limit_bytes: a limit of the GPU's memory for TensorFlow, at least 1 MiB.
        priority: CUDA's, below 0.

    Raises:
        OptionsError: a number that is out of range.
        BackendError: there is no GPU, or it is in use already.
    """
    import tensorflow as tf

    if not isinstance(memory_limit_bytes, int) or memory_limit_bytes < 2**20:
        raise OptionsError(f"memory_limit_bytes must be at least {2**20}, got {memory_limit_bytes!r}")
    if not isinstance(priority, int) or priority >= 0:
        raise OptionsError(f"priority must be a whole number below 0, got {priority!r}")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise BackendError("high_priority_main_stream: TensorFlow sees no GPU")
    whole_gpu = tf.config.LogicalDeviceConfiguration(
        memory_limit=memory_limit_bytes // 2**20, experimental_priority=priority
    )
    try:
        tf.config.set_logical_device_configuration(gpus[0], [whole_gpu])
    except RuntimeError as error:
        raise BackendError(
            f"high_priority_main_stream: {gpus[0].name} is in use already ({error}); call it first, before "
            "anything of TensorFlow runs"
        ) from error
