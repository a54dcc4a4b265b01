"""Sees whatever ends a ``fit``, and saves files so that they are whole: the old or the new.

``fit`` has no place of its own for this: it skips ``on_train_end`` when anything raises.  But nearly all it
calls can be reached from ``on_train_begin``: the train function is ours, the test function is made by a
method of the model, the callbacks are called through one object, ``keras.callbacks.CallbackList``, and an
epoch's batches stand in a ``with`` of the object that gives them.  These are wrapped on the instance until
the fit ends.  What raises between these calls (Keras' own lines, a signal
that hits them) is made good at the next ``fit``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_fits, keras_layers, train_function, versions
from tf_ooo.errors import OOOError

if TYPE_CHECKING:
    import keras

    from tf_ooo.compat.train_function import Kind
    from tf_ooo.fit.mode import Function, Training


# Saving in a training that may be cut off: a file under its name is whole, the old or the new. Keras writes
# under the final name, and empties a file before it reads the weights. If this process is killed meanwhile,
# or the weights are on a killed worker, what is left is no checkpoint. So everything is written beside, in
# the same folder, and takes its name when it is whole.

# Keras' formats of one file; a SavedModel is a folder.
_FILES = (".keras", ".h5")


def replacing(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Model.save``, ``save_weights`` or ``export``, changed to write beside and then rename."""

    @functools.wraps(save)
    def call(*args: Any, **kwargs: Any) -> Any:
        exports = save.__name__ == "export"  # which never asks
        path = _own_path(args[0] if args else kwargs.get("filepath"), folder=exports)
        overwrites = exports or kwargs.get("overwrite", args[1] if len(args) > 1 else True)
        asks = path is not None and path.exists() and not overwrites
        if path is None or asks or "save_format" in kwargs:
            return save(*args, **kwargs)
        with written_beside(path) as beside:
            return save(str(beside), *args[1:], **{k: v for k, v in kwargs.items() if k != "filepath"})

    return call


def _own_path(filepath: object, folder: bool) -> Path | None:
    """Return the local file or folder behind a path or link; None where Keras has to handle it."""
    if not isinstance(filepath, (str, os.PathLike)):
        return None
    path = os.fspath(filepath)
    if not isinstance(path, str) or "://" in path or not (folder or path.endswith(_FILES)):
        return None
    real = Path(os.path.realpath(path))
    return None if (real.is_dir() and not folder) or not real.parent.is_dir() else real


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Give a path beside this one; at the end of the block the new file replaces ``path`` at once.

    Nothing is left beside if the block raises; the next block removes what a killed process left.
    """
    # Processes of several machines may save to one folder.
    host = f".{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(host)}*.{glob.escape(path.name)}"):
        if not _runs(left.name[len(host) :].split(".", 1)[0]):
            _remove(left)
    beside = path.parent / f"{host}{os.getpid()}.{path.name}"
    try:
        yield beside
        if path.is_dir() and beside.is_dir():
            _keep_others(path, beside)
            _exchange(beside, path)
        else:
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
    finally:
        _remove(beside)


def _keep_others(old: Path, new: Path) -> None:
    """Keep in the new folder what somebody else has put into the old one."""
    for entry in old.iterdir():
        kept = new / entry.name
        if not kept.exists() and entry.is_dir():
            shutil.copytree(entry, kept, copy_function=_linked, symlinks=True)
        elif not kept.exists():
            _linked(str(entry), str(kept))


# Linux' renameat2 takes these: relative paths are the process' own; both names change at once.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders, at once where the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if rename and rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    old = other.with_name(f"{one.name}.old")
    other.rename(old)
    one.rename(other)
    old.rename(one)


def _runs(pid: str) -> bool:
    """Return whether a process of that number seems to run here."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:  # it is another user's
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def saving_backups_whole(callback: Any) -> Callable[[], None] | None:
    """Return a ``_save_model`` for ``BackupAndRestore`` that changes weights and epoch together, or None.

    Keras writes one, then the other: a fit that is killed in between and resumed trains an epoch twice.
    """
    save = keras_fits.backup_save(callback)
    if save is None:
        return None

    def call() -> None:
        folder = _own_path(callback.backup_dir, folder=True)
        if folder is None:
            save()
            return
        with written_beside(folder) as beside:
            if folder.exists():
                shutil.copytree(folder, beside, copy_function=_linked_unless_json)
            with keras_fits.backing_up_into(callback, str(beside)):
                save()

    return call


