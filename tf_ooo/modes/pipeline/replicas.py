"""A pipeline that is one of several: their gradients are averaged before the updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tf_ooo.costs.table import CostTable
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.optimizers import optimizers_of

# From the root, not within the numbered step: the engine knows a gradient by its op's name, and the last
# batches of two ranks may have different numbers of micro-batches.
_SCOPE = "tf_ooo_average/"


class Company(Protocol):
    """The pipelines that train one model.

    Attributes:
        several: whether there are other replicas, which may divide batches otherwise.
        local_rank: of this one among those of its machine.
    """

    @property
    def several(self) -> bool: ...

    @property
    def local_rank(self) -> int: ...

    def applying(self, model: Any) -> Callable[[Any], AbstractContextManager[Any]]:
        """Given a batch, what is entered around the updates."""

    def shared(self, table: CostTable) -> CostTable:
        """The costs that all plan with.  Blocks."""


@dataclass(frozen=True)
class Alone:
    """One pipeline; see :class:`Company`."""

    several: bool = False
    local_rank: int = 0

    def applying(self, model: Any) -> Callable[[Any], AbstractContextManager[Any]]:
        """Nothing is averaged."""
        return contextlib.nullcontext

    def shared(self, table: CostTable) -> CostTable:
        """Its own."""
        return table


@dataclass(frozen=True)
class Replicas:
    """Several; see :class:`Company`.

    Attributes:
        engine: the ranks; each runs one pipeline.
        averaging: of their gradients.
    """

    engine: Engine
    averaging: Averaging
    several: bool = True

    @property
    def local_rank(self) -> int:
        """Of the process."""
        return self.engine.local_rank

    def applying(self, model: Any) -> Callable[[Any], AbstractContextManager[Any]]:
        """Averages the gradients that are applied."""

        @contextlib.contextmanager
        def averaged(batch: Any) -> Iterator[None]:
            import tensorflow as tf

            with tf.name_scope(_SCOPE), self.averaging.active(optimizers_of(model), batch):
                yield

        return averaged

    def shared(self, table: CostTable) -> CostTable:
        """Rank 0's: all pipelines are cut at the same layers and run the same schedule."""
        mine = table.to_json() if self.engine.rank == 0 else None
        return CostTable.from_json(self.engine.gather(mine)[0])
