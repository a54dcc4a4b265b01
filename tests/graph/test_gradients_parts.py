"""Tests how far gradients reach, one step of it at a time, on graphs made by hand."""

from __future__ import annotations

import pytest
from flows import access, bits, flow_of, names_of, nodes, ones, propagation_of

from grappler_passes.analysis.gradients import GradientFlow, may_equal
from grappler_passes.graph.flow import Propagation, marks

A, B, C = 1, 2, 4  # the bits of three weights
NO_OUTPUTS = {"wv": [], "ww": []}


def gradients_of(flow, weights=(), slots=None, results="", **known):
    """Without a search for weights; what is ``known`` is not computed."""
    gradients = GradientFlow.__new__(GradientFlow)
    plain = {
        "flow": flow, "order": list(range(len(flow))), "variables": list(weights), "weights": list(weights),
        "slots": slots or {}, "results": nodes(flow, results), "results_are_certain": True,
        "full": propagation_of(flow), "cut": propagation_of(flow, cut_scalars=True),
    }  # fmt: skip
    gradients.__dict__.update(plain | known)
    return gradients


# -- graphs of value flow --------------------------------------------------------------------------


def test_memory_of_weights_and_numbers_are_cut():
    """Later reads see what a write changes; for a weight that is another step's business."""
    flow = flow_of(
        "h Handle:", "x _Arg:", "n Size: x", "w Assign: x", "late Read:", "s Assign: n", "read Read:",
        "y Mul: late read n",
        scalars=["n"],
    )  # fmt: skip
    weight = access(flow, "weight", writes="w", late="late", handle=0)
    state = access(flow, "state", writes="s", late="read", handle=1)
    gradients = gradients_of(flow, [weight])
    gradients.variables.append(state)
    for name in ("full", "cut"):
        del gradients.__dict__[name]
    gradients.handle_nodes = {0}
    assert gradients.weight_handles == {0}
    # The size of x is asked for, and says nothing of its values.
    assert propagated(flow, gradients.full, "x") == ["x", "w"]
    assert propagated(flow, gradients.needed, "x") == ["x", "n", "w", "s", "read", "y"]
    assert propagated(flow, gradients.cut, "x") == ["x", "w"]
    assert propagated(flow, gradients.full, "n") == ["n", "s", "read", "y"]
    assert propagated(flow, gradients.cut, "n") == ["n"]
    assert propagated(flow, gradients.full, "w") == ["w"]
    assert propagated(flow, gradients.cut, "s") == ["s", "read", "y"]


def marked(flow, bits):
    return names_of(flow, [node for node, bit in enumerate(bits) if bit])


def propagated(flow, graph, seeds):
    return marked(flow, graph.downstream(marks(nodes(flow, seeds))))


def test_what_changes_with_the_data_other_than_by_one_number():
    flow = flow_of("x _Arg:", "n Size: x", "y Mul: x", "z Mul: n", scalars=["n"])
    assert gradients_of(flow, data_sources={0: 1}).from_data == ones(flow, "x n y")


# -- reach -----------------------------------------------------------------------------------------

TWO = flow_of(
    "x _Arg:", "v Read:", "w Read:", "h Mul: x v", "y Mul: h w", "g Grad: y", "dw Grad: g h", "dh Grad: g w",
    "dv Grad: dh x", "m Assign: dw", "wv Assign: dv", "ww Assign: dw",
)  # fmt: skip


def two_weights():
    return [access(TWO, "v", writes="wv", reads="v"), access(TWO, "w", writes="ww", reads="w")]


def test_writes_of_a_weight_and_of_its_slots():
    gradients = gradients_of(TWO, two_weights(), {1: [access(TWO, "m", writes="m")]})
    assert names_of(TWO, gradients.sinks(0)) == ["wv"]
    assert gradients.sinks(1) == nodes(TWO, "ww m")
    assert gradients.all_sinks.keys() == set(nodes(TWO, "wv ww m"))


def test_an_op_reaches_the_weights_whose_writes_it_changes():
    gradients = gradients_of(TWO, two_weights())
    assert gradients.reach == bits(
        TWO, x=A | B, v=A | B, w=A | B, h=A | B, y=A | B, g=A | B, dw=B, dh=A, dv=A, wv=A, ww=B
    )  # fmt: skip


def test_one_write_of_two_weights():
    weights = [access(TWO, "v", writes="ww"), access(TWO, "w", writes="ww")]
    assert gradients_of(TWO, weights).reach[TWO.index["dw"]] == A | B


