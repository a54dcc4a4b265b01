"""Follows the bytes alive on each device over a simulated run.

Per stage and device:

- weights: all the time, on the devices that run its F, dO or update; optimizer state where the update is;
- activations: from the start of F(m) until dO(m) and dW(m) are done; those that dW alone needs
  (``weight_grad_bytes``) until dW(m) is done; what is recomputed (``recomputed_bytes``) not between F(m) and
  the start of dO(m);
- gradient: as large as the weights, from the start of the step's first dW to the end of its update;
- parts of it that are not added up yet (``summand_bytes``): while a dW runs;
- compiled: the new weights and slots besides the old ones, while the update runs;
- asynchronous: older versions of the weights, from the update that replaced them until the last
  micro-batch whose forward read them is done.

What is freed at an instant is free for what starts at that instant.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from tf_ooo.planning.model.relation import Layers, Relation, stage_sums
from tf_ooo.planning.model.task import KIND_NUMBER, Floats, Ints


@dataclass(frozen=True)
class MemoryCurve:
    """Holds bytes over time on one device: ``alive_bytes[i]`` from ``time_s[i]`` to the next time."""

    time_s: Floats
    alive_bytes: Floats

    @property
    def peak_bytes(self) -> int:
        return int(np.ceil(self.alive_bytes.max(initial=0.0) - 1e-6))


class MemoryUse:
    """Collects when bytes are allocated and freed, and gives a curve for each device."""

    def __init__(self, relation: Relation, layers: Layers, start_s: Floats, end_s: Floats) -> None:
        self.relation, self.layers = relation, layers
        self.start_s, self.end_s = start_s, end_s
        self._changes: list[tuple[Ints, Floats, Floats]] = [(np.zeros(0, np.int32), np.zeros(0), np.zeros(0))]
        self._tasks()
        for stage in range(relation.stages):
            self._weights(stage)

    def curves(self) -> list[MemoryCurve]:
        device, time_s, change = (np.concatenate(column) for column in zip(*self._changes, strict=True))
        order = np.lexsort((change, time_s, device))
        device, time_s, change = device[order], time_s[order], change[order]
        bounds = np.searchsorted(device, np.arange(self.relation.schedule.devices + 1))
        return [MemoryCurve(time_s[a:b], np.cumsum(change[a:b])) for a, b in itertools.pairwise(bounds)]

    def _add(self, device: ArrayLike, time_s: ArrayLike, change: ArrayLike) -> None:
        devices, times, changes = np.broadcast_arrays(device, time_s, change)
        changed = changes != 0
        self._changes.append((devices[changed], times[changed], changes[changed]))

    def _tasks(self) -> None:
        """Add activations, which change by the start of F and the ends of dO and dW."""
        relation, fields = self.relation, self.relation.fields
        activation, kept, again = (
            stage_sums(relation.schedule, self.layers, cost, relation.stages)
            for cost in ("activation_bytes", "kept_bytes", "recomputed_bytes")
        )
        stages = range(relation.stages)
        has = {kind: np.array([relation.has(kind, s) for s in stages]) for kind in ("F", "dO", "dW")}
        kept = np.where(has["dW"], np.where(has["dO"], kept, activation), 0)
        home, share = self._home, self._part_shares()
        for kind, freed in (("dO", activation - kept), ("dW", kept)):
            nodes = np.flatnonzero(fields.kind == KIND_NUMBER[kind])
            stage = fields.stage[nodes]
            self._add(home[stage], self.end_s[:, nodes], -freed[stage] * share[nodes])
            first = again * (has["dO"] if kind == "dO" else ~has["dO"])
            self._add(home[stage], self.start_s[:, nodes], first[stage] * share[nodes])
        nodes = np.flatnonzero(fields.kind == KIND_NUMBER["F"])
        stage = fields.stage[nodes]
        stored = activation - again
        self._add(home[stage], self.start_s[:, nodes], stored[stage])
        lost = ~(has["dO"] | has["dW"])
        self._add(home[stage], self.end_s[:, nodes], -stored[stage] * lost[stage])
        if not has["F"].any():  # a schedule of the backward pass alone: everything is stored when it begins
            count = relation.schedule.microbatches * len(self.start_s)
            self._add(home, np.zeros(relation.stages), stored * (has["dO"] | has["dW"]) * count)
        self._far_inputs(kept, home)

    def _far_inputs(self, kept: Floats, home: Ints) -> None:
        """Add the copies that dW on another device than F holds of its inputs while it runs."""
        nodes = np.flatnonzero(self.relation.fields.kind == KIND_NUMBER["dW"])
        stage = self.relation.fields.stage[nodes]
        away = self.relation.device[nodes] != home[stage]
        nodes, stage = nodes[away], stage[away]
        self._hold_while(nodes, self.relation.device[nodes], kept[stage])

    def _hold_while(self, nodes: Ints, device: ArrayLike, size: ArrayLike) -> None:
        self._add(device, self.start_s[:, nodes], size)
        self._add(device, self.end_s[:, nodes], -np.asarray(size))

    def _part_shares(self) -> Floats:
        share = np.ones(len(self.relation))
        for (kind, stage), shares in self.relation.schedule.parts.items():
            for held, nodes in zip(shares, self.relation.nodes(kind, stage), strict=False):
                share[nodes[nodes >= 0]] = held
        return share

    @cached_property
    def _home(self) -> Ints:
        """Return the device that stores each stage's activations: where its F runs."""
        home = np.zeros(self.relation.stages, np.int32)
        for stage in range(self.relation.stages):
            nodes = [node for kind in ("F", "dO", "dW") for node in self.relation.there(kind, stage)[:1]]
            if nodes:
                home[stage] = self.relation.device[nodes[0]]
        return home

    def _weights(self, stage: int) -> None:
        group = [self.layers[i] for i in self.relation.schedule.layers_of(stage)]
        size = sum(layer.weight_bytes for layer in group)
        weight_grads = self.relation.there("dW", stage)
        updates = self.relation.there("U", stage)
        readers = np.concatenate([self.relation.there("F", stage), self.relation.there("dO", stage), updates])
        holders = np.unique(self.relation.device[readers if len(readers) else weight_grads])
        keeper = self.relation.device[updates[0]] if len(updates) else self._home[stage]
        self._add(holders, np.zeros(len(holders)), float(size))
        slots = sum(layer.slot_bytes for layer in group)
        self._add(keeper, 0.0, float(slots))
        if any(layer.compiled for layer in group):
            self._hold_while(updates, keeper, float(size + slots))
        if not len(weight_grads):
            return
        if self.relation.schedule.asynchronous:
            self._stash(stage, size)
            return
        done = [n for n in (updates, self.relation.there("comm", stage), weight_grads) if len(n)][0]
        device = self.relation.device[weight_grads[0]]
        self._hold_while(weight_grads, device, float(max(layer.summand_bytes for layer in group)))
        self._add(device, self.start_s[:, weight_grads].min(axis=1), float(size))
        self._add(device, self.end_s[:, done].max(axis=1), -float(size))

    def _stash(self, stage: int, size: float) -> None:
        """Add, if asynchronous, a gradient for each micro-batch until its update, and older weights."""
        grads, updates = self.relation.there("dW", stage), self.relation.there("U", stage)
        device = self.relation.device[grads[0]]
        forwards = self.relation.there("F", stage)
        self._add(device, self.start_s[:, grads].ravel(), float(size))
        if len(updates) != len(grads) or len(forwards) != len(grads):
            self._add(device, self.end_s[:, grads].ravel(), -float(size))
            return
        update_s = np.sort(self.end_s[:, updates].ravel())
        self._add(device, update_s, -float(size))
        version = np.searchsorted(update_s, self.start_s[:, forwards].ravel(), side="right")
        last_use_s = np.zeros(len(update_s) + 1)
        np.maximum.at(last_use_s, version, self.end_s[:, grads].ravel())
        old = np.flatnonzero(last_use_s[:-1] > update_s)
        readers = np.concatenate([forwards, self.relation.there("dO", stage)])
        for holder in np.unique(self.relation.device[readers]):
            self._add(holder, update_s[old], float(size))
            self._add(holder, last_use_s[old], -float(size))
