"""The parts of the backward pass one at a time, from facts made by hand."""

from __future__ import annotations

import pytest
from flows import access, bits, facts, flow_of, names_of, nodes, ones

from grappler_passes.analysis.backward import Backward

A, B, C = 1, 2, 4  # the bits of three weights


def backward_of(flow, **known):
    return Backward(facts(flow, **known))


def given(backward, **values):
    """The backward pass with these parts as they are given."""
    backward.__dict__.update(values)
    return backward


# -- communication ---------------------------------------------------------------------------------


def test_what_communicates():
    flow = flow_of(
        "a Grad:", "axis Const:",
        "pack ConcatV2: a a axis", "talk CollectiveReduceV2: pack", "split SplitV: talk", "then Tanh: talk",
        "shared ConcatV2: a a axis", "talk2 HorovodAllreduce: shared", "reader Tanh: shared",
        "split2 SplitV: then", "first ConcatV2: a a axis", "reader2 Tanh: first",
        "talk5 HorovodAllreduce: first",
        "pack3 Pack: a a", "talk3 NcclAllReduce: pack3", "parts Unpack: talk3",
        "plain Mul: a a", "talk4 CollectiveReduceV2: plain", "pack5 Pack: a",
    )  # fmt: skip
    backward = backward_of(flow)
    talks = [node for node in range(len(flow)) if backward.is_communication(node)]
    # Not a pack that something else reads, nor one that is not sent, nor what is split without that.
    assert names_of(flow, talks) == [
        "pack", "talk", "split", "talk2", "talk5", "pack3", "talk3", "parts", "talk4",
    ]  # fmt: skip


# -- updates ---------------------------------------------------------------------------------------


def updates(flow, finished=(), shared=None, state=(), **known):
    backward = backward_of(flow, **known)
    given(
        backward,
        _state_reads=lambda: nodes(flow, " ".join(state)),
        _finished_gradients=lambda marked: nodes(flow, " ".join(finished)),
        _work_on_shared_gradient=lambda node, marked: (shared or {}).get(flow.names[node], {}),
    )
    return names_of(flow, [node for node, update in enumerate(backward.is_update) if update])


CHAIN = flow_of(
    "x _Arg:", "f Tanh: x", "g Grad: f", "h Mul: g", "slot ReadVariableOp:", "m Add: h slot", "w Assign: m"
)


def test_an_update_begins_where_a_gradient_meets_state():
    assert updates(CHAIN, state=("slot",)) == ["slot", "m", "w"]
    assert updates(CHAIN) == []


def test_an_update_begins_where_gradients_meet():
    assert updates(CHAIN, after=bits(CHAIN, g=A, h=A | B, m=A)) == ["h", "m", "w"]
    assert updates(CHAIN, after=bits(CHAIN, g=A, h=A, m=B)) == []


def test_writes_are_updates():
    assert updates(CHAIN, all_sinks={CHAIN.index["w"]: 1}) == ["w"]


def test_what_follows_a_finished_gradient_is_update():
    assert updates(CHAIN, finished=("g",)) == ["h", "m", "w"]


def test_what_follows_a_shared_gradient_is_update():
    assert updates(CHAIN, shared={"g": {CHAIN.index["m"]: 1}}) == ["m", "w"]


def test_forward_ops_are_no_updates():
    assert updates(CHAIN, state=("slot",), forward=ones(CHAIN, "slot m")) == ["w"]


def test_what_follows_a_communication_is_update():
    flow = flow_of(
        "g Grad:",
        "talk CollectiveReduceV2: g",
        "m Mul: talk",
        "w Assign: m",
        "other NcclAllReduce: g",
        "n Mul: other",
    )
    assert updates(flow, reach=bits(flow, talk=A)) == ["m", "w"]


# -- finished gradients ----------------------------------------------------------------------------


