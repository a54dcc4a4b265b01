"""Defines what a fit asks of a mode. ``docs/design/house.md`` says when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tf_ooo.compat.evaluation import Kind
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report

if TYPE_CHECKING:
    import keras


Function = Callable[[Any], Any]


def _nothing(*_: object) -> None:
    """Do nothing where a mode has nothing to do."""


@dataclass(frozen=True)
class Training:
    """One fit of one model in a mode: what is called from its begin until ``restore``.

    Attributes:
        run: one execution, given Keras' iterator: ``steps_per_execution`` steps, or as many as there are data
            for; its last logs.  StopIteration where there are no data.
        restore: puts the model back as it was, with its new values; names the variables that are lost,
            because their device is gone.  May be called again.
        settle: finishes all that is under way: somebody is about to see the weights, or (True) to save them.
        explain: what an error that ends the fit is to be raised as.
        replaced: somebody else has put another train function in: says what that means, or raises.
        epoch_begin: given its number.
        test_begin: before validation, which resets the metrics.
        epoch_logs: given an epoch's number and its logs, which may be changed, before any callback sees them;
            False: no step ran in it, and nobody is to hear of it.
        epoch_end: given its number, when all callbacks have heard of it.
        ended: all epochs are through.
        evaluating: given ``"test"`` or ``"predict"`` and Keras' function, what runs now in the place of that.
        watched: what a profile of the next execution would show; None as long as the plan does not run, or
            steps are still compared.
    """

    run: Callable[[Any], Any]
    restore: Callable[[], Sequence[str]] = tuple
    settle: Callable[[bool], None] = _nothing
    explain: Callable[[Exception], Exception] = lambda error: error
    replaced: Callable[[], None] = _nothing
    epoch_begin: Callable[[int], None] = _nothing
    test_begin: Callable[[], None] = _nothing
    epoch_logs: Callable[[int, dict[str, Any]], bool] = lambda epoch, logs: True
    epoch_end: Callable[[int], None] = _nothing
    ended: Callable[[], None] = _nothing
    evaluating: Callable[[Kind, Function], Function] = lambda kind, function: function
    watched: Callable[[], Watched | None] = _nothing


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
