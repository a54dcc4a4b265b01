"""Reads and writes costs, and gains of overlap, as JSON that a person can edit; errors say what is wrong.

A gain is the seconds saved by running one layer's dW beside a region of the main stream.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tf_ooo.costs.layer_costs import RUNTIME, LayerCosts, Link, check_layers, is_amount, is_number
from tf_ooo.errors import CostError, unreadable

VERSION = 1
SOURCES = ("measured", "analytic", "mixed", "edited")
# A bandwidth without limit is written as this, because JSON has no infinity.
UNLIMITED = "unlimited"
# These fields are left out if they have these values.
_RECOMPUTED = {"recomputed_bytes": 0, "recomputed_s": 0, "forward_bytes": None}
_LEFT_OUT = {**_RECOMPUTED, "compiled": False, "tied": ()}
# These may be left out or null, with the meaning that LayerCosts gives to None or to the default.
_OPTIONAL = ("weight_grad_bytes", "inputs", "occupancy", "name", "summand_bytes", *_LEFT_OUT)
_REGION = re.compile(r"(dO|F):(0|[1-9]\d{0,5})", re.ASCII)
_TASK = re.compile(r"(dO|F|dW):(0|[1-9]\d{0,5})", re.ASCII)
_ROW = frozenset({"region", "layer", "saved_s"})

Gains = Mapping[tuple[str, int], float]


@dataclass(frozen=True, repr=False)
class CostTable:
    """Holds the costs that a plan is made from.

    Attributes:
        layers: costs of each layer, for one micro-batch.
        link: the link between two neighbouring devices.
        source: ``"measured"``, ``"analytic"``, ``"mixed"`` (measured, where that was possible) or
            ``"edited"`` (by hand).
        device: what the numbers are for, in words.
        assumptions: what was assumed to get them.
        notes: what else a reader should know, such as ops that could not be measured.
        op_seconds: seconds of single ops, by node name; empty if only layers are known.
        rows: the rows of the micro-batch that the costs are for; None: not known.

    Raises:
        CostError: there is no layer, a layer reads no earlier one, or an op's seconds are no time.
    """

    layers: tuple[LayerCosts, ...]
    link: Link = Link()
    source: str = "edited"
    device: str = ""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    rows: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_layers(self.layers))
        if self.source not in SOURCES:
            raise CostError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        _expect(isinstance(self.link, Link), "link: expected a tf_ooo.Link", self.link)
        _expect(isinstance(self.device, str), "device: expected text", self.device)
        for field_name in ("assumptions", "notes"):
            check_texts(field_name, getattr(self, field_name))
        _expect(isinstance(self.op_seconds, Mapping), "op_seconds: expected a map", self.op_seconds)
        whole = isinstance(self.rows, int) and not isinstance(self.rows, bool) and self.rows > 0
        _expect(self.rows is None or whole, "rows: expected a whole number of at least 1", self.rows)
        for name, seconds in self.op_seconds.items():
            if not is_amount(seconds):
                raise CostError(f"op_seconds: op {name!r}: must be a finite number >= 0, got {seconds!r}")

    def __repr__(self) -> str:
        """Return a short text: an error or a notebook that shows a table must not fill the screen."""
        busy_s = sum(layer.busy_s for layer in self.layers)
        return (
            f"CostTable({len(self.layers)} layers, {self.source}, F + dO + dW {busy_s:.3g} s a micro-batch)"
        )

    def scaled(self, factor: float) -> CostTable:
        """Return the costs for micro-batches with ``factor`` times the rows."""
        rows = None if self.rows is None else max(1, round(self.rows * factor))
        return replace(self, layers=tuple(layer.scaled(factor) for layer in self.layers), rows=rows)

    def to_json(self) -> str:
        """Return the text of the file; the same table gives the same text."""
        content = {
            "version": VERSION,
            "source": self.source,
            "device": self.device,
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "rows": self.rows,
            "link": _link_object(self.link),
            "layers": [{"name": layer.name, **_written(layer)} for layer in self.layers],
            "op_seconds": dict(sorted(self.op_seconds.items())),
        }
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the file; return its path."""
        path = Path(path)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def from_json(cls, text: str, where: str = "costs") -> CostTable:
        """Read what :meth:`to_json` wrote.  CostError names ``where``, the layer and the field."""
        with errors_of(where):
            return _table(json.loads(text, object_pairs_hook=_without_duplicates))

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a file.  CostError names the file, the layer and the field that is wrong."""
        with errors_of(str(path)):
            text = Path(path).read_text(encoding="utf-8")
        return cls.from_json(text, where=str(path))


@contextlib.contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Turn any error about a file into a CostError that names the file and what is wrong in it."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{where}: cannot be read: {unreadable(error)}") from error
    except json.JSONDecodeError as error:
        raise CostError(f"{where}: line {error.lineno}: no JSON: {error.msg}") from error
    except RecursionError as error:
        raise CostError(f"{where}: no cost table: nested too deeply") from error
    except CostError as error:
        raise CostError(f"{where}: {error}") from error
    except ValueError as error:  # an integer with thousands of digits
        raise CostError(f"{where}: no cost table: {error}") from error


def _of_seconds(layers: list[Any]) -> dict[str, Any]:
    """Return the file's content for a list of layers that may have only seconds; all else costs nothing."""
    free = {"latency_s": 0.0, "bytes_per_s": UNLIMITED}
    nothing = {f.name: 0 for f in fields(LayerCosts) if f.default == 0 and f.name not in _OPTIONAL}
    listed = [{**nothing, **layer} if isinstance(layer, dict) else layer for layer in layers]
    return {"version": VERSION, "source": "edited", "link": free, "layers": listed}