def test_numbers_between_weights_are_cut():
    """A norm of both gradients goes into both updates."""
    flow = flow_of(
        "g Grad:", "dv Grad: g", "dw Grad: g", "norm Norm: dv dw", "uv Mul: dv norm", "uw Mul: dw norm",
        "wv Assign: uv", "ww Assign: uw",
        scalars=["norm"],
    )  # fmt: skip
    weights = [access(flow, "v", writes="wv"), access(flow, "w", writes="ww")]
    assert gradients_of(flow, weights).reach == bits(flow, g=A | B, dv=A, dw=B, uv=A, uw=B, wv=A, ww=B)


# A weight of rank 0 between two of rank 2; all are clipped by one norm.
SCALED = flow_of(
    "x _Arg:", "g Grad: x", "dv Grad: g", "sum Sum: g", "dw Grad: g", "nv Norm: dv", "ns Norm: sum",
    "nw Norm: dw",
    "norm AddN: nv ns nw", "uv Mul: dv norm", "us Mul: sum norm", "uw Mul: dw norm",
    "wv Assign: uv", "ws Assign: us", "ww Assign: uw",
    shapes={"dv": [(3, 4)], "dw": [(3, 4)]}, scalars=["sum", "nv", "ns", "nw", "norm", "us"],
)  # fmt: skip


def test_a_scalar_is_reached_from_where_tensors_are_reduced_to_its_gradient():
    """``sum`` is one; so is the norm of the other gradients, which stand behind them."""
    weights = [
        access(SCALED, "v", writes="wv"),
        access(SCALED, "s", writes="ws", shape=()),
        access(SCALED, "w", writes="ww"),
    ]
    gradients = gradients_of(SCALED, weights, from_data=ones(SCALED, "x g dv dw sum nv nw ns"))
    assert gradients.reach == bits(
        SCALED, x=A | B | C, g=A | B | C, dv=A, sum=B, dw=C, uv=A, uw=C, wv=A, ws=B, ww=C
    )  # fmt: skip
    without = gradients_of(SCALED, weights[::2], from_data=ones(SCALED, "x g dv dw sum"))
    assert without.reach[SCALED.index["sum"]] == 0


def test_a_scalar_goes_with_the_nearest_reduction():
    """Two scalars: each reduction is climbed to from both, by way of the norm from the other one."""
    flow = flow_of(
        "x _Arg:", "a Sum: x", "b Sum: x", "na Mul: a", "nb Mul: b", "norm Add: na nb", "ua Mul: a norm",
        "ub Mul: b norm", "wa Assign: ua", "wb Assign: ub",
        scalars=["a", "b", "na", "nb", "norm", "ua", "ub"],
    )  # fmt: skip
    weights = [access(flow, "a", writes="wa", shape=()), access(flow, "b", writes="wb", shape=())]
    gradients = gradients_of(flow, weights, from_data=ones(flow, "x a b"))
    assert gradients.reach == bits(flow, x=A | B, a=A, b=B, wa=A, wb=B)


def test_one_reduction_serves_two_scalars():
    flow = flow_of("x _Arg:", "r Sum: x", "wa Assign: r", "wb Assign: r", scalars=["r"])
    weights = [access(flow, name, writes=name, shape=()) for name in ("wa", "wb")]
    reach = gradients_of(flow, weights, from_data=ones(flow, "x r")).reach
    assert reach == bits(flow, x=A | B, r=A | B, wa=A, wb=B)


def test_reductions_and_how_far_they_are():
    flow = flow_of(
        "x _Arg:", "c Const:", "r Sum: x", "n Neg: r", "up Mul: n c", "t Sum: x", "w Assign: up t",
        "o Sum: c",
        scalars=["r", "n", "up", "t", "c", "o"],
    )  # fmt: skip
    weight = access(flow, "s", writes="w", shape=())
    none = [0] * len(flow)
    gradients = gradients_of(flow, [weight], from_data=ones(flow, "x r n up t"))
    at = {flow.index["t"]: 1, flow.index["r"]: 3}
    assert gradients._reductions(0, none, none) == at
    # Not through what changes another weight, nor one that comes after another's gradient.
    assert gradients._reductions(0, bits(flow, up=B), none) == {flow.index["t"]: 1}
    assert gradients._reductions(0, none, bits(flow, t=B)) == {flow.index["r"]: 3}


# -- gradients -------------------------------------------------------------------------------------