@pytest.fixture
def gradient():
    """Data come in at x, p and q; the gradient of a (3, 4) is made by ``made``, and then looked at."""
    return flow_of(
        "x _Arg:", "early Grad: x", "made MatMul: early", "view Reshape: made", "m Mul: view", "w Assign: m",
        shapes={"early": [(5, 4)], "made": [(3, 4)], "view": [(3, 4)], "m": [(3, 4)]},
    )  # fmt: skip


def finished(flow, weights, marked="", **known):
    plain = {"from_data": [1] * len(flow), "weights": weights}
    backward = backward_of(flow, **(plain | known))
    return names_of(flow, backward._finished_gradients(ones(flow, marked)))


def weight(shape):
    return access(flow_of("none NoOp:"), "weight", shape=shape)


def test_the_first_op_of_the_weights_shape(gradient):
    reach = bits(gradient, early=A, made=A, view=A, m=A, w=A)
    assert finished(gradient, [weight((3, 4))], reach=reach) == ["view"]
    # Behind it, and its views, there is state already.
    assert finished(gradient, [weight((3, 4))], "m w", reach=reach) == ["view"]
    assert finished(gradient, [weight((3, 4))], "view m w", reach=reach) == ["view"]
    assert finished(gradient, [weight((9, 9))], reach=reach) == []
    assert (
        finished(gradient, [weight((3, 4))], reach=reach, forward=ones(gradient, "early made view m")) == []
    )


def test_ops_of_several_weights_finish_none(gradient):
    two = [weight((3, 4)), weight((3, 4))]
    assert finished(gradient, two, reach=bits(gradient, early=A | B, made=A | B, view=A | B)) == []
    # From the view on it is the second weight's alone; the first has none.
    assert finished(gradient, two, reach=bits(gradient, early=A | B, made=A | B, view=B, m=B)) == ["view"]


@pytest.mark.parametrize(("later", "end"), [([(3, 4)], "view"), ([(9, 9)], "early")])
def test_an_exact_shape_goes_before_one_that_is_open(later, end):
    flow = flow_of(
        "x _Arg:", "early Grad: x", "made MatMul: early", "view Reshape: made", "m Mul: view",
        shapes={"early": [(None, 4)], "made": later, "view": later, "m": later},
    )  # fmt: skip
    reach = bits(flow, early=A, made=A, view=A, m=A)
    assert finished(flow, [weight((3, 4))], reach=reach) == [end]


def test_what_is_passed_by_is_not_finished():
    """``early`` has the shape by chance: data pass it by."""
    flow = flow_of(
        "x _Arg:", "early Grad: x", "made MatMul: early x", "m Mul: made",
        shapes={"early": [(3, 4)], "made": [(3, 4)], "m": [(3, 4)]},
    )  # fmt: skip
    reach = bits(flow, early=A, made=A, m=A)
    assert finished(flow, [weight((3, 4))], reach=reach) == ["made"]


def test_where_something_enters():
    """Data or weights from outside; a constant is neither; what the nodes hand to each other is inside."""
    flow = flow_of("x _Arg:", "r Read:", "c Const:", "a Mul: x", "b Mul: r", "d Mul: c", "e Mul: a b")
    backward = backward_of(flow, from_data=ones(flow, "x a e"), depends=bits(flow, r=A, b=A, e=A))
    assert names_of(flow, backward._entries(nodes(flow, "a b d e"))) == ["a", "b"]
    assert names_of(flow, backward._entries(nodes(flow, "b d e"))) == ["b", "e"]