def _table(content: object) -> CostTable:
    content = _of_seconds(content) if isinstance(content, list) else content
    known = {f.name for f in fields(CostTable)} | {"version"}
    content = _object(content, "the file", known, required={"version", "source", "link", "layers"})
    if content["version"] != VERSION or isinstance(content["version"], bool):
        raise CostError(f"version: this program reads version {VERSION}, got {content['version']!r}")
    op_seconds = content.get("op_seconds", {})
    _expect(isinstance(content["layers"], list), "layers: expected a list", content["layers"])
    _expect(isinstance(op_seconds, dict), "op_seconds: expected an object", op_seconds)
    _expect(isinstance(content["source"], str), "source: expected text", content["source"])
    return CostTable(
        layers=tuple(_layer(index, layer) for index, layer in enumerate(content["layers"])),
        link=_link(content["link"]),
        source=content["source"],
        device=content.get("device", ""),
        assumptions=check_texts("assumptions", content.get("assumptions", ())),
        notes=check_texts("notes", content.get("notes", ())),
        op_seconds=op_seconds,
        rows=content.get("rows"),
    )


def _written(layer: LayerCosts) -> dict[str, Any]:
    return {name: value for name, value in asdict(layer).items() if _LEFT_OUT.get(name, ...) != value}


def _layer(index: int, content: object) -> LayerCosts:
    named = isinstance(content, dict) and isinstance(content.get("name"), str) and content["name"]
    where = f"layer {index} ({content['name']})" if named else f"layer {index}"  # type: ignore[index]
    names = {f.name for f in fields(LayerCosts)}
    content = _object(content, where, names, required=names - set(_OPTIONAL))
    values = {name: value for name, value in content.items() if value is not None}
    for name in names - set(_OPTIONAL) | {"weight_grad_bytes", "summand_bytes", *_RECOMPUTED} & values.keys():
        _number(f"{where}: {name}", content[name])
    _expect(
        isinstance(values.get("compiled", False), bool),
        f"{where}: compiled: expected a bool",
        values.get("compiled"),
    )
    _expect(isinstance(values.get("name", ""), str), f"{where}: name: expected text", values.get("name"))
    for name, kind in (("inputs", int), ("occupancy", float)):
        if name in values:
            values[name] = _numbers(f"{where}: {name}", values[name], kind)
    if "tied" in values:
        pairs = [_numbers(f"{where}: tied", pair, float) for pair in _list(f"{where}: tied", values["tied"])]
        _expect(all(len(pair) == 2 for pair in pairs), f"{where}: tied: expected [layer, bytes]", pairs)
        values["tied"] = tuple(pairs)
    if "occupancy" in values and len(values["occupancy"]) != 3:
        raise CostError(f"{where}: occupancy: expected the shares of F, dO and dW, got {values['occupancy']}")
    with errors_of(f"layer {index}"):
        return LayerCosts(**values)


