"""Checks that kept rows say what README and the page claim."""

import re
from pathlib import Path

import pytest

from benchmarks.kept import read
from benchmarks.report.tables import tables_of, with_tables

ROOT = Path(__file__).parents[2]
PAGE, README, GPU = (ROOT / name for name in ("docs/benchmarks.md", "README.md", "docs/gpu.md"))
# A gain or an interval: two digits behind the point.
CLAIM = re.compile(r"(?<![\w.=])\d\.\d\d(?![\d.])")


@pytest.fixture(scope="module")
def tables():
    return tables_of(read())


@pytest.mark.parametrize("path", [PAGE, README, GPU], ids=lambda path: path.name)
def test_tables_are_made_from_rows(path, tables):
    text = path.read_text()
    assert with_tables(text, tables) == text, (
        f"{path.name} says something else than the rows: python -m benchmarks report --page {path.name}"
    )


def test_no_number_of_the_readme_lacks_a_row(tables):
    supported = set(CLAIM.findall(" ".join(tables.values())))
    sections = re.split(r"^## ", README.read_text(), flags=re.MULTILINE)
    of_versions = ("Try it", "Supported versions")  # such as 3.11
    claimed = set(CLAIM.findall(" ".join(text for text in sections if not text.startswith(of_versions))))
    assert claimed, "the table is empty"
    assert not claimed - supported


def test_a_made_up_number_would_be_seen(tables):
    assert CLAIM.findall("steps are 1.59 times as fast, TensorFlow 2.21.0, 1.123") == ["1.59"]
