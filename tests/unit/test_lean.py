"""A fragment and a line too many are found; sentences and rooms within their budget are not."""

import ast

import pytest

from tests import lean

SENTENCES = """\
\"\"\"Where a step is compiled, nothing is moved.\"\"\"
# Those are kept.
value = 1  # What stands behind code is not looked at.


def read():
    \"\"\"Return what was read: of each rank, as it came.\"\"\"
    # The first line says it.
    # What follows goes on.
"""


@pytest.mark.parametrize(
    "fragment",
    [
        "Of each rank, the last one.",
        "What was read.",
        "As the user has it.",
        "Where the op runs: a device.",
        "Where values leave, and which are kept.",
        "Those that are not there.",
        "Whether it is there.",
    ],
)
@pytest.mark.parametrize("place", ['"""{}"""', "# {}", 'def read():\n    """{}"""', 'READ = 1\n"""{}"""'])
def test_planted_fragments_are_found(tmp_path, place, fragment):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "sentences.py").write_text(SENTENCES)
    assert lean.fragments(tmp_path, ("room",)) == []
    (tmp_path / "planted.py").write_text(text := place.format(fragment))
    line = 1 + text[: text.index(fragment)].count("\n")
    assert lean.fragments(tmp_path, ("room", "planted.py")) == [f"planted.py:{line}: no sentence: {fragment}"]


def test_planted_growth_is_found(tmp_path):
    (tmp_path / "house" / "room").mkdir(parents=True)
    (tmp_path / "house" / "hall.py").write_text("1\n2\n")
    (tmp_path / "house" / "room" / "bed.py").write_text("1\n2\n3\n")
    rooms = {"house": 2, "house/room house/cellar": 3}
    assert lean.over_budget(tmp_path, rooms) == []
    (tmp_path / "house" / "room" / "shelf.c").write_text("1\n2\n")
    assert lean.over_budget(tmp_path, rooms) == [
        "house/room house/cellar: 5 lines, 2 above its budget in pyproject.toml"
    ]


def test_few_parameters_are_typed_any():
    """A parameter typed Any says nothing: at most 5%; ``object`` stands where nothing of it is used."""
    trees = (
        ast.parse(path.read_text())
        for package in ("grappler_passes", "tf_ooo", "keras_callbacks")
        for path in (lean.ROOT / package).rglob("*.py")
    )
    arguments = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.arg)]
    types = [ast.unparse(node.annotation) for node in arguments if node.annotation is not None]
    assert len(types) > 5000
    assert types.count("Any") <= 0.05 * len(types)
