"""The order in which a compiled module launches its kernels, read from XLA's text of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9-]*)\(")
_STREAM = re.compile(r'_xla_stream_annotation="(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# They launch nothing.
_NO_KERNEL = frozenset({"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "opt-barrier"})


@dataclass(frozen=True)
class Launch:
    """One instruction of the entry computation: ``kind`` is ``kernel``, ``start`` or ``done``.

    ``name`` is HLO's; of a start and its done that of the call in TensorFlow's graph, where it is known.
    """

    kind: str
    name: str
    stream: int = 0


def launches(scheduled_hlo: str) -> list[Launch]:
    """Return what the entry computation of a scheduled module (``is_scheduled=true``) launches, in order."""
    _, _, entry = scheduled_hlo.partition("\nENTRY ")
    in_order: list[Launch] = []
    for line in entry.splitlines():
        match = _LINE.match(line)
        opcode = _OPCODE.search(match[2]) if match else None
        if match is None or opcode is None or opcode[1] in _NO_KERNEL:
            continue
        stream = _STREAM.search(line)
        kind = {"async-start": "start", "async-done": "done"}.get(opcode[1], "kernel")
        name = _OP_NAME.search(line) if kind != "kernel" else None
        in_order.append(Launch(kind, name[1] if name else match[1], int(stream[1]) if stream else 0))
    return in_order


def beside(order: Sequence[Launch]) -> dict[str, int]:
    """For each call how many kernels the main stream launches between its start and its done."""
    open_since: dict[str, int] = {}
    out: dict[str, int] = {}
    kernels = 0
    for launch in order:
        kernels += launch.kind == "kernel"
        if launch.kind == "start":
            open_since[launch.name] = kernels
        elif launch.kind == "done" and launch.name in open_since:
            out[launch.name] = kernels - open_since[launch.name]
    return out