def _linked_unless_json(source: str, target: str) -> None:
    """Copy JSON, which is written in place; link weights, which are replaced, so the other link stays."""
    if source.endswith(".json"):
        shutil.copy2(source, target)
    else:
        _linked(source, target)


def _linked(source: str, target: str) -> None:
    """Link the same file under another name; copy it where links are not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


_INTERNAL = ("tf_ooo", "grappler_passes", "keras_callbacks", *versions.FRAMEWORKS)


def in_short(error: BaseException) -> BaseException:
    """Cut the frames of this package, Keras and TensorFlow from a refusal's traceback; return the error.

    Other errors keep theirs, so that a fault of ours can be found.  So do all errors after
    ``keras.config.disable_traceback_filtering()`` or ``tf.debugging.disable_traceback_filtering()``.
    """
    keras_config = getattr(sys.modules.get("keras"), "config", None)
    filtering = getattr(keras_config, "is_traceback_filtering_enabled", lambda: True)
    if isinstance(error, OOOError) and tf.debugging.is_traceback_filtering_enabled() and filtering():
        kept: TracebackType | None = None
        for frame in reversed(list(_each(error.__traceback__))):
            if str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _INTERNAL:
                kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = kept
    return error


def _each(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


_CALLS = tuple(
    f"on_{what}_{when}"
    for what in ("epoch", "train_batch", "test", "test_batch", "predict", "predict_batch", "train")
    for when in ("begin", "end")
)

# Methods of a model that see its weights.
_SEEING = (
    *("save", "save_weights", "export", "train_on_batch"),
    *("get_weights", "set_weights", "load_weights"),
)
_SAVING = ("save", "save_weights", "export")
# ``fit`` calls these itself, and they touch metrics, which may be on a worker that has just been lost.
_TOUCHING = ("reset_metrics", "get_metrics_result")
# ``fit`` calls this of the optimizer at its end: with ``use_ema`` it reads and writes all weights.
_FINAL = "finalize_variable_values"


class Guard:
    """Wraps what ``fit`` calls, from its ``on_train_begin`` on.

    ``training`` settles before anybody sees the weights between batches: before the first callback at the
    end of an epoch, and before an evaluation, a prediction, saving, loading, ``train_on_batch`` or taking the
    weights from the model, also where a callback asks for it.  ``failed`` is told an error, and returns the
    one to raise.  If the guard ``sees_epochs``, ``epoch_logs`` gets an epoch and its logs before the first
    callback (False: no callback is to hear of it), and ``epoch_end`` gets the epoch after the last one.
    """

    def __init__(
        self,
        model: keras.Model,
        training: Training,
        failed: Callable[[BaseException], BaseException],
        epoch_logs: Callable[[int, dict[str, Any]], bool],
        epoch_end: Callable[[int], None],
    ) -> None:
        self._model, self._training, self._failed = model, training, failed
        self._raised: BaseException | None = None
        self._kept: list[tuple[Any, str, Any]] = []
        callbacks = keras_fits.running_callback_list()
        self.sees_epochs = callbacks is not None
        for name in _CALLS if callbacks is not None else ():
            function = getattr(callbacks, name)
            if name == "on_epoch_end":
                function = self._around_epoch_end(function, epoch_logs, epoch_end)
            self._put(callbacks, name, self.guarded(function))
        for callback in getattr(callbacks, "callbacks", ()):
            if (backup := saving_backups_whole(callback)) is not None:
                self._put(callback, keras_fits.BACKUP_SAVE, backup)
        self._guard_batches()
        if hasattr(model.optimizer, _FINAL):
            self._put(model.optimizer, _FINAL, self.guarded(getattr(model.optimizer, _FINAL)))
        self._put(model, "make_test_function", self._making("test", model.make_test_function))
        self._put(model, "make_predict_function", self._making("predict", model.make_predict_function))
        for name in filter(functools.partial(hasattr, model), _TOUCHING):  # a layer that trains has no save
            self._put(model, name, self._guarded_outside_traces(getattr(model, name)))
        for name in filter(functools.partial(hasattr, model), _SEEING):
            method = getattr(model, name)
            if name in _SAVING:
                self._put(model, name, _after(self.guarded(self._saving), replacing(method)))
            else:
                self._put(model, name, _after(self.guarded(self._seen), method))

    def _seen(self) -> None:
        self._training.settle(False)

    def _saving(self) -> None:
        self._training.settle(True)

    def _put(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._kept.append((owner, name, vars(owner).get(name)))
        keras_layers.set_on(owner, name, method)

    def _around_epoch_end(
        self,
        function: Callable[..., Any],
        epoch_logs: Callable[[int, dict[str, Any]], bool],
        epoch_end: Callable[[int], None],
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(epoch: int, logs: dict[str, Any] | None = None) -> None:
            self._seen()
            logs = {} if logs is None else logs
            if epoch_logs(epoch, logs):
                function(epoch, logs)
                epoch_end(epoch)

        return call

    def guarded(self, function: Callable[..., Any], *ends: type[BaseException]) -> Callable[..., Any]:
        """Return the function, guarded; ``ends`` are the exceptions that signal the end of the data."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ends:
                raise
            except BaseException as error:
                raise self._ended_by(error)  # noqa: B904 (it has its cause)

        call.guarded = function  # type: ignore[attr-defined]
        return call

    def _guarded_outside_traces(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Guard functions that ``train_step`` calls, too; not in a trace, where an error is the step's."""
        guarded = self.guarded(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (guarded if tf.executing_eagerly() else function)(*args, **kwargs)

        return call

    def _ended_by(self, error: BaseException) -> BaseException:
        """Return the error to raise: the one that ends the fit, or its explanation."""
        if error is not self._raised:  # else it is on its way out, through another call that is wrapped
            self._raised = self._failed(error)
            if self._raised is not error:
                self._raised.__cause__ = error
        return in_short(self._raised)

    def _guard_batches(self) -> None:
        """See errors that are raised around the batches of the innermost running fit or evaluation."""
        batches = keras_fits.running_batches()
        if batches is None or any(batches is owner for owner, *_ in self._kept):
            return
        catching = getattr(batches, keras_fits.AROUND_BATCHES)

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            try:
                with catching():
                    yield
            except BaseException as error:
                raise self._ended_by(error)  # noqa: B904 (it has its cause)

        self._put(batches, keras_fits.AROUND_BATCHES, around)

    def _making(self, kind: Kind, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_guarded(*args: Any, **kwargs: Any) -> Any:
            self.guarded(self._seen)()
            if kind == "test":
                self._guard_batches()
            made_by_keras = make(*args, **kwargs)
            function = train_function.functions_of(self._model)[f"{kind}_function"]
            chosen = self._chosen(kind, function)
            train_function.set_functions_of(self._model, {f"{kind}_function": chosen})
            return made_by_keras and chosen  # Keras 2 takes what is returned

        return make_guarded

    def _chosen(self, kind: Kind, function: Function) -> Function:
        """Return Keras' function, or the mode's replacement for it.

        A callback may catch what its own ``predict`` raises; errors of validation end the fit.
        """

        def call(given: Any) -> Any:
            return self._training.evaluating(kind, function)(given)

        guarded = self.guarded(call, StopIteration, tf.errors.OutOfRangeError) if kind == "test" else call
        guarded.guarded = function  # type: ignore[attr-defined]
        return guarded

    def close(self) -> None:
        while self._kept:
            keras_layers.set_on(*self._kept.pop())
        train_function.set_functions_of(self._model, train_function.functions_of(self._model))


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return call
