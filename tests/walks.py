"""Finds the files of ours that a fit goes through, and keeps the table of them in docs/design/house.md."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("tf_ooo", "grappler_passes", "keras_callbacks"))
PAGE = ROOT / "docs/design/house.md"
# With this variable set, tests of walks write the table instead of reading it.
WRITE = "TF_OOO_WRITE_WALKS"
MODES = ("One device", "Pipeline", "Horovod")
TABLE = re.compile(r"(<!-- table: walks -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
# Bodies of functions have this flag, those of modules and classes do not.
OF_FUNCTIONS = 0x2


def files_of(fit: Callable[[], object]) -> list[str]:
    """Return the files whose functions ``fit`` calls on its thread, in the order in which it reaches them."""
    walked: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_flags & OF_FUNCTIONS:
            walked[str(Path(code.co_filename).relative_to(ROOT))] = None

    sys.setprofile(note)
    try:
        fit()
    finally:
        sys.setprofile(None)
    return list(walked)


def table(page: Path = PAGE) -> dict[str, list[str]]:
    """Return for each mode its files in order, as the page lists them."""
    listing = TABLE.search(page.read_text())
    rows = (
        [line.strip("| ").split(" | ") for line in listing.group().splitlines() if "`" in line]
        if listing
        else []
    )
    places = {mode: {row[0].strip("`"): row[1 + i].strip() for row in rows} for i, mode in enumerate(MODES)}
    return {
        mode: sorted((name for name, place in at.items() if place.isdigit()), key=lambda name: int(at[name]))
        for mode, at in places.items()
    }


def write(mode: str, files: Sequence[str], page: Path = PAGE) -> None:
    """Put one mode's files into the page's table.

    A fit's measurements decide which ways it goes, so files that earlier fits went through stay below.
    """
    listed = table(page)
    kept = [name for name in listed[mode] if name not in files and (ROOT / name).exists()]
    walks = listed | {mode: [*files, *kept]}
    names = dict.fromkeys(name for mode in MODES for name in walks[mode])
    lines = [f"| File | {' | '.join(MODES)} |", "| --- | ---: | ---: | ---: |"]
    for name in names:
        places = [str(walks[of].index(name) + 1) if name in walks[of] else "-" for of in MODES]
        lines.append(f"| `{name}` | {' | '.join(places)} |")
    text = "\n" + "\n".join(lines) + "\n\n"
    page.write_text(TABLE.sub(lambda found: found.group(1) + text, page.read_text()))


def check(mode: str, files: Sequence[str], most: int) -> None:
    """Assert that a walk has at most so many files and that the page lists them; or write them there."""
    if WRITE in os.environ:
        write(mode, files)
    assert 0 < len(files) <= most
    unlisted = sorted(set(files) - set(table()[mode]))
    assert not unlisted, f"with {WRITE}=1 these tests write the table anew: it lacks {unlisted}"
