"""Defines what a fit asks of a mode. ``docs/design/house.md`` says when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tf_ooo.compat.train_function import Kind
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report

if TYPE_CHECKING:
    import keras


Function = Callable[[Any], Any]


class Training:
    """One fit of one model in a mode, or a phase of it: what is asked of it from its begin until ``restore``.

    Whatever is not said here is what a stock step needs: nothing.
    """

    def run(self, given: Any) -> Any:
        """Run one execution, given Keras' iterator, and return its last logs.

        It has ``steps_per_execution`` steps, or as many as there are data for.  StopIteration: no data.
        """
        raise NotImplementedError

    def restore(self) -> Sequence[str]:
        """Put the model back as it was, with its new values; may be called again.

        Returns the names of variables that are lost, because their device is gone.
        """
        return ()

    def settle(self, saving: bool) -> None:
        """Finish all that is under way: somebody is about to see the weights, or (True) to save them."""

    def explain(self, error: Exception) -> Exception:
        """Return what an error that ends the fit is to be raised as."""
        return error

    def replaced(self) -> None:
        """Somebody else has put another train function in: say what that means, or raise."""

    def epoch_begin(self, epoch: int) -> None:
        """An epoch begins."""

    def test_begin(self) -> None:
        """Validation begins, which resets the metrics."""

    def epoch_logs(self, epoch: int, logs: dict[str, Any]) -> bool:
        """Change an epoch's logs before callbacks see them; False: no step ran, nobody is to hear of it."""
        return True

    def epoch_end(self, epoch: int) -> None:
        """All callbacks have heard of an epoch."""

    def ended(self) -> None:
        """All epochs are through."""

    def evaluating(self, kind: Kind, function: Function) -> Function:
        """Return what runs now in the place of Keras' function for ``"test"`` or ``"predict"``."""
        return function

    def watched(self) -> Watched | None:
        """Return what a profile of the next execution would show; None as long as the plan does not run."""
        return None


class Mode(Protocol):
    """One way to train; stays from fit to fit.

    Attributes:
        options: of the user.
        keeps_stock: what goes wrong at the beginning of a fit leaves the stock step, unless ``strict``.
        compiles: takes a model that XLA compiles.
    """

    keeps_stock: bool
    compiles: bool

    @property
    def options(self) -> ModeOptions: ...

    def join(self) -> Engine:
        """The processes that train together; waits for them."""

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raises an OOOError for a model that cannot be trained so; nothing has been changed.

        Args:
            model: compiled.
            steps: of an epoch, if known.
        """

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """The training of a model; None: its stock step trains, and the report says why."""

    def describe(self) -> Report:
        """Return what was found, planned and measured so far, for the model trained last."""
