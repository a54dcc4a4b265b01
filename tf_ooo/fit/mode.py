"""What a fit asks of a mode.  ``docs/design/house.md`` says when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report


class Training(Protocol):
    """One fit of one model in a mode, until :meth:`restore`."""

    def run(self, iterator: Any) -> Any:
        """One execution: ``steps_per_execution`` steps, or as many as there are data for; its last logs.

        Raises StopIteration where there are no more data.
        """

    def settle(self, saving: bool) -> None:
        """Finishes all that is under way: somebody is about to see the weights, or to save them."""

    def explain(self, error: Exception) -> Exception:
        """What an error that ends the fit is to be raised as."""

    def replaced(self) -> None:
        """Somebody else has put another train function in: says what that means, or raises."""

    def epoch_begin(self, epoch: int) -> None:
        """Before the first batch of an epoch."""

    def test_begin(self) -> None:
        """Before validation, which resets the metrics."""

    def epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """After an epoch and its validation; ``logs`` may be changed."""

    def ended(self) -> None:
        """All epochs are through: what is to be said then."""

    def restore(self) -> Sequence[str]:
        """Puts the model back as it was, with its new values; may be called again.

        Returns the variables that are lost, because their device is gone.
        """


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

    def check(self, model: Any, steps: int | None) -> None:
        """Raises an OOOError for a model that cannot be trained so; nothing has been changed.

        Args:
            model: compiled.
            steps: of an epoch, if known.
        """

    def prepare(self, model: Any, steps: int | None) -> Training | None:
        """The training of a model; None: its stock step trains, and the report says why."""

    def describe(self) -> Report:
        """What was found, planned and measured so far, for the model trained last."""
