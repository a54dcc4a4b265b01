"""Tests which variables are weights and which their slots, step by step, on graphs made by hand."""

from __future__ import annotations

import pytest
from flows import access, flow_of, names_of, nodes, ones, propagation_of

from grappler_passes.analysis.gradients import (
    _changes,
    _ends,
    _find_slots,
    _not_dominated,
    _set_preparations_aside,
    _without_state,
    find_weights,
)
from grappler_passes.graph.flow import memberships
from grappler_passes.graph.variables import ValueFlow


class Values(ValueFlow):
    """All of whose values flow along the edges; memory is in ``remembers`` of a test's variables."""

    def __init__(self, flow, variables=(), fed=""):
        super().__init__(flow, list(range(len(flow))), list(variables))
        self.fed, self.cut = ones(flow, fed), []

    def fed_by_data(self):
        return self.fed

    def propagation(self, *, cut_memory_of=frozenset(), **others):
        assert not others
        self.cut.append(set(cut_memory_of))
        graph = propagation_of(self.flow)
        for variable in self.variables:
            if variable.handle not in cut_memory_of:
                for read, writes in variable.late_read_sources.items():
                    graph.preds[read].extend(writes)
        return graph


# -- ends ------------------------------------------------------------------------------------------

STEP = flow_of(
    "x _Arg:", "w Read:", "y MatMul: x w", "loss Sum: y", "g Grad: y", "slot Read:", "s Add: g slot",
    "ws Assign: s", "ww Assign: s", "metric Read:", "m Add: loss metric", "wm Assign: m",
    "count Read:", "wc Assign: count",
)  # fmt: skip


def written():
    return [
        access(STEP, "w", "ww", "w", handle=10),
        access(STEP, "slot", "ws", "slot", handle=11),
        access(STEP, "metric", "wm", "metric", handle=12),
        access(STEP, "count", "wc", "count", handle=13),
    ]


FED = "x y loss g s ws ww m wm"


def test_values_leave_by_results_and_by_state_that_changes_nothing_else():
    """The weight and the slot change each other; the counter is not written from data."""
    at, fed = STEP.index, ones(STEP, FED)
    changes = [0b0111, 0b0011, 0b0100, 0b1000]
    assert _ends(written(), nodes(STEP, "loss"), changes, fed) == {at["loss"]: 1, at["wm"]: 0b1000}
    # Variables that are written are results as well.
    assert _ends(written(), nodes(STEP, "wm"), changes, fed) == {at["wm"]: 0b1001}
    assert _ends(written(), [], [0b0001, 0b0011, 0b0110, 0b1000], fed) == {at["ww"]: 0b10}
    both = [access(STEP, name, "wm") for name in "ab"]
    assert _ends(both, [], [0, 0], fed) == {at["wm"]: 0b110}


def test_what_variables_change():
    graph = propagation_of(STEP)
    assert _changes(written(), graph) == [0b0111, 0b0011, 0b0100, 0b1000]
    assert _changes([access(STEP, "w", "ww", "w y"), access(STEP, "none")], graph) == [0b1, 0]


def test_a_bit_for_each_variable_on_its_writes():
    variables = [access(STEP, "a", "ws ww"), access(STEP, "b"), access(STEP, "c", "ww wm")]
    at = STEP.index
    assert memberships(v.writes for v in variables) == {at["ws"]: 0b1, at["ww"]: 0b101, at["wm"]: 0b100}


# -- preparations ----------------------------------------------------------------------------------

PREPARED = flow_of(
    "w Read:", "n Div: w", "prepare Assign: n", "second Assign: n", "late Read:", "last Read:",
    "y MatMul: late", "g Grad: y", "update AssignSub: g", "after Read:",
)  # fmt: skip


def prepared(
    sees, fed="g update", to_end="late last y", trainable=None, writes="prepare second update", first="w"
):
    """The variable after that; ``sees`` are the writes that each late read comes after."""
    variable = access(PREPARED, "w", writes, first, " ".join(sees), trainable=trainable)
    at = PREPARED.index
    variable.late_read_sources = {at[read]: nodes(PREPARED, names) for read, names in sees.items()}
    _set_preparations_aside(variable, ones(PREPARED, fed), ones(PREPARED, to_end))

    def named(sources):
        return {PREPARED.names[read]: names_of(PREPARED, writes) for read, writes in sources.items()}

    return (
        names_of(PREPARED, variable.writes),
        [PREPARED.names[read] for read in variable.first_reads],
        [PREPARED.names[read] for read in variable.late_reads],
        named(variable.late_read_sources),
        named(variable.prepared_read_sources),
    )


