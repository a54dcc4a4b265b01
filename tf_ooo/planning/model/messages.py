"""What is sent from device to device, as columns: a run may have millions of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tf_ooo.planning.model.arrays import Floats, Ints


def _none() -> NDArray[Any]:
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class MessageColumns:
    """Transfers, one row each, and when each occupies the link between two devices."""

    source: Ints = field(default_factory=_none)
    target: Ints = field(default_factory=_none)
    size_bytes: Floats = field(default_factory=_none)
    start_s: Floats = field(default_factory=_none)
    end_s: Floats = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.start_s)
