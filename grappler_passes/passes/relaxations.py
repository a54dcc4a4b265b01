"""Lists the changes that a pass may make. Each pass declares its own; ``verify`` refuses any other."""

from __future__ import annotations

import enum


class Relaxation(str, enum.Enum):
    """One kind of difference between a pass's input and its output.

    Whatever is declared, every rule on control flow holds, the graph's arguments and results stay, and ops
    that stay and have side effects keep their order.
    """

    MORE_WAITS = "more waits"
    """There are control edges that the input lacks."""
    FEWER_WAITS = "fewer waits"
    """There are control edges only in the input."""
    DEVICES = "devices"
    """Nodes sit on other devices."""
    NOTES = "notes"
    """Attributes that begin with an underscore differ: they do not say what a node computes."""
    NEW_NODES = "new nodes"
    """There are nodes that the input lacks."""
    COPIES = "copies"
    """Identity, IdentityN and NoOp may go; who read through a copy may read what was copied."""
    REPLACED_NODES = "replaced nodes"
    """The nodes of ``PassResult.replaced`` may go, read other tensors, and have other attributes."""
    OPS = "ops"
    """Replaced nodes may be other ops."""
    SIDE_EFFECTS = "side effects"
    """Replaced nodes may be some that read or change state."""
    FUNCTIONS = "functions"
    """The library of functions differs."""

    def __str__(self) -> str:
        return self.value


REORDERING = frozenset(Relaxation) - {Relaxation.OPS, Relaxation.SIDE_EFFECTS, Relaxation.FUNCTIONS}
"""All that leaves every number as it was."""
