"""Each mode's guide has all its options; pages are short, and links of the README lead somewhere."""

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
USER_PAGES = "README.md CONTRIBUTING.md docs/*.md docs/details/*.md docs/benchmarks/*.md"


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


# Tables that are made from kept rows are not counted.
MADE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)


# Lower a number when pages become shorter; a commit that raises one says why.
@pytest.mark.parametrize(("pages", "budget"), [(USER_PAGES, 25_000), ("docs/design/*.md", 10_750)])
def test_pages_stay_within_their_budget_of_words(pages, budget):
    texts = {page: MADE.sub("", page.read_text()) for name in pages.split() for page in ROOT.glob(name)}
    words = {page: len(text.split()) for page, text in texts.items()}
    assert 0 < sum(words.values()) <= budget, sorted(words, key=words.__getitem__)[-3:]
