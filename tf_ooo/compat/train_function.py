"""What ``fit`` calls for each batch, and what it keeps beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_ooo.compat.parts import shadow, unshadow


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


RUN_EAGERLY = "tf.config.run_functions_eagerly(True): there is no graph to rewrite"


def functions_run_eagerly() -> bool:
    """Whether ``tf.function`` is switched off for the whole process."""
    import tensorflow as tf

    return bool(tf.config.functions_run_eagerly())


def why_not_rewritable(model: Any) -> str | None:
    """Why no graph of this model's step can be rewritten; None where one can."""
    if model.run_eagerly:
        return "run_eagerly=True: every op runs at once, there is no graph to rewrite"
    if functions_run_eagerly():
        return RUN_EAGERLY
    # A model without any weights is not built yet: its first step builds it.
    if model.weights and not model.trainable_weights:
        return "the model has no trainable weights: there is no backward pass to reorder"
    return None


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
