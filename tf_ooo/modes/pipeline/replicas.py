"""A pipeline that is one of several: their gradients are averaged before the updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.hosts.ranks.engine import Engine
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.optimizers import optimizers_of

# From the root, not within the numbered step: the engine knows a gradient by its op's name, and the last
# batches of two ranks may have different numbers of micro-batches.
_SCOPE = "tf_ooo_average/"


@dataclass(frozen=True)
class Replicas:
    """What the pipelines of a training have in common.

    Attributes:
        engine: the ranks; each runs one pipeline.
        averaging: of their gradients.
    """

    engine: Engine
    averaging: Averaging

    def applying(self, model: Any) -> Callable[[Any], AbstractContextManager[Any]]:
        """Given a batch, what is entered around the updates."""

        @contextlib.contextmanager
        def averaged(batch: Any) -> Iterator[None]:
            import tensorflow as tf

            with tf.name_scope(_SCOPE), self.averaging.active(optimizers_of(model), batch):
                yield

        return averaged

    def shared(self, table: CostTable) -> CostTable:
        """Rank 0's: all pipelines are cut at the same layers and run the same schedule.  Blocks."""
        mine = table.to_json() if self.engine.rank == 0 else None
        return CostTable.from_json(self.engine.gather(mine)[0])
