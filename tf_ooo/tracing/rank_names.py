"""Names of variables that are the same on all ranks."""

from __future__ import annotations

import re


def unnumbered(path: str) -> str:
    """The last part of a variable's name, without a number.

    Keras numbers layers, and variables without a name, within a process: one rank's ``variable_7`` is the
    ``variable_5`` of another that has made fewer before.
    """
    return re.sub(r"_\d+$", "", path.rsplit("/", 1)[-1])
