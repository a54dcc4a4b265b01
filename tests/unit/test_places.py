"""Ops in a user's words."""

from __future__ import annotations

from tf_ooo.costs.places import Places, counted, first_of

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
    assert (counted(1, "op"), counted(2, "op")) == ("1 op", "2 ops")
