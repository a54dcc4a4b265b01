"""Reads what the commands are given: costs, schedules, amounts with units, policies' options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tf_ooo.costs.communication import parse_bytes, parse_link
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OOOError, OptionsError
from tf_ooo.options.base import choice
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.schedule_file import read_schedule
from tf_ooo.planning.policies import POLICIES


class _Amount(click.ParamType):  # type: ignore[type-arg]
    """Reads an option's value with one of the library's parsers."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except OOOError as error:
            self.fail(str(error), param, ctx)


def _stages(text: str) -> list[str] | list[list[str]]:
    """Read ``a,b``, where stages begin, or ``a,b;c,d``, the layers of each stage."""
    groups = [[name.strip() for name in group.split(",")] for group in text.split(";")]
    return groups if len(groups) > 1 else groups[0]


def _speeds(text: str) -> tuple[float, ...]:
    """Read ``1,1,0.5``, the speed of each device. CostError as of :class:`Link`."""
    try:
        return Link(speeds=tuple(float(part) for part in text.split(","))).speeds
    except ValueError as error:
        raise CostError(f"speeds {text!r:.80}: expected numbers such as 1,1,0.5") from error


def _limits(text: str) -> int | tuple[int, ...]:
    """Read ``16GiB``, for all devices, or ``16GiB,8GiB``, one for each."""
    limits = tuple(map(parse_bytes, text.split(",")))
    return limits if len(limits) > 1 else limits[0]


def _near(text: str) -> tuple[int, Link]:
    """Read ``4x600GB/s,5us``: how many devices in turn are near, and their link. CostError: it is none."""
    count, times, link = text.partition("x")
    if not times or not count.strip().isdecimal() or int(count) < 2:
        raise CostError(
            f"near {text!r:.80}: expected devices of a group and their link, such as 4x600GB/s,5us"
        )
    return int(count), parse_link(link)


LINK = _Amount("link", parse_link)
NEAR = _Amount("near", _near)
SPEEDS = _Amount("speeds", _speeds)
STAGES = _Amount("stages", _stages)
BYTES = _Amount("bytes", _limits)


def with_devices(
    table: CostTable,
    devices: int,
    link: Link | None,
    near: tuple[int, Link] | None,
    speeds: tuple[float, ...] | None,
) -> CostTable:
    """Return the table with the link, the nearer links and the speeds of so many devices that are given.

    CostError: messages within groups take time, but none between them.
    """
    between = table.link if link is None else link
    if near is not None:
        if between.free == between:
            raise CostError("--near needs --link: how groups of near devices are linked with each other")
        groups = tuple(device // near[0] for device in range(devices))
        between = dataclasses.replace(between, near=near[1], groups=groups)
    return dataclasses.replace(
        table, link=between if speeds is None else dataclasses.replace(between, speeds=speeds)
    )


def load_schedule(path: Path) -> Schedule:
    """Return the schedule of a text file; ScheduleError names the file and the line."""
    file = read_schedule(path)
    known = dict.fromkeys(mode for policy in POLICIES.values() for mode in policy.modes)
    try:
        choice(known)("mode", file.schedule.mode)
    except OptionsError as error:
        raise file.error(str(error), "mode") from error
    return file.schedule


def policy_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return ``("group=2",)`` as ``{"group": 2}``; OptionsError names what no policy offers."""
    options: dict[str, Any] = {}
    offered = sorted({name for policy in POLICIES.values() for name in policy.text_options})
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise OptionsError(f"--option {text!r}: expected NAME=VALUE, for example group=2")
        if name not in offered:
            raise OptionsError(f"--option {name}: no schedule offers it; offered: {', '.join(offered)}")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    words = {"true": True, "yes": True, "false": False, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