def test_what_has_a_weights_shape_and_reaches_it_alone_is_like_its_gradient():
    flow = flow_of(
        "x _Arg:", "f Tanh: x", "d Grad: f", "c Const:", "dv Grad: d", "dw Grad: d", "wv Assign: dv",
        "ww Assign: dw",
        shapes={"f": [(3, 4)], "d": [(5, 4)], "dv": [(9,), (3, 4)], "dw": [(2, 2)], "c": [(3, 4)]}
        | NO_OUTPUTS,
    )  # fmt: skip
    weights = [access(flow, "v", writes="wv"), access(flow, "w", writes="ww", shape=(4, 2))]
    gradients = gradients_of(flow, weights, lone_reads=lambda reach: {}, from_data=ones(flow, "x f d dv dw"))
    reach = bits(flow, x=A | B, f=A | B, d=A | B, c=A, dv=A, dw=B, wv=A, ww=B)
    # Nothing is like the gradient of w, whose write stands for it.
    assert gradients._gradient_like(reach) == {flow.index["dv"]: A, flow.index["ww"]: B}
    assert gradients._gradient_like([0] * len(flow)) == {flow.index["wv"]: A, flow.index["ww"]: B}


def test_of_a_lone_weight_only_what_follows_its_gradient():
    flow = flow_of("f Tanh:", "dw Grad: f", "w Assign: dw", shapes={"f": [(3, 4)], "dw": [(3, 4)], "w": []})
    gradients = gradients_of(flow, [access(flow, "w", writes="w")], from_data=ones(flow, "f dw w"))
    gradients.lone_reads = lambda reach: {0: {0}}
    asked = []

    def from_gradient_on(weight, reads, reach):
        asked.append((weight, reads))
        return {flow.index["dw"]}

    gradients._from_gradient_on = from_gradient_on
    assert gradients._gradient_like([A] * 3) == {flow.index["dw"]: A}
    assert asked == [(0, {0})]


@pytest.mark.parametrize(
    ("reach_of_w", "results", "lone"),
    [
        (B, "y", {1: "w"}),
        (A | B, "y", {}),  # it changes the gradient of v
        (A, "y", {}),
        (B, "x", {}),  # no result depends on it
    ],
)
def test_weights_whose_forward_pass_is_their_own(reach_of_w, results, lone):
    gradients = gradients_of(TWO, two_weights(), results=results)
    found = gradients.lone_reads(bits(TWO, v=A | B, w=reach_of_w))
    assert found == {number: set(nodes(TWO, names)) for number, names in lone.items()}


LONE = flow_of(
    "x _Arg:", "w Read:", "c Const:", "y MatMul: x w", "g Sub: y c", "dw MatMul: x g", "u Mul: dw",
    "ww Assign: u",
    shapes=dict.fromkeys(("y", "g", "dw", "u", "w"), [(3, 4)]) | {"x": [(3, 3)], "ww": []},
)  # fmt: skip


def lone_from(shape=(3, 4), sources=("x",), **reach):
    weight = access(LONE, "w", writes="ww", reads="w", shape=shape)
    without_ops = [access(LONE, "none"), access(LONE, "neither")]
    gradients = gradients_of(
        LONE, [*without_ops, weight], data_sources=dict.fromkeys(nodes(LONE, " ".join(sources)), 1)
    )
    reaches = dict.fromkeys(LONE.names, C) | reach
    return names_of(LONE, gradients._from_gradient_on(2, set(nodes(LONE, "w")), bits(LONE, **reaches)))


def test_a_lone_weights_gradient_is_what_nothing_passes_by():
    """y and g have the shape by chance: x passes them by on its way to dw."""
    assert lone_from() == ["dw", "u", "ww"]
    assert lone_from(shape=(9, 9)) == []
    # If x does not count among the weight's own, it enters at dw all the same.
    assert lone_from(x=A | C) == ["dw", "u", "ww"]
    # Data that come in later come in before the gradient is finished.
    assert lone_from(sources=("x", "u")) == ["u", "ww"]
    # Nothing that is not fed is looked at; c is such a thing.
    assert lone_from(c=A) == ["dw", "u", "ww"]
    assert lone_from(dw=A, u=C) == ["u", "ww"]


def test_what_follows_gradients_and_weights():
    gradients = gradients_of(
        TWO, two_weights(), _gradient_like=lambda reach: {TWO.index["dw"]: B, TWO.index["dv"]: A}
    )
    gradients.reach = []
    assert gradients.after == bits(TWO, dw=B, dv=A, m=B, ww=B, wv=A)
    assert gradients.depends == bits(
        TWO, v=A, w=B, h=A, y=A | B, g=A | B, dw=A | B, dh=A | B, dv=A | B, m=A | B, wv=A | B, ww=A | B
    )  # fmt: skip


