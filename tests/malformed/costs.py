"""Costs that are none: files that were edited, cut off, or are something else, and wrong values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.harness.drawing import Draw
from tests.malformed.case import Case, Lost, written

WRONG: tuple[Any, ...] = (
    *(None, True, -1.0, -1e-300, math.nan, math.inf, -math.inf, 10**400),
    *("3", "", [], [1.0], {}, {"s": 1}, "ü" * 99),
)
_Path = tuple[str | int, ...]


def layers() -> list[Any]:
    import tf_ooo

    return [
        tf_ooo.LayerCosts(1e-3 * (1 + i % 3), 2e-3, 1e-3, 1e-4, 3e6, 1e6, 1e5, 2e6, name=f"block {i}")
        for i in range(6)
    ]


def good_text() -> str:
    """A cost table with every field."""
    from tf_ooo.costs import Link
    from tf_ooo.costs.table import CostTable

    seconds = {"dense/MatMul": 1e-4, "dense/BiasAdd": 2e-5}
    return CostTable(layers(), Link(1e-5, 1e9), "edited", "a device", ("one",), ("two",), seconds).to_json()


def gains_text() -> str:
    rows = [{"region": f"dO:{layer}", "layer": layer + 1, "saved_s": 1e-4 * layer} for layer in range(4)]
    return json.dumps({"version": 1, "device": "d", "notes": ["n"], "alone_s": {"dW:1": 1e-3}, "gains": rows})


def drawn_costs(draw: Draw) -> Case:
    """A file of costs or gains, or costs in Python."""
    return draw.choice((_edited, _edited, _edited, _spoiled, _values, _plan))(draw)


def read(path: Path, gains: bool) -> None:
    """Read the file as its user does; then a good file in its place."""
    import tf_ooo
    from tf_ooo.costs.table import CostTable, GainTable

    load: Callable[[Path], Any] = GainTable.load if gains else CostTable.load
    before = path.read_bytes() if path.is_file() else b""
    try:
        table = load(path)
    except Exception:
        if path.is_file() and path.read_bytes() != before:
            raise Lost(f"{path} has been changed") from None
        good = path.with_name("good.json")
        good.write_text(gains_text() if gains else good_text())
        load(good)
        raise
    if not gains:
        tf_ooo.plan(layers=table, devices=2, microbatches=2, schedule="1f1b").to_text()


def file_case(draw: Draw, content: bytes, gains: bool, text: str, named: Sequence[Sequence[str]]) -> Case:
    """The content as a file, which is read in Python or by ``tf-ooo plan``."""
    from tests.malformed.commands import invoke

    name = draw.choice(("costs.json", "my costs.json", "kosten ü.json", "costs"))
    by_command = draw.chance(0.4)

    def attempt(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content)
        if not by_command:
            read(path, gains)
            return
        good = folder / "good.json"
        good.write_text(good_text())
        more = [good, "--gains", path, "--schedule", "multi_stream"] if gains else [path, "--devices", 2]
        invoke(folder, "plan", *more)

    how = "tf-ooo plan" if by_command else ("GainTable.load" if gains else "CostTable.load")
    return Case("costs", f"{how} of {text}", [[name], *named], attempt)


def _edited(draw: Draw) -> Case:
    """One key taken away, misspelt, given twice, or with another value."""
    gains = draw.chance(0.3)
    content = json.loads(gains_text() if gains else good_text())
    path = draw.choice([path for path in _paths(content) if isinstance(path[-1], str)])
    holder = _at(content, path[:-1])
    key, how = str(path[-1]), draw.choice(("without", "misspelt", "wrong", "wrong", "wrong", "twice"))
    where = f"{'.'.join(map(str, path))}"
    named = [key.split("/")[-1]]
    if how == "without":
        del holder[key]
    elif how == "misspelt":
        wrong = draw.misspelt(key)
        holder[wrong] = holder.pop(key)
        named.append(wrong)
    else:
        holder[key] = draw.choice(WRONG)
    text = json.dumps(content)
    if how == "twice":
        text = text.replace(f'"{key}": ', f'"{key}": 0, "{key}": ', 1)
    # A row of gains is shown as a whole.
    named += [f"entry {path[1]}"] if gains and len(path) > 2 else []
    named += ["dO:", "version", "gains"] if gains else []
    shown = f"{where} = {holder.get(key)!r:.40}" if how == "wrong" else f"{where} {how}"
    return file_case(draw, text.encode(), gains, shown, [named])


def _paths(content: Any, here: _Path = ()) -> list[_Path]:
    items = list(content.items()) if isinstance(content, dict) else []
    items += list(enumerate(content)) if isinstance(content, list) else []
    return [path for key, value in items for path in [(*here, key), *_paths(value, (*here, key))]]


def _at(content: Any, path: _Path) -> Any:
    for key in path:
        content = content[key]
    return content


def _spoiled(draw: Draw) -> Case:
    """Cut off, of another encoding, nested too deeply, or no such thing at all."""
    gains = draw.chance(0.3)
    good = (gains_text() if gains else good_text()).encode()
    cut = draw.below(len(good))
    spoiled: tuple[tuple[str, bytes], ...] = (
        (f"the first {cut} bytes", good[:cut]),
        (f"a byte exchanged at {cut}", good[:cut] + draw.bytes(1) + good[cut + 1 :]),
        ("nothing", b""),
        ("a space", b" \n"),
        ("UTF-16", good.decode().encode("utf-16")),
        ("Latin-1", good.replace(b"block", "blöck".encode("latin-1"))),
        ("random bytes", draw.bytes(3000)),
        ("100,000 brackets", b"[" * 100_000),
        ("nested objects", b'{"version": ' * 5000 + b"1" + b"}" * 5000),
        ("a list", b"[1, 2]"),
        ("a number", b"7"),
        ("null", b"null"),
        ("a text", b'"costs"'),
        ("an object without keys", b"{}"),
        ("more behind it", good + b"}"),
        ("two of them", good + good),
        ("YAML", b"version: 1\nlayers:\n  - forward_s: 1\n"),
        ("CSV", b"forward_s,output_grad_s\n1,2\n"),
        (
            "no layers",
            b'{"version": 1, "source": "edited", "link": {"latency_s": 0, "bytes_per_s": 1}, "layers": []}',
        ),
        ("another version", good.replace(b'"version": 1', b'"version": 2')),
        ("a number with 5,000 digits", good.replace(b'"version": 1', b'"version": ' + b"1" * 5000)),
        ("zeros", bytes(10_000)),
    )
    text, content = draw.choice(spoiled)
    return file_case(draw, content, gains, text, [])


def _values(draw: Draw) -> Case:
    """Costs of a layer, of a link or of a table, made in Python."""
    from tf_ooo.costs import Link
    from tf_ooo.costs.table import CostTable, GainTable

    seconds = dict.fromkeys(("forward_s", "output_grad_s", "weight_grad_s"), 1.0)
    python, usual, fields = draw.choice(
        (
            ("tf_ooo.plan(layers=[tf_ooo.LayerCosts(**given)] * 2)", seconds, _LAYER_FIELDS),
            (
                "tf_ooo.plan(layers=layers, link=Link(**given), devices=2)",
                {"latency_s": 0.0, "bytes_per_s": 1e9},
                "latency_s bytes_per_s overhead_s_per_byte send_s receive_s task_s step_s",
            ),
            (
                "CostTable(**given).to_json()",
                {"layers": layers()},
                "layers link source device assumptions notes op_seconds",
            ),
            ("GainTable(**given)", {"saved_s": {}}, "saved_s alone_s launch_s"),
        )
    )
    name = draw.choice(fields.split())
    given = {**usual, name: draw.choice(WRONG)}
    named = "gains" if "GainTable" in python else name
    classes = {"Link": Link, "GainTable": GainTable, "CostTable": CostTable, "layers": layers()}
    return written("costs", python, [[named, named.rstrip("s")]], given=given, **classes)


_LAYER_FIELDS = (
    "forward_s output_grad_s weight_grad_s update_s activation_bytes weight_bytes output_bytes "
    "weight_grad_bytes inputs occupancy name slot_bytes summand_bytes"
)
_OWNERS = {"group": "modulo", "chunks": "interleaved_1f1b", "k": "reverse_first_k"}
_ALSO_NAMED = {"devices": ["stages", "layers"], "layers": ["layer"], "k": ["reverse_first_k"]}


def _plan(draw: Draw) -> Case:
    """``tf_ooo.plan`` with an argument that is none."""
    from tf_ooo.planning.policies import POLICIES

    policy = draw.choice(list(POLICIES))
    wrong: dict[str, tuple[Any, ...]] = {
        "layers": (None, [], [1.0], "costs.json", {}, 3, [None], layers()[:1]),
        "devices": (0, -1, 1.5, "2", None, 7, 10**9, True, math.nan),
        "microbatches": (0, -3, 2.5, "4", None, True, math.inf),
        "schedule": (draw.misspelt(policy), "", None, 3, policy.upper(), [policy], {policy}),
        "mode": (draw.misspelt("pipeline"), "", 3, "auto", "PIPELINE", ["pipeline"]),
        "memory_limit_bytes": (0, -1, "16GiB", math.nan, 1, True, 1000),
        "link": (0.0, "25Gbit", {}, (1e-5, 1e9), 1e9),
        draw.misspelt("microbatches"): (2,),
        "group": (0, -1, 1.5, "2", 100, True),
        "chunks": (0, "2", 100, -1),
        "k": (-1, 1.5, 100, "3"),
    }
    name = draw.choice(list(wrong))
    any_schedule = name in ("memory_limit_bytes", "devices") and draw.chance(0.5)
    schedule = policy if any_schedule else _OWNERS.get(name, "1f1b")
    named = [[name, *_ALSO_NAMED.get(name, [])]]
    given = {"schedule": schedule, name: draw.choice(wrong[name])}
    return written("costs", "plan(**given)", named, plan=_plan_and_another, given=given)


def _plan_and_another(**given: Any) -> None:
    import tf_ooo

    usual: dict[str, Any] = {"layers": layers(), "devices": 2, "microbatches": 4, "schedule": "1f1b"}
    try:
        tf_ooo.plan(**{**usual, **given})
    finally:
        tf_ooo.plan(**usual)
