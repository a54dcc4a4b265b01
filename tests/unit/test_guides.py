"""Each mode's guide has all its options; the README is short and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf_ooo.modes.table import MODES

ROOT = Path(__file__).parents[2]
GUIDES = {
    "single_device": "single_gpu", "data_parallel": "data_parallel", "pipeline": "pipeline",
    "layerpipe": "layerpipe",
}  # fmt: skip
README = (ROOT / "README.md").read_text()


def test_every_mode_has_a_guide():
    assert GUIDES.keys() == MODES.keys()


@pytest.mark.parametrize("mode", MODES)
def test_every_option_is_in_the_table(mode):
    page = (ROOT / "docs" / f"{GUIDES[mode]}.md").read_text()
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for first in firsts for name in re.findall(r"`(\w+)`", first)}
    assert set(MODES[mode].defaults()) <= listed


def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


def test_links_of_the_readme():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
