"""Schedules that are none: a text that was edited, cut off, or is another one's."""

from __future__ import annotations

from pathlib import Path

from tests.harness.drawing import Draw
from tests.malformed.case import Case, Lost
from tests.malformed.costs import good_text, layers

POLICIES = ("1f1b", "gpipe", "zb_h1", "fast_forward", "layerpipe", "in_order", "search")


def drawn_schedules(draw: Draw) -> Case:
    """A file for ``Schedule.from_text``, simulated, in Python or by ``tf-ooo simulate``."""
    text, content, named = draw.choice((_task, _task, _line, _line, _other))(draw)
    by_command = draw.chance(0.5)
    return Case("schedules", text, named, lambda folder: _simulate(folder, content, by_command))


def _good(draw: Draw) -> str:
    import tf_ooo

    policy = draw.choice(POLICIES)
    mode = {"layerpipe": "layerpipe", "search": "data_parallel", "in_order": "single_device"}.get(policy)
    several = 2 if mode is None or mode != "single_device" else 1
    batches = 4 if mode is None else 1
    return tf_ooo.plan(
        layers=layers(), devices=several, microbatches=batches, schedule=policy, mode=mode
    ).to_text()


def _simulate(folder: Path, content: bytes, by_command: bool) -> None:
    from tests.malformed.commands import invoke
    from tf_ooo.cli.inputs import load_schedule
    from tf_ooo.costs.table import CostTable
    from tf_ooo.planning.simulation.simulator import simulate

    schedule, costs = folder / "schedule.txt", folder / "costs.json"
    schedule.write_bytes(content)
    costs.write_text(good_text())
    try:
        if by_command:
            invoke(folder, "simulate", schedule, costs)
        else:
            simulate(load_schedule(schedule), CostTable.load(costs), steps=2)
    finally:
        if schedule.read_bytes() != content:
            raise Lost("the file has been changed")


def _task(draw: Draw) -> tuple[str, bytes, list[list[str]]]:
    """One task of a lane: missing, twice, elsewhere, of a kind, stage or micro-batch that there is not."""
    lines = _good(draw).splitlines()
    numbers = [number for number, line in enumerate(lines) if line.startswith("lane ")]
    number = draw.choice(numbers)
    head, _, tasks = lines[number].partition(": ")
    words = tasks.split()
    place, other = draw.below(len(words)), draw.below(len(words))
    word = words[place]
    kind, _, rest = word.partition(":")
    how = draw.choice(
        ("missing", "twice", "moved", "kind", "stage", "microbatch", "garbage", "in another lane")
    )
    elsewhere = draw.choice(numbers)
    if how == "missing":
        del words[place]
    elif how == "twice":
        words.insert(other, word)
    elif how == "moved":
        words.insert(other, words.pop(place))
    elif how == "in another lane":
        lines[elsewhere] += f" {word}"
    else:
        words[place] = {
            "kind": f"{draw.choice(('X', 'dw', 'f', 'W', 'dOO', ''))}:{rest}",
            "stage": f"{kind}:{draw.choice(('99', '-1', '1.5', '', 'a', '9' * 30))}",
            "microbatch": f"{word.partition('@')[0]}@{draw.choice(('99', '-1', 'x', '', '9' * 30))}",
            "garbage": draw.choice(("F", "::", "F:0@0@0", "F=0", "ü:0", "F:0,", "dO:1.5.5", "lane")),
        }[how]
    lines[number] = (
        f"{head}: {' '.join(words)}" if number != elsewhere or how != "in another lane" else lines[number]
    )
    mention = [word, words[place] if place < len(words) else word, kind, f"line {number + 1}"]
    return f"{word} {how}", "\n".join(lines).encode(), [[part for part in mention if part]]


def _line(draw: Draw) -> tuple[str, bytes, list[list[str]]]:
    """One line: missing, twice, misspelt, with another value, cut off."""
    lines = _good(draw).splitlines()
    number = draw.below(len(lines))
    line = lines[number]
    key = line.split(" ")[0]
    how = draw.choice(("missing", "twice", "misspelt", "value", "cut", "more"))
    changed = {
        "missing": [],
        "twice": [line, line],
        "misspelt": [draw.misspelt(key) + line[len(key) :]],
        "value": [f"{key} {draw.choice(('0', '-1', 'x', '1e9', '99999999999', 'fast', 'nan', ''))}"],
        "cut": [line[: draw.below(len(line))]],
        "more": [line + draw.choice((" 3", " x", ":", "\x00", " # no comment"))],
    }[how]
    content = [*lines[:number], *changed, *lines[number + 1 :]]
    named = [key, f"line {number + 1}", f"line {number + 2}", "missing", "unknown op"]
    return f"line {line[:40]!r} {how}", "\n".join(content).encode(), [named]


def _other(draw: Draw) -> tuple[str, bytes, list[list[str]]]:
    good = _good(draw).encode()
    spoiled: tuple[tuple[str, bytes], ...] = (
        ("nothing", b""),
        ("binary", draw.bytes(2000)),
        ("UTF-16", good.decode().encode("utf-16")),
        ("JSON", good_text().encode()),
        ("header only", good.splitlines()[0]),
        (
            "mode unknown",
            b"\n".join(b"mode fast" if line[:5] == b"mode " else line for line in good.splitlines()),
        ),
        ("another version", good.replace(b"v1", b"v2", 1)),
        ("of other layers", good.replace(b":5", b":7").replace(b"5-5", b"5-7")),
        ("zeros", bytes(1000)),
        ("100,000 lanes", good + b"".join(b"lane %d 0: F:0\n" % n for n in range(50, 100_050))),
    )
    text, content = draw.choice(spoiled)
    return text, content, [["schedule.txt", "line", "layer", "missing", "unknown", "mode"]]