def test_a_read_of_two_weights():
    weights = [access(TWO, "v", reads="h"), access(TWO, "w", reads="h", late="y")]
    assert gradients_of(TWO, weights).read_bits == {TWO.index["h"]: A | B, TWO.index["y"]: B}


def test_tensors_of_weights_apart_from_numbers():
    flow = flow_of("v Read:", "n Norm: v", "y Mul: n", scalars=["n"])
    gradients = gradients_of(flow, [access(flow, "v", reads="v")])
    assert gradients.depends == bits(flow, v=A, n=A, y=A)
    assert gradients.depends_on_tensors == bits(flow, v=A, n=A)


# -- the forward pass ------------------------------------------------------------------------------

# The labels t, a decayed weight c and a second product k only change the gradient; m is a metric.
PASS = flow_of(
    "x _Arg:", "v Read:", "w Read:", "h Mul: x v", "y Mul: h w", "t Tanh: x", "c Mul: v", "k Mul: x v",
    "g Grad: y t c k", "dw Grad: g h", "dh Grad: g w", "dx Sum: dh", "dv Grad: dh x", "wv Assign: dv",
    "ww Assign: dw", "m Sum: y", "n Const:", "ws Assign: y",
    shapes={"dw": [(3, 4)], "dv": [(3, 4)]} | NO_OUTPUTS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("results", "known", "forward"),
    [
        ("y", {}, "x v w h y"),
        ("y n wv", {}, "x v w h y"),  # a constant and an update are no results of the forward pass
        ("", {}, "x v h k"),  # h and k change the gradient of w, on which they do not depend yet
        ("", {"after": bits(PASS, k=A)}, "x v h"),
        ("", {"variables": [access(PASS, "state", writes="ws")]}, "x v w h y ws"),
        ("y dx", {}, "x v w h y t c k g dh dx"),
        ("y m dx", {"results_are_certain": False}, "x v w h y m"),
    ],
)
def test_the_forward_pass_ends_with_results_that_depend_on_no_gradient(results, known, forward):
    weights = [access(PASS, "v", writes="wv", reads="v"), access(PASS, "w", writes="ww", reads="w")]
    gradients = gradients_of(PASS, weights, results=results, **{"data_sources": {0: 1}} | known)
    assert marked(PASS, gradients.forward) == forward.split()


def loop_of(*rows):
    return flow_of(
        "x _Arg:", "cond LoopCond: x", "item Tanh: x", "merge Merge: x next", "switch Switch: merge cond",
        *rows, "exit Exit: switch", "early Abs: switch", "length TensorListLength: push", "y Exp: cond",
    )  # fmt: skip


STASHING = loop_of("push TensorListPushBack: switch item", "next NextIteration: push")
COMPUTING = loop_of("mul Mul: switch", "push TensorListPushBack: mul item", "next NextIteration: push")
COUNTING = loop_of("push Identity: switch item", "next NextIteration: push")


@pytest.mark.parametrize(
    ("flow", "results", "forward"),
    [
        (STASHING, "y", "x cond item merge switch push next exit y"),
        (STASHING, "item", "x item"),  # no forward result waits for the condition of the loop
        (STASHING, "y push", "x cond item merge switch push next y"),  # it is forward by itself
        (COMPUTING, "y", "x cond y"),
        (COUNTING, "y", "x cond y"),
    ],
)
def test_loop_variables_that_collect_for_the_gradient_are_forward(flow, results, forward):
    preds = [[edge.source for edge in edges] for edges in flow.data]
    loop = Propagation(preds, range(len(flow)), True)
    gradients = gradients_of(flow, [], results=results, data_sources={0: 1}, full=loop, cut=loop)
    assert marked(flow, gradients.forward) == forward.split()


@pytest.mark.parametrize(
    ("shape", "wanted", "equal"),
    [
        ((3, 4), (3, 4), True),
        ((None, 4), (3, 4), True),
        ((300, 1000), (300, int("1000")), True),
        ((), (), True),
        ((3,), (3, 4), False),
        ((3, 4), (3,), False),
        ((4, 3), (3, 4), False),
        ((None, 3), (3, 4), False),
        (None, (3, 4), False),
        ((3, 4), None, False),
    ],
)
def test_shapes_that_may_be_equal(shape, wanted, equal):
    assert may_equal(shape, wanted) is equal
