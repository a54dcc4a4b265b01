"""The text form of a node's inputs, the only place that reads it."""

from __future__ import annotations


def split_input(text: str) -> tuple[str, int]:
    """``"^a"`` is ``("a", -1)``, ``"a:2"`` is ``("a", 2)``, ``"a"`` is ``("a", 0)``."""
    if text.startswith("^"):
        return text[1:], -1
    name, colon, port = text.rpartition(":")
    if colon and port.isdecimal():
        return name, int(port)
    return text, 0
