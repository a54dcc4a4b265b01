"""The text form of a node's inputs, the only place that reads it; and nodes that only hand one on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorflow.core.framework import node_def_pb2


def data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Return all but control inputs, as they are written."""
    return [text for text in node.input if text[0] != "^"]


def control_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Return the control inputs as they are written, ``^`` included."""
    return [text for text in node.input if text[0] == "^"]


def split_input(text: str) -> tuple[str, int]:
    """``"^a"`` is ``("a", -1)``, ``"a:2"`` is ``("a", 2)``, ``"a"`` is ``("a", 0)``."""
    if text.startswith("^"):
        return text[1:], -1
    name, colon, port = text.rpartition(":")
    if colon and port.isdecimal():
        return name, int(port)
    return text, 0


def tensor(name: str, port: int) -> str:
    """Return the text of an input; port -1 is a control input."""
    if port < 0:
        return f"^{name}"
    return name if port == 0 else f"{name}:{port}"


def make_identity(node: node_def_pb2.NodeDef, inputs: Iterable[str]) -> None:
    """Changes an op with one type ``T`` to an Identity of other inputs; notes (``_...``) stay."""
    node.op = "Identity"
    for name in [name for name in node.attr if name != "T" and not name.startswith("_")]:
        del node.attr[name]
    node.input[:] = inputs