def _link_object(link: Link) -> dict[str, Any]:
    """Return what the file has of a link: no field that says nothing."""
    content = asdict(link)
    if math.isinf(link.bytes_per_s):
        content["bytes_per_s"] = UNLIMITED
    if not link.machines:
        del content["machines"], content["cores"]
    for name in set(RUNTIME) - link.runtime.keys():
        del content[name]
    if link.near is not None:
        content["near"] = _link_object(link.near)
    return {name: value for name, value in content.items() if value not in ((), None)}


def _link(content: object) -> Link:
    required = {"latency_s", "bytes_per_s"}
    content = _object(content, "link", {f.name for f in fields(Link)}, required)
    link = content | {"speeds": _numbers("link: speeds", content.get("speeds", []), float)}
    for name in ("machines", "groups"):
        link[name] = tuple(int(n) for n in _numbers(f"link: {name}", content.get(name, []), int))
    if content.get("near") is not None:
        with errors_of("near"):
            link["near"] = _link(content["near"])
    if link["bytes_per_s"] == UNLIMITED:
        link["bytes_per_s"] = math.inf
    else:
        _number("link: bytes_per_s", link["bytes_per_s"])
    _number("link: latency_s", link["latency_s"])
    for name in ("overhead_s_per_byte", *RUNTIME):
        _number(f"link: {name}", link.get(name, 0.0))
    with errors_of("link"):
        return Link(**link)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise CostError(f"key {key!r} is there twice in one object")
        out[key] = value
    return out


