"""Names for type checkers what arrays hold: numbers of any width."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]
