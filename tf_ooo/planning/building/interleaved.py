"""Orders of several stages on each device, in turn (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers, lane_codes, places
from tf_ooo.planning.model.arrays import Ints
from tf_ooo.planning.model.schedule import Lane, TaskList
from tf_ooo.planning.model.task import encode


def interleaved(
    stages: StagedLayers, chunks: int, size: int, hop: int, *, delayed: bool = False
) -> dict[Lane, TaskList]:
    """Rounds of ``size`` micro-batches, one after the other; in each they pass in groups of p to 2p - 1.

    A device runs ``hop`` F more ahead than the next one.  ``delayed``: device i puts each dW off by i dO,
    which then come back without waiting for dW (PyTorch's InterleavedZeroBubble, with ``hop`` 1).
    """
    count, devices = stages.problem.microbatches, stages.problem.devices
    lanes: dict[Lane, TaskList] = {}
    for device in range(devices):
        delay = device if delayed else 0
        rounds = [
            _lane(device, devices, chunks, np.arange(first, min(first + size, count)), hop, delay)
            for first in range(0, count, size)
        ]
        updates = encode("U", np.arange(chunks) * devices + device)
        lanes[device, 0] = TaskList(np.concatenate([*rounds, updates]))
    return lanes


def _lane(device: int, devices: int, chunks: int, batches: Ints, hop: int, delay: int) -> Ints:
    groups = np.array_split(batches, max(1, len(batches) // devices))
    ahead = (chunks - 1) * len(groups[0]) + hop * (devices - 1 - device) + 1
    down = np.concatenate([np.full(len(group), chunk) for group in groups for chunk in range(chunks)])
    batch = np.concatenate([group for group in groups for _ in range(chunks)])
    forward = down * devices + device
    backward = (chunks - 1 - down) * devices + device
    return lane_codes((forward, backward, backward), batch, places(len(batch), ahead, delay))