def _object(content: object, where: str, known: set[str], required: set[str]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CostError(f"{where}: expected an object, got {content!r:.80}")
    if unknown := sorted(content.keys() - known):
        raise CostError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if missing := sorted(required - content.keys()):
        raise CostError(f"{where}: {missing[0]} is missing")
    return content


def check_texts(key: str, value: Any) -> tuple[str, ...]:
    """Return the texts in a list.  CostError names the key if it is no list of texts."""
    texts = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    _expect(texts, f"{key}: expected a list of texts", value)
    return tuple(value)


def _list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise CostError(f"{where}: expected a list of numbers or null, got {value!r:.80}")
    return value


def _numbers(where: str, value: object, kind: type) -> tuple[float, ...]:
    for item in _list(where, value):
        if not is_number(item) or (kind is int and not isinstance(item, int)):
            raise CostError(f"{where}: expected a list of numbers or null, got {item!r:.80} in it")
    return tuple(_list(where, value))


def _number(where: str, value: object) -> None:
    _expect(is_amount(value), f"{where}: must be a finite number that is not negative", value)


def _expect(good: bool, what: str, value: object) -> None:
    if not good:
        raise CostError(f"{what}, got {value!r:.80}")


@dataclass(frozen=True)
class GainTable:
    """Holds the ``gains`` that :func:`tf_ooo.plan` takes for the schedule ``multi_stream``.

    Attributes:
        saved_s: ``{(region, layer): seconds}``; a region is ``"dO:5"``, or ``"F:3"`` for the next step's
            forward.  Negative if the two slow each other down.
        device: what was measured, in words.
        notes: what else a reader should know.
        alone_s: ``{"dW:4": seconds}``, the time of parts of the step that run alone, if measured.
        calculated: the pairs of ``saved_s`` that were not measured.
        launch_s: seconds that a kernel takes longer outside of CUDA graphs; None: not measured.

    Raises:
        CostError: an unknown region, or seconds that are no number.
    """

    saved_s: Gains
    device: str = ""
    notes: tuple[str, ...] = field(default=())
    alone_s: Mapping[str, float] = field(default_factory=dict)
    calculated: frozenset[tuple[str, int]] = frozenset()
    launch_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("saved_s", "alone_s"):
            if not isinstance(getattr(self, name), Mapping):
                raise CostError(f"gains: {name}: expected a map, got {getattr(self, name)!r:.80}")
        check_texts("gains: notes", self.notes)
        for task, seconds in self.alone_s.items():
            if not isinstance(task, str) or not _TASK.fullmatch(task):
                raise CostError(f"gains: alone_s must name 'dO:5', 'dW:5' or 'F:5', got {task!r}")
            _check_s(f"alone_s of {task}", seconds)
        if self.launch_s is not None:
            _check_s("launch_s", self.launch_s)
        for key, saved_s in self.saved_s.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise CostError(f"gains: keys are pairs such as ('dO:5', 6), got {key!r:.80}")
            region, layer = key
            if not isinstance(region, str) or not _REGION.fullmatch(region):
                raise CostError(f"gains: region must be 'dO:5' or 'F:3', got {region!r}")
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise CostError(f"gains: {region}: layer must be a number from 0, got {layer!r}")
            if not is_number(saved_s) or not is_amount(abs(saved_s)):
                raise CostError(
                    f"gains: {region} beside dW:{layer}: saved_s must be finite, got {saved_s!r:.80}"
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, one pair per line; return its path."""
        rows = []
        for key in sorted(self.saved_s):
            row = {"region": key[0], "layer": key[1], "saved_s": self.saved_s[key]}
            rows.append({**row, "measured": False} if key in self.calculated else row)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head: dict[str, Any] = {"version": VERSION, "device": self.device, "notes": list(self.notes)}
        if self.launch_s is not None:
            head["launch_s"] = self.launch_s
        if self.alone_s:
            head["alone_s"] = dict(self.alone_s)
        text = json.dumps(head)[:-1] + f', "gains": [\n{lines}\n]}}\n'
        target = Path(path)
        target.write_text(text, encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GainTable:
        """Read a file.  CostError names the file and what is wrong in it."""
        with errors_of(str(path)):
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            saved_s, calculated = _rows(content)
            alone_s = content.get("alone_s", {})
            if not isinstance(alone_s, dict):
                raise CostError("gains: alone_s: expected a map from tasks to seconds")
            return cls(
                saved_s, str(content.get("device", "")), check_texts("notes", content.get("notes", ())),
                alone_s, calculated, content.get("launch_s"),
            )  # fmt: skip


def _check_s(what: str, seconds: object) -> None:
    if not is_amount(seconds):
        raise CostError(f"gains: {what} must be finite seconds from 0, got {seconds!r:.80}")


def _rows(content: object) -> tuple[dict[tuple[str, int], float], frozenset[tuple[str, int]]]:
    """Return (seconds by pair, the pairs marked as not measured)."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CostError(f"no table of gains: version must be {VERSION}")
    rows = content.get("gains")
    if not isinstance(rows, list):
        raise CostError("gains: expected a list")
    saved_s: dict[tuple[str, int], float] = {}
    calculated = set()
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() - {"measured"} != _ROW:
            raise CostError(f"gains: entry {number} must have region, layer and saved_s, got {row!r:.80}")
        key = (row["region"], row["layer"])
        if not isinstance(key[0], str) or not isinstance(key[1], int):
            raise CostError(
                f"gains: entry {number}: expected a text and a number for region and layer, got {key}"
            )
        if key in saved_s:
            raise CostError(f"gains: {key[0]} beside dW:{key[1]} is there twice")
        saved_s[key] = row["saved_s"]
        if not row.get("measured", True):
            calculated.add(key)
    return saved_s, frozenset(calculated)
