"""Options of the benchmarks' commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click

from tf_ooo.bench.shared.kept import keep_in


class _NewFile(click.Path):
    """A file to write, in a folder that is there: what was measured is not lost in the end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}", param, ctx)
        return path


FILE = _NewFile(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

COUNT = click.IntRange(1)


class _Positive(click.ParamType):  # type: ignore[type-arg]
    """A number above 0, and no more than ``most``; click's ranges let NaN through."""

    name = "number"

    def __init__(self, most: float = math.inf) -> None:
        self._most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As a float."""
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"{value} is no number above 0", param, ctx)
        if number > self._most:
            self.fail(f"{value} is more than {self._most:g}: a worker computes with one thread", param, ctx)
        return number


POSITIVE = _Positive()
# Of a core, for one worker.
CORES = _Positive(1.0)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``, and ``--keep``, of which the command itself hears nothing."""
    keep = click.option(
        "--keep", type=FOLDER, callback=keep_in, expose_value=False,
        help="Folder in which this run's rows stay, in a new file: docs/benchmarks/rows.",
    )  # fmt: skip
    return click.option("--json", "json_file", type=FILE, help="File for the rows.")(keep(function))


def quick_option(text: str, expose: bool = True, **shorter: object) -> Decorator:
    """``--quick``: ``text`` says what is left.

    ``shorter`` are the defaults of other options with it: what is given beside it stays.  ``expose``: the
    command itself is told of it.
    """

    def shorten(ctx: click.Context, _: click.Parameter, quick: bool) -> bool:
        if quick:
            ctx.default_map = {**(ctx.default_map or {}), **shorter}
        return quick

    return click.option(
        "--quick", is_flag=True, is_eager=True, callback=shorten, expose_value=expose, help=text
    )


def several(name: str, kind: click.IntRange | click.Choice[str], **settings: Any) -> Decorator:
    """An option that can be given several values, see :class:`SeveralValues`."""
    value = f"[{'|'.join(kind.choices)}]" if isinstance(kind, click.Choice) else "N"
    return click.option(name, multiple=True, type=kind, metavar=f"{value}...", **settings)


class SeveralValues(click.Command):
    """A command whose options made with :func:`several` take their values in a row: ``--devices 2 3 4``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As in click, after each of several values has got its option's name."""
        lists = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, list(repeated(args, lists)))


def repeated(arguments: list[str], lists: Collection[str]) -> Iterator[str]:
    """``--devices 2 3`` as ``--devices 2 --devices 3``, for the options named in ``lists``."""
    option, values = None, 0
    for text in arguments:
        if text.startswith("-"):
            option, values = text, 0
        elif option in lists:
            values += 1
            if values > 1:
                yield str(option)
        yield text
