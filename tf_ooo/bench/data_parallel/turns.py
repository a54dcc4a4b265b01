"""What all configurations of the data parallel benchmark have in common: they train alike, in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod

import keras

from tf_ooo.bench.shared.networks import Network
from tf_ooo.bench.shared.scripts import ScriptNetwork
from tf_ooo.bench.shared.workloads import optimizer_of


def optimizer(network: Network | ScriptNetwork) -> keras.Optimizer:
    """All train with the same."""
    return optimizer_of(network, momentum=0.9)


def loss() -> keras.Loss:
    """Of numbers that softmax was not applied to."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class InTurns(ABC):
    """One configuration: a model that begins again after warming up, and is timed turn by turn."""

    model: keras.Model
    _steps: int

    def _remember(self, optimizer: keras.Optimizer) -> None:
        """Where training begins."""
        self._variables = [*self.model.variables, *optimizer.variables]
        self._first = [variable.numpy() for variable in self._variables]

    def _begin_again(self) -> None:
        for variable, value in zip(self._variables, self._first, strict=True):
            variable.assign(value)

    @abstractmethod
    def _fit(self) -> list[float]:
        """Trains twice ``steps`` steps; when each execution ended."""

    def turn_s(self) -> float:
        """Seconds of a step, over the second half of some."""
        marks = self._fit()
        half = len(marks) // 2
        return (marks[-1] - marks[half - 1]) / self._steps
