"""Replaces Horovod's own callbacks, which crash with Keras 3, for scripts that have them.

With ``OOOBackprop`` the first two are not needed: it broadcasts and averages itself.
"""

from __future__ import annotations

import logging
from typing import Any

from tf_ooo.compat.keras_fits import Callback
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.ranks.engine import choose_engine
from tf_ooo.tracing.variables import average_logs, broadcast_state, optimizers_of, shared_variables

_LOG = logging.getLogger("tf_ooo")


class BroadcastGlobalVariablesCallback(Callback):
    """Copies rank 0's weights and optimizer state to all ranks, after the first batch.

    Args:
        root_rank: 0, which is also the rank that ``OOOBackprop`` broadcasts from.
        device: not used; Horovod's has it.

    Raises:
        OptionsError: another ``root_rank``.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        if root_rank != 0:
            raise OptionsError(f"root_rank={root_rank} is not accepted; rank 0 broadcasts")
        self._done = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast after the first batch, when all variables are there."""
        if not self._done:
            self._done = True
            variables = shared_variables(self.model, optimizers_of(self.model))
            broadcast_state(choose_engine(), variables)


class MetricAverageCallback(Callback):
    """Averages the logs of an epoch over all ranks, for the callbacks listed after this one."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Change ``logs`` in place."""
        if logs:
            everyone = choose_engine().gather({name: float(value) for name, value in logs.items()})
            logs.update(average_logs(everyone, [1.0] * len(everyone)))


class LearningRateWarmupCallback(Callback):
    """Raises the rate from ``initial_lr / ranks`` to ``initial_lr``, batch by batch (Goyal et al. 2017).

    Args:
        initial_lr: the rate at the end of the warmup: that of one rank times the number of ranks.
        warmup_epochs: for how many epochs it rises.
        momentum_correction: taken for Horovod's sake; momentum is part of the compiled step in Keras 3
            and stays as it is, which is logged.
        steps_per_epoch: where ``fit`` does not know it.
        verbose: 1 prints the rate at the end of the warmup.

    Raises:
        OptionsError: on the first batch, if the rate is a schedule, or an epoch's length is not known.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        self.initial_lr, self.warmup_epochs, self.verbose = initial_lr, warmup_epochs, verbose
        self._corrects, self._steps, self._epoch = momentum_correction, steps_per_epoch, 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Say what is not done."""
        if self._corrects and getattr(self.model.optimizer, "momentum", None):
            _LOG.info(
                "LearningRateWarmupCallback: momentum is not corrected, Keras 3 compiles it into the step"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Take note of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of this batch."""
        if self._epoch >= self.warmup_epochs:
            return
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise OptionsError("the length of an epoch is not known; give steps_per_epoch=")
        ranks = choose_engine().size
        share = (self._epoch + batch / steps) / self.warmup_epochs
        self._set(self.initial_lr / ranks * (1 + share * (ranks - 1)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the warmup with the full rate."""
        if epoch + 1 >= self.warmup_epochs > epoch:
            self._set(self.initial_lr)
            if self.verbose and choose_engine().rank == 0:
                print(f"Epoch {epoch + 1}: finished gradual learning rate warmup to {self.initial_lr}.")

    def _set(self, rate: float) -> None:
        try:
            self.model.optimizer.learning_rate = rate
        except TypeError as error:  # a schedule, of Keras
            raise OptionsError(
                "the optimizer's learning_rate is a schedule, which a warmup cannot set; give it a number"
            ) from error