def test_a_write_that_data_do_not_change_prepares_the_forward_pass():
    sees = {"late": "prepare", "after": "prepare update"}
    assert prepared(sees) == (
        ["second", "update"], ["w", "late"], ["after"], {"after": ["update"]},
        {"late": ["prepare"], "after": ["prepare"]},
    )  # fmt: skip
    sees = {"late": "prepare second", "last": "second"}
    assert prepared(sees) == (
        ["update"], ["w", "late", "last"], [], {}, {"late": ["prepare", "second"], "last": ["second"]}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sees", "known"),
    [
        ({"late": "prepare update"}, {}),  # behind the update too
        ({"late": "prepare"}, {"to_end": "y"}),  # nothing of the forward pass reads it
        ({"late": "prepare"}, {"fed": "prepare"}),  # written from data
        ({"late": "prepare"}, {"writes": "prepare"}),  # there is no other write
        ({}, {}),
        ({"late": "prepare"}, {"fed": "prepare g update", "trainable": False, "first": ""}),
        ({"late": "prepare"}, {"fed": "prepare g update", "trainable": True}),  # it is read before
    ],
)
def test_writes_that_prepare_nothing(sees, known):
    writes, first, late, sources, aside = prepared(sees, **known)
    assert writes == known.get("writes", "prepare second update").split()
    assert (first, late) == (known.get("first", "w").split(), list(sees))
    assert sources == {read: names.split() for read, names in sees.items()}
    assert aside == {}


def test_what_the_first_batch_sets_is_a_preparation():
    """A trainable variable is read behind a write only."""
    writes, first, *_ = prepared({"late": "prepare"}, fed="prepare g update", trainable=True, first="")
    assert (writes, first) == (["second", "update"], ["late"])


# -- weights ---------------------------------------------------------------------------------------


def found(variables, results="loss", fed=FED, flow=STEP):
    weights, slots = find_weights(Values(flow, variables, fed), nodes(flow, results))
    return [w.name for w in weights], {i: [slot.name for slot in own] for i, own in slots.items()}


def test_a_weight_is_written_from_data_and_read_on_the_way_to_a_result():
    assert found(written()) == (["w"], {0: ["slot"]})
    frozen = written()
    frozen[0].trainable = False
    assert found(frozen) == ([], {})
    # Ops that lead to their own write alone are no end: a metric is no weight.
    assert found(written(), fed="wm m x y loss") == ([], {})


def test_variables_that_are_not_written_are_none():
    assert found([*written(), access(STEP, "read", "", "w", handle=14)]) == (["w"], {0: ["slot"]})


def test_where_nothing_is_returned_a_metric_tells_the_weights():
    assert found(written(), results="") == (["w"], {0: ["slot"]})


def test_where_nothing_tells_them_weights_are_nobodys_slots():
    """Two weights change each other and the slot; the slot changes its own weight alone."""
    flow = flow_of(
        "x _Arg:", "v Read:", "w Read:", "m Read:", "h Mul: x v", "y Mul: h w", "g Grad: y", "gv Grad: g w",
        "gw Grad: g h", "s Add: gw m", "wv Assign: gv", "ww Assign: s", "wm Assign: s",
    )  # fmt: skip
    variables = [access(flow, name, f"w{name}", name, handle=number) for number, name in enumerate("vwm")]
    known = {"results": "", "fed": "x h y g gv gw s wv ww wm", "flow": flow}
    assert found(variables, **known) == (["v", "w"], {1: ["m"]})


def test_graphs_are_asked_for_without_the_memory_of_the_variables():
    variables = written()
    values = Values(STEP, variables, FED)
    find_weights(values, nodes(STEP, "loss"))
    assert values.cut[:2] == [{10, 11, 12, 13}, set()]
    assert values.cut[-1] == {10}


# Two variables v and w, and a state of the forward pass that comes round with the next batch.
CARRIED = flow_of(
    "x _Arg:", "r Read:", "v Read:", "w Read:", "h Mul: x r v", "y Mul: h w", "loss Sum: y", "g Grad: y",
    "gv Grad: g", "gw Grad: g", "wv Assign: gv", "ww Assign: gw", "wr Assign: h",
)  # fmt: skip


def carried():
    return [access(CARRIED, name, f"w{name}", name, handle=number) for number, name in enumerate("rvw")]


def test_state_that_forward_passes_carry_along_is_no_weight():
    variables, at = carried(), CARRIED.index
    values = Values(CARRIED, variables)
    assert [v.name for v in _without_state(values, variables, {at["loss"]: 1, at["wr"]: 2})] == ["v", "w"]
    assert values.cut == [{0, 1, 2}]
    # A write of its own is no end of the forward pass.
    assert [v.name for v in _without_state(values, variables, {at["ww"]: 1})] == ["r", "v", "w"]


