from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.stages import bounds_of, check_stages
from tf_ooo.rewriting.parts import layer_of_part

NAMES = ["stem", "block_1/a", "block_1/b", "block_2/a", "head"]


@pytest.mark.parametrize(
    ("stages", "bounds"),
    [
        (["stem", "block_2", "head"], ((0, 2), (3, 3), (4, 4))),
        ([["stem"], ["block_1", "block_2"], ["head"]], ((0, 0), (1, 3), (4, 4))),
        ([["block_1/a", "stem"], ["block_2/a", "block_1/b", "head"]], ((0, 1), (2, 4))),
        ([NAMES], ((0, 4),)),
    ],
)
def test_both_ways(stages, bounds):
    check_stages("stages", stages)
    assert bounds_of(NAMES, stages) == bounds


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["stem"], ["blok_1"]], r"unknown layer 'blok_1'.*; known: stem, "),
        (
            [["stem", "block_1"], ["block_1/b", "block_2", "head"]],
            "'block_1/b' is there twice, in stage 0 and in",
        ),
        ([["stem"], ["block_1", "head"]], "layer 'block_2/a' is in no stage: each"),
        ([["stem"], ["block_1"]], "layer 'block_2/a' is in no stage nor are 1 more"),
        (
            [["block_1", "block_2", "head"], ["stem"]],
            "'block_1/a' of stage 0 stands behind 'stem' of stage 1",
        ),
        (
            [["stem", "head"], ["block_1", "block_2"]],
            "'head' of stage 0 stands behind 'block_2/a' of stage 1",
        ),
        (["block_1", "head"], "the first has to be 'stem'"),
        (["stem", "head", "block_2"], "in the model's order"),
    ],
)
def test_what_is_refused(stages, message):
    with pytest.raises(OptionsError, match=f"^stages.*{message}"):
        bounds_of(NAMES, stages)


@pytest.mark.parametrize(
    "wrong", [[], [[]], ["a", "a"], [["a", "a"]], "a", [3], [["a"], "b"], [["a"], [3]], [""]]
)
def test_what_are_no_stages(wrong):
    with pytest.raises(
        OptionsError, match=r"^stages=.* is not accepted; accepted: None, different layers' names"
    ):
        check_stages("stages", wrong)


def test_what_stays_whole():
    units = ((0, 0), (1, 2), (3, 3), (4, 4))
    assert bounds_of(NAMES, [["stem"], NAMES[1:]], units) == ((0, 0), (1, 4))
    for stages in (["stem", "block_1/b"], [NAMES[:2], NAMES[2:]]):
        with pytest.raises(OptionsError, match="no cut is possible at 'block_1/b'"):
            bounds_of(NAMES, stages, units)


def test_parts_go_with_their_layer_unless_they_are_named():
    names = ["before dense (2)", "before dense (1)", "dense", "behind dense (1)", "block/dense"]
    assert [layer_of_part(name) for name in names] == ["dense", "dense", None, "dense", None]
    with pytest.raises(OptionsError, match="'before dense .2.' is in no stage"):
        bounds_of(names, [["block/dense"]], layer_of_part=layer_of_part)
    # "dense" is what the last one ends with, too: it stands for both.
    assert bounds_of(names, [["dense"]], layer_of_part=layer_of_part) == ((0, 4),)
    names[-1] = "other"
    assert bounds_of(names, [["dense"], ["other"]], layer_of_part=layer_of_part) == ((0, 3), (4, 4))
    divided = [["before dense (2)"], ["dense"], ["behind dense (1)", "other"]]
    assert bounds_of(names, divided, layer_of_part=layer_of_part) == ((0, 0), (1, 2), (3, 4))


@given(st.data(), st.integers(1, 12))
def test_whatever_is_cut_in_order_is_taken(data, count):
    """Lists of names, and the names at which stages begin, say the same; any other order is refused."""
    names = [f"layer_{i}" for i in range(count)]
    starts = sorted({0, *data.draw(st.lists(st.integers(0, count - 1), max_size=count))})
    bounds = tuple((a, b - 1) for a, b in itertools.pairwise([*starts, count]))
    groups = [data.draw(st.permutations(names[a : b + 1])) for a, b in bounds]
    assert bounds_of(names, groups) == bounds_of(names, [names[a] for a in starts]) == bounds
    shuffled = data.draw(st.permutations(groups))
    if shuffled != groups:
        with pytest.raises(OptionsError, match="stands behind"):
            bounds_of(names, shuffled)
    left_out = data.draw(st.sampled_from(names))
    fewer = [[name for name in group if name != left_out] for group in groups]
    if count > 1:
        with pytest.raises(OptionsError, match=f"layer '{left_out}' is in no stage"):
            bounds_of(names, [group for group in fewer if group])
