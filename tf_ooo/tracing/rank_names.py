"""Names of variables that are the same on all ranks."""

from __future__ import annotations

import re


def unnumbered(path: str) -> str:
    """The last part of a variable's name, without the number that Keras counts within a process."""
    return re.sub(r"_\d+$", "", path.rsplit("/", 1)[-1])