def test_weights_that_share_no_gradient_are_kept_where_none_does():
    flow = flow_of("x _Arg:", "a Mul: x", "b Mul: x", "wa Assign: a", "wb Assign: b")
    variables = [access(flow, "a", "wa", handle=0), access(flow, "b", "wb", handle=1)]
    assert _without_state(Values(flow, variables), variables, {0: 1}) == variables
    lone = variables[:1]
    values = Values(flow, lone)
    assert _without_state(values, lone, {}) == lone
    assert values.cut == []


def test_only_what_is_behind_the_forward_pass_is_a_shared_gradient():
    """``h`` changes all three, and is forward: what counts is g, which changes two."""
    variables, at = carried(), CARRIED.index
    assert [
        v.name for v in _without_state(Values(CARRIED, variables), variables, {at["g"]: 1, at["wr"]: 1})
    ] == ["r", "v", "w"]


def test_a_gradient_that_a_loss_hands_out_is_shared_though_the_op_is_forward():
    flow = flow_of(
        "x _Arg:", "r Read:", "v Read:", "w Read:", "h Mul: x r v", "y Mul: h w", "loss Loss: y",
        "sum Sum: loss", "gv Grad: loss:1", "gw Grad: loss:1", "wv Assign: gv", "ww Assign: gw",
        "wr Assign: h",
        shapes={"h": [(3, 4)] * 2, "loss": [(), (3, 4)]},
    )  # fmt: skip
    variables = [access(flow, name, f"w{name}", name, handle=number) for number, name in enumerate("rvw")]
    kept = _without_state(Values(flow, variables), variables, {flow.index["sum"]: 1})
    assert [v.name for v in kept] == ["v", "w"]


# -- slots -----------------------------------------------------------------------------------------

SLOTS = flow_of(
    "g Grad:", "m Read:", "t Read:", "l Read:", "um Mul: g m t", "uw Mul: g t l", "wm Assign: um",
    "wv Assign: um", "ww Assign: uw", "wt Assign: t", "fused Apply: g", "wl Assign: l",
)  # fmt: skip


def test_slots_change_one_weight():
    """The step counter changes both; a fused op without an output reads a slot, writes it and the weight."""
    weights = [access(SLOTS, "v", "wv fused", handle=0), access(SLOTS, "w", "ww", handle=1)]
    others = [
        access(SLOTS, "m", "wm", "m", handle=2),
        access(SLOTS, "t", "wt", "t", handle=3),
        access(SLOTS, "lookahead", "wl", "l", handle=4),
        access(SLOTS, "accum", "fused", handle=5),
        access(SLOTS, "metric", "wm", handle=6),
    ]
    values = Values(SLOTS, [*weights, *others])
    slots = _find_slots(values, weights, [*weights, *others])
    assert {i: [slot.name for slot in own] for i, own in slots.items()} == {
        0: ["m", "accum"],
        1: ["lookahead"],
    }
    assert values.cut == [{0, 1}]


def dominated(changes, trainable=(None, None, None), variables=(0, 1, 2)):
    """Names of those that are nobody's slot, given what each of three changes."""
    flow = flow_of("n NoOp:")
    every = [access(flow, name, handle=10 + i, trainable=trainable[i]) for i, name in enumerate("abc")]
    kept = _not_dominated([every[i] for i in variables], {v.handle: i for i, v in enumerate(every)}, changes)
    return "".join(v.name for v in kept)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ([0b111, 0b111, 0b111], "abc"),  # weights that change each other
        ([0b111, 0b111, 0b100], "ab"),  # c changes itself alone
        ([0b111, 0b011, 0b000], "a"),  # b changes less than a, which it changes
        ([0b001, 0b010, 0b100], ""),
        ([0b011, 0b011, 0b111], "abc"),  # c changes more than what it changes
        ([0b110, 0b010, 0b100], "a"),
        ([0b010, 0b111, 0b111], "bc"),
        ([0b100, 0b100, 0b110], "c"),  # what a and b change changes more
    ],
)
def test_variables_that_are_nobodys_slot(changes, kept):
    assert dominated(changes) == kept


def test_frozen_variables_are_no_weights():
    assert dominated([0b111] * 3, trainable=(None, False, True)) == "ac"


def test_only_those_that_are_asked_for_count():
    assert dominated([0b111, 0b111, 0b100], variables=(0, 2)) == "a"
    assert dominated([0b101, 0b111, 0b101], variables=(0, 2)) == "ac"
