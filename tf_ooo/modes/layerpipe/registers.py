"""A row of registers between rounds, and the names of what is read from outside of a round."""

from __future__ import annotations

from dataclasses import dataclass

LATE = "_ooo_late"
LOCAL = "_ooo_local"


@dataclass(frozen=True)
class Register:
    """A row of registers.

    Attributes:
        source: the tensor that goes in, ``node:port``.
        device: where they are.
        made: the round in which the tensor is made.
        depth: how many.
    """

    number: int
    source: str
    device: str
    made: int
    depth: int

    def name(self, delay: int) -> str:
        """The placeholder for what was made so many rounds ago."""
        return f"{LATE}/{self.number}_{delay}"