# The chain behind a, and where it ends.
VIEWS = {
    "no reader": (("a Grad:",), "a", "a"),
    "another op": (("a Grad:", "b Mul: a"), "a b", "a"),
    "one view": (("a Grad:", "b Reshape: a", "c Mul: b"), "a b c", "b"),
    "several views": (("a Grad:", "b Cast: a", "c Transpose: b", "d Mul: c"), "a b c d", "c"),
    "two readers": (("a Grad:", "b Reshape: a", "c Mul: a"), "a b c", "a"),
    "two views": (("a Grad:", "b Reshape: a", "c Cast: a", "d Mul: b"), "a b c d", "a"),
    "another reader, of a shape": (("a Grad:", "b Reshape: a", "c Shape: a"), "a b", "b"),
    "a view read twice": (("a Grad:", "b Reshape: a", "c Cast: b", "d Mul: b"), "a b c d", "b"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_end_of_a_chain_of_views(name):
    rows, from_data, end = VIEWS[name]
    flow = flow_of(*rows)
    assert flow.names[backward_of(flow, from_data=ones(flow, from_data))._behind_views(0)] == end


SHARED = ("g Grad:", "u Mul: g", "v Mul: g", "other Mul: g", "dw MatMul: g", "both Mul: g")


def shared(marked="u both", of_tensor=(5, 4), of_weight=(5, 4), from_data="g", forward="", **reach):
    flow = flow_of(*SHARED, shapes={"g": [of_tensor]})
    known = {"g": A | B, "u": A, "v": A, "other": B, "dw": A, "both": A | B}
    backward = backward_of(
        flow,
        weights=[weight(of_weight), weight((9,))],
        from_data=ones(flow, from_data),
        forward=ones(flow, forward),
        reach=bits(flow, **(known | reach)),
    )
    return names_of(flow, backward._work_on_shared_gradient(0, ones(flow, marked)))


def test_a_shared_tensor_that_is_a_weights_gradient():
    """It meets the state of weight 0 in u: what else is done with it for that weight is update as well."""
    assert shared() == ["u", "v", "dw"]
    assert shared(of_tensor=(None, 4)) == ["u", "v", "dw"]
    assert shared(of_tensor=None, of_weight=(7, 7)) == ["u", "v", "dw"]
    assert shared(marked="other", of_weight=None, of_tensor=None) == ["other"]


@pytest.mark.parametrize(
    "changed",
    [
        {"marked": "v g"},  # state already
        {"marked": "both"},  # meets the state of both
        {"marked": ""},
        {"of_weight": (5, 3)},
        {"of_weight": None},
        {"forward": "g"},
        {"from_data": "u v"},
        {"g": A},  # one weight's
        {"u": 0},  # what meets state changes no weight
    ],
)
def test_a_shared_tensor_that_is_no_gradient(changed):
    assert shared(**changed) == []


# -- state -----------------------------------------------------------------------------------------


def state(flow, variables, weights=(), sinks="w", **known):
    plain = {
        "variables": [*variables, *weights],
        "weights": list(weights),
        "all_sinks": dict.fromkeys(nodes(flow, sinks), 1),
    }
    return names_of(flow, backward_of(flow, **(plain | known))._state_reads())


STATE = flow_of(
    "x _Arg:", "scale Read:", "loss Mul: x scale", "g Grad: loss", "dw Grad: g", "rate Read:", "slot Read:",
    "u Mul: dw rate", "s Add: u slot", "unscaled Mul: s scale", "w Assign: unscaled", "metric Read:",
    "m Add: metric",
)  # fmt: skip


def test_state_is_read_for_the_write_alone():
    """The loss scale is read by dO first; a metric by no write of a weight."""
    variables = [access(STATE, name, reads=name) for name in ("scale", "rate", "slot", "metric")]
    known = {"reach": bits(STATE, g=A | B, dw=A), "from_data": ones(STATE, "loss g dw")}
    assert state(STATE, variables, **known) == ["rate", "slot"]
    # Nothing that leads to several weights' gradients reads it: it counts.
    assert state(STATE, variables, **(known | {"reach": bits(STATE, dw=A)})) == ["scale", "rate", "slot"]
    for hides in ({"from_data": []}, {"forward": ones(STATE, "g")}, {"after": bits(STATE, g=A)}):
        plain = known | {"from_data": ones(STATE, "loss dw")} if "from_data" in hides else known | hides
        assert state(STATE, variables, **plain) == ["scale", "rate", "slot"]
    assert state(STATE, variables, forward=ones(STATE, "rate"), **known) == ["slot"]


def test_state_of_a_lone_weight():
    """In its own backward pass dO meets tensors of the forward pass: what leads there is no state."""
    variables = [access(STATE, name, reads=name) for name in ("scale", "rate")]
    known = {
        "reach": bits(STATE, loss=A, g=A, dw=A, u=A, s=A, unscaled=A, w=A),
        "lone_reads": lambda reach: {0: set()},
    }
    asked = []
    backward = backward_of(STATE, variables=variables, all_sinks={STATE.index["w"]: 1}, **known)
    given(backward, _meets_forward=lambda weight: asked.append(weight) or nodes(STATE, "g"))
    assert names_of(STATE, backward._state_reads()) == ["rate"]
    assert asked == [0]


def test_where_a_lone_weights_gradient_meets_the_forward_pass():
    flow = flow_of(
        "x _Arg:", "c Const:", "n Size: x", "f Tanh: x", "g Grad: f", "h Mul: c", "i Mul: n", "j Grad: g",
        "w Assign: f", "of_another Grad: f", "of_none Tanh: f",
        scalars=["n"],
    )  # fmt: skip
    known = {
        "forward": ones(flow, "x c n f"),
        "from_data": ones(flow, "x n f g j"),
        "reach": bits(flow, f=B, g=B, h=B, i=B, j=B, w=B, of_another=A),
        "all_sinks": {flow.index["w"]: 1},
    }
    # Not constants, nor numbers, nor other gradients; nor a write; and f itself is forward.
    assert names_of(flow, backward_of(flow, **known)._meets_forward(1)) == ["g"]
    assert names_of(flow, backward_of(flow, **known)._meets_forward(0)) == ["of_another"]
    known["reach"] = bits(flow, g=A | B)
    assert backward_of(flow, **known)._meets_forward(1) == []


# -- backward --------------------------------------------------------------------------------------

HANDED = flow_of("d Grad:", "w1 Mul: d", "u1 Mul: d", "u2 Mul: d", "n Mul: d", "both Add: d")


def test_whose_gradients_an_op_hands_over():
    known = {
        "from_data": ones(HANDED, "d w1"),
        "reach": bits(HANDED, d=A | B, w1=A, u1=B, u2=C, n=A, both=A | B),
    }
    backward = given(backward_of(HANDED, **known), is_update=ones(HANDED, "u1 u2 both"))
    assert backward.hands_over(0) == B | C  # to the updates of one weight each
    assert backward.hands_over(1) == A  # its own
    assert backward.hands_over(2) == 0  # it has no data in it


def test_backward_ops_are_what_gradients_are_computed_from():
    flow = flow_of(
        "x _Arg:",
        "h Handle:",
        "f Tanh: x",
        "g Grad: f",
        "dw Grad: g h",
        "u Mul: dw",
        "w Assign: u",
        "loose Grad: g",
    )
    backward = given(
        backward_of(flow, forward=ones(flow, "x f"), handle_nodes={flow.index["h"]}),
        is_update=ones(flow, "u w"),
        hands_over=lambda node: {"dw": A, "u": A, "x": A}.get(flow.names[node], 0),
    )
    assert names_of(flow, [node for node, known in enumerate(backward.is_backward) if known]) == ["g", "dw"]
    assert all(isinstance(known, bool) for known in backward.is_backward)


LOOP = (
    "x _Arg:", "list Enter: x", "merge Merge: list next", "switch Switch: merge",
    "pop TensorListPopBack: switch", "use Mul: pop", "next NextIteration: switch", "carried Merge: use",
    "tail Identity: carried", "n Switch: x",
)  # fmt: skip


def unstashed(backward_ops, cyclic=True, from_data="list merge switch pop use next carried tail", scalars=()):
    flow = flow_of(*LOOP[:2], *[row for row in LOOP[2:] if row], scalars=scalars)
    backward = backward_of(flow, cyclic=cyclic, forward=ones(flow, "x"), from_data=ones(flow, from_data))
    given(backward, is_backward=ones(flow, backward_ops))
    return names_of(flow, backward.unstashing)


EVERYTHING = "list merge switch pop use next carried tail n"


def test_ops_that_only_hand_out_what_was_stashed():
    """``use`` computes; what hands its result on carries a gradient, and so does what comes behind."""
    assert unstashed(EVERYTHING) == ["list", "merge", "switch", "pop", "next", "n"]
    assert unstashed(EVERYTHING, cyclic=False) == []
    assert unstashed("list merge switch next") == ["list", "merge", "switch", "next"]
    # An op that comes round is not in the set: a gradient, with all that it goes through.
    assert unstashed("list merge switch pop") == ["list"]


def test_what_is_no_tensor_of_gradients_does_not_count():
    assert unstashed("list merge switch pop", from_data="list merge switch") == [
        "list",
        "merge",
        "switch",
        "pop",
    ]
    assert unstashed("list merge switch pop", scalars=["next"]) == ["list", "merge", "switch", "pop"]


def test_groups_of_weights_that_need_an_op():
    flow = flow_of("x Grad:", "d Grad: x", "w0 Grad: d", "w1 Grad: d", "w2 Grad: x", "f Tanh:", "w3 Grad: f")
    hands = {"w0": 1, "w1": 2, "w2": 4, "w3": 8, "d": 0}
    backward = given(
        backward_of(flow),
        is_backward=[name != "f" for name in flow.names],
        hands_over=lambda node: hands.get(flow.names[node], 0),
    )
    # Weights 1 and 3 count for group 0.
    assert backward.needed_by([1, 0, 2, 0]) == bits(
        flow, x=0b111, d=0b11, w0=0b10, w1=0b1, w2=0b100, f=0b1, w3=0b1
    )
    given(backward, is_backward=[name not in ("f", "d") for name in flow.names])
    # Ops behind an op that is not backward are not needed.
    assert backward.needed_by([1, 0, 2, 0]) == bits(
        flow, x=0b100, d=0b11, w0=0b10, w1=0b1, w2=0b100, f=0b1, w3=0b1
    )


# -- what serves updates ---------------------------------------------------------------------------

SERVES = flow_of(
    "g Grad:", "w Assign: g", "late Read:", "e Mul: late", "ema Assign: e", "n Read:", "count Assign: n",
    "s Mul: g", "scale Assign: s", "x _Arg:", "t Add: x", "total Assign: t",
)  # fmt: skip


def served(after, is_update="", late="", forward=""):
    variables = [
        access(SERVES, name, writes=name, reads="n" if name == "count" else "")
        for name in ("ema", "count", "scale", "total")
    ]
    weights = [access(SERVES, "weight", writes="w", late=late)]
    known = {"variables": variables, "weights": weights, "all_sinks": {SERVES.index["w"]: 1}}
    backward = backward_of(SERVES, after=after, forward=ones(SERVES, forward), **known)
    given(backward, is_update=ones(SERVES, is_update))
    return names_of(SERVES, [node for node, bit in enumerate(backward.serves_update) if bit])


def test_what_the_writes_of_a_step_need():
    none = [0] * len(SERVES)
    assert served(none) == ["g", "w"]
    assert served(bits(SERVES, scale=A)) == ["g", "w", "s", "scale"]  # it comes after a gradient
    assert served(none, is_update="n") == ["g", "w", "n", "count"]  # only updates read it
    assert served(none, late="late") == ["g", "w", "late", "e", "ema"]  # from what was written
    assert served(none, late="late", forward="late") == ["g", "w"]  # by the second half of a step
