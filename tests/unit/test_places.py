"""Ops in a user's words."""

from __future__ import annotations

from grappler_passes.graph.dependencies import WOULD_CLOSE_A_CYCLE
from grappler_passes.passes.apply_plan import CLOSES_A_CYCLE
from grappler_passes.passes.base import Note
from tf_ooo.costs.places import Places, first_of
from tf_ooo.rewriting.result import told
from tf_ooo.units import count_text

PLACES = Places({"a/conv/MatMul": "dO of conv", "a/conv/Sum": "dW of conv", "a/conv/Sum_1": "dW of conv"})


def test_ops_are_listed_by_their_tasks_each_once():
    assert PLACES.listed(["a/conv/Sum", "a/conv/Sum_1", "a/conv/MatMul"]) == "dW of conv, dO of conv"
    assert PLACES.listed(["a/loop/lstm/Reserve"]) == "lstm/Reserve"


def test_names_in_a_message_are_replaced():
    told = PLACES.told("'a/conv/Sum' depends on 'a/conv/MatMul': a cycle", ("a/conv/Sum", "a/conv/MatMul"))
    assert told == "dW of conv depends on dO of conv: a cycle"
    assert PLACES.told("left whole; unroll='yes'", ("a/conv/Sum",)) == "left whole; unroll='yes' (dW of conv)"


def test_long_lists_are_cut_short():
    assert first_of([*"abc"], 3) == "a, b, c"
    assert first_of([*"abcde"], 3) == "a, b, c and 2 more"
    assert (count_text(1, "op"), count_text(2, "op")) == ("1 op", "2 ops")


def test_what_is_in_no_order_is_told_in_one_note_for_each_reason():
    """With the layers' names, and without talk of graphs and edges; what went as planned is not told."""
    pair, other = ("a/conv/MatMul", "a/conv/Sum"), ("a/conv/Sum_1", "a/loop/lstm/Reserve")
    depends = f"'a/conv/Sum_1' depends on 'a/loop/lstm/Reserve': {WOULD_CLOSE_A_CYCLE}"
    notes = [
        Note("skipped", CLOSES_A_CYCLE, pair),
        Note("skipped", depends, other),
        Note("skipped", "different while frames: '' and 'while'", other),
        Note("mixed", "a sum of both", ("a/conv/MatMul",)),
        Note("separated", "as planned", ("a/conv/Sum",)),
    ]
    own_order = "left in TensorFlow's own order, as "
    assert told(lambda: PLACES, notes, ["of the plan"]) == (
        "of the plan",
        "not taken apart: a sum of both (dO of conv)",
        f"{own_order}they would wait for each other (dO of conv, dW of conv, lstm/Reserve)",
        f"{own_order}a loop or a condition lies between them (dW of conv, lstm/Reserve)",
    )
