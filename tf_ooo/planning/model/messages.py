"""What is sent from device to device, as columns: a run may have millions of messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints


def _no_numbers() -> Ints:
    return np.zeros(0, np.int64)


def _no_seconds() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class MessageColumns:
    """Transfers, one row each.

    Attributes:
        source, target: the devices.
        size_bytes: of the message.
        start_s, end_s: when it occupies the link between them.
    """

    source: Ints = field(default_factory=_no_numbers)
    target: Ints = field(default_factory=_no_numbers)
    size_bytes: Floats = field(default_factory=_no_seconds)
    start_s: Floats = field(default_factory=_no_seconds)
    end_s: Floats = field(default_factory=_no_seconds)

    def __len__(self) -> int:
        return len(self.start_s)
