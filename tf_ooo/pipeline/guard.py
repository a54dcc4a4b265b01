"""Whatever ends a ``fit`` is seen: a callback that raises, data that do, a validation that fails, Ctrl-C.

``fit`` has no place of its own for this: it skips ``on_train_end`` when anything raises.  But nearly all it
calls can be reached from ``on_train_begin``: the train function is ours, the test function is made by a
method of the model, the callbacks are called through one object, ``keras.callbacks.CallbackList``, and an
epoch's batches stand in a ``with`` of the object that gives them.  These are wrapped on the instance until
the fit ends.  What raises between these calls (Keras' own lines, a signal
that hits them) is made good at the next ``fit``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tf_ooo.pipeline import compat as private
from tf_ooo.pipeline.saving import replacing

_CALLS = tuple(
    f"on_{what}_{when}"
    for what in ("epoch", "train_batch", "test", "test_batch", "predict", "predict_batch", "train")
    for when in ("begin", "end")
)

# Methods of a model that see its weights.
_SEEING = (
    *("make_predict_function", "save", "save_weights", "export", "train_on_batch"),
    *("get_weights", "set_weights", "load_weights"),
)
_SAVING = ("save", "save_weights")
# What ``fit`` itself calls that touches metrics, which may be on a worker that has just been lost.
_TOUCHING = ("reset_metrics", "get_metrics_result")


class Guard:
    """Wraps what ``fit`` calls, from its ``on_train_begin`` on.

    Args:
        model: that is being trained.
        failed: is told an error; returns the one to raise.
        seen: is called before anybody sees the weights between batches: before the first callback at the end
            of an epoch, and before an evaluation, a prediction, saving, loading, ``train_on_batch`` or taking
            the weights from the model, also where a callback asks for it.
    """

    def __init__(
        self,
        model: Any,
        failed: Callable[[BaseException], BaseException],
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._failed, self._seen = model, failed, seen
        self._list = private.running_callback_list()
        if self._list is not None:
            for name in _CALLS:
                function = getattr(self._list, name)
                if name == "on_epoch_end":
                    function = _after(seen, function)
                setattr(self._list, name, self.guarded(function))
        self._batches = private.running_batches()
        if self._batches is not None:
            self._batches.catch_stop_iteration = self._around(self._batches.catch_stop_iteration)
        self._raised: BaseException | None = None
        wrapped = self._wrapped(model)
        self._own = {name: vars(model).get(name) for name in wrapped}
        for name, method in wrapped.items():
            private.set_on(model, name, method)

    def _wrapped(self, model: Any) -> dict[str, Callable[..., Any]]:
        """The methods of the model that are wrapped, by name."""
        wrapped = {"make_test_function": self._making(model.make_test_function)}
        for name in _TOUCHING:
            wrapped[name] = self._guarded_outside_traces(getattr(model, name))
        for name in _SEEING:
            method = getattr(model, name)
            method = replacing(method) if name in _SAVING else method
            wrapped[name] = _after(self.guarded(self._seen), method)
        return wrapped

    def guarded(self, function: Callable[..., Any], *ends: type[BaseException]) -> Callable[..., Any]:
        """The function; ``ends`` are errors by which it says that there is no more."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ends:
                raise
            except BaseException as error:
                self.raise_for(error)

        call.guarded = function  # type: ignore[attr-defined]
        return call

    def _guarded_outside_traces(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What ``train_step`` calls too: an error there is the step's, and in a trace nothing can move."""
        guarded = self.guarded(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            import tensorflow as tf

            return (guarded if tf.executing_eagerly() else function)(*args, **kwargs)

        return call

    def raise_for(self, error: BaseException) -> None:
        """Ends the fit, and raises the error or what it is explained as."""
        if error is self._raised:  # on its way out, through another call that is wrapped
            raise error
        self._raised = self._failed(error)
        if self._raised is error:
            raise error
        raise self._raised from error

    def _around(self, catching: Callable[[], Any]) -> Callable[[], Any]:
        """What is around an epoch's batches, with what raises there seen."""

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            try:
                with catching():
                    yield
            except BaseException as error:
                self.raise_for(error)

        return around

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_guarded(*args: Any, **kwargs: Any) -> Any:
            import tensorflow as tf

            self.guarded(self._seen)()
            found = make(*args, **kwargs)
            function = self._model.test_function
            if not hasattr(function, "guarded"):
                ends = (StopIteration, tf.errors.OutOfRangeError)
                self._model.test_function = self.guarded(function, *ends)
            return found

        return make_guarded

    def close(self) -> None:
        """Takes the wraps off."""
        if self._list is not None:
            for name in _CALLS:
                vars(self._list).pop(name, None)
            self._list = None
        if self._batches is not None:
            vars(self._batches).pop("catch_stop_iteration", None)
            self._batches = None
        for name, own in self._own.items():
            private.set_on(self._model, name, own)
        function = self._model.test_function
        self._model.test_function = getattr(function, "guarded", function)


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a call before it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return call
