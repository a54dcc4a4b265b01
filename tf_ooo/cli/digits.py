"""Loads hand-written digits for ``tf-ooo demo``.

``data/digits.npz`` holds 1797 images of 8 x 8 with their digits; it is from the UCI Machine Learning
Repository, "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998), CC BY 4.0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

DIGITS = Path(__file__).with_name("data") / "digits.npz"


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images of shape (1797, 8, 8), from 0 to 1, and the digit of each."""
    with np.load(DIGITS) as stored:
        return stored["x"].astype("float32") / 16, stored["y"].astype("int32")
