"""Defines ranks' messages: frozen dataclasses with fields of JSON types, encoded and decoded here only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol


class Gathers(Protocol):
    """An engine, as far as messages need one."""

    def gather(self, value: object) -> list[Any]: ...


@dataclass(frozen=True)
class Message:
    """The base of all kinds.  Tuples arrive as lists."""

    def encoded(self) -> dict[str, Any]:
        """Return the message as JSON types, with the name of its kind."""
        return {"kind": type(self).__name__, **asdict(self)}

    def told(self, engine: Gathers) -> list[Any]:
        """Every rank's message, by rank: all of this kind, unless some ranks do something else.  Blocks."""
        kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
        return [kinds[said.pop("kind")](**said) for said in map(dict, engine.gather(self.encoded()))]
