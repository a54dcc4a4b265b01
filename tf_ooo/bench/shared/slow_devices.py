"""Costs measured in the process that trains, on workers that have a share of a core each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.bench.shared.cluster import ConfinedCluster
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.table import CostTable

_SECONDS = {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}


class SlowDevices:
    """What the callback is given as ``devices=``: the workers, and what the layers cost there.

    All schedules are planned with the same costs, those that were measured first.

    Args:
        cluster: the workers.
        slower: how many times as slow each of them is as this process.
        count: the first so many of them; None: all.
    """

    def __init__(self, cluster: ConfinedCluster, slower: float, count: int | None = None) -> None:
        self.devices, self.link = cluster.devices[:count], cluster.link
        self.explain = cluster.cluster.explain
        self._slower = slower
        self._table: CostTable | None = None

    def costs(self, table: CostTable) -> CostTable:
        """The costs on these devices of layers that were measured in this process."""
        if self._table is None:
            layers = tuple(slowed(layer, self._slower) for layer in table.layers)
            self._table = dataclasses.replace(table, layers=layers)
        return self._table


def slowed(layer: LayerCosts, factor: float) -> LayerCosts:
    """The costs on a device that is ``factor`` times as slow."""
    return dataclasses.replace(
        layer, **{name: factor * getattr(layer, name) for name in _SECONDS.values()}
    )


def stage_costs(rows: Sequence[Mapping[str, Any]], slower: float) -> list[LayerCosts]:
    """The costs of the stages as the report has them, on devices that are so many times slower."""
    return [slowed(_stage_costs(row), slower) for row in rows]


def _stage_costs(row: Mapping[str, Any]) -> LayerCosts:
    return LayerCosts(
        **{_SECONDS[kind]: seconds for kind, seconds in row["seconds"].items()},
        activation_bytes=row["activation_bytes"],
        weight_bytes=row["weight_bytes"],
        output_bytes=max(row["sends"].values(), default=0),
    )
