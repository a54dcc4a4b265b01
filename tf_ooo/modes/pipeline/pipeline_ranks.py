"""The pipelines that train one model: their gradients are averaged before the updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tf_ooo.costs.table import CostTable
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.variables import optimizers_of

if TYPE_CHECKING:
    import keras

# From the root, not within the numbered step: the engine knows a gradient by its op's name, and the last
# batches of two ranks may have different numbers of micro-batches.
_SCOPE = "tf_ooo_average/"


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks, each with a pipeline, and the averaging of their gradients; by default one alone."""

    engine: Engine = field(default_factory=SingleEngine)
    averaging: Averaging | None = None

    def applying(self, model: keras.Model) -> Callable[[Any], AbstractContextManager[Any]]:
        """Given a batch, what is entered around the updates: averages the gradients that are applied."""
        averaging = self.averaging
        if averaging is None:
            return contextlib.nullcontext

        @contextlib.contextmanager
        def averaged(batch: object) -> Iterator[None]:
            import tensorflow as tf

            with (
                tf.name_scope(_SCOPE),
                averaging.active(optimizers_of(model), batch, model.trainable_weights),
            ):
                yield

        return averaged

    def shared(self, table: CostTable) -> CostTable:
        """Rank 0's: all pipelines are cut at the same layers and run the same schedule.  Blocks."""
        if self.engine.size == 1:
            return table
        mine = table.to_json() if self.engine.rank == 0 else None
        return CostTable.from_json(self.engine.gather(mine)[0])
