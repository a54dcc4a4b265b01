"""Tests how weights become layers, one step of it at a time, from facts made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flows import access, bits, facts, flow_of, nodes, ones

from grappler_passes.analysis import layers
from grappler_passes.analysis.layers import (
    _first_use,
    _has_shape,
    _in_order,
    _is_fused_gradient,
    _is_reduced,
    _note,
    _origin,
    _ports_to_update,
    _start,
    _undoes_broadcast,
    _Units,
    _used_behind,
    group_weights,
)
from grappler_passes.compat.shape_inference import OutputInfo

A, B, C = 1, 2, 4  # the bits of three weights


def backward_of(flow, backward="", update="", unstashing="", hands=None, **known):
    """A backward pass with these ops in it; all change with the data but where it is said."""
    gradients = facts(flow, **({"from_data": [1] * len(flow), "targets_of_outputs": {}} | known))
    successors = [
        [n for n, edges in enumerate(flow.data) for e in edges if e.source == s] for s in range(len(flow))
    ]
    return SimpleNamespace(
        gradients=gradients,
        flow=flow,
        size=len(flow),
        successors=successors,
        is_backward=[bool(one) for one in ones(flow, backward)],
        is_update=[bool(one) for one in ones(flow, update)],
        unstashing=set(nodes(flow, unstashing)),
        recomputed=set(),
        hands_over=lambda node: (hands or {}).get(flow.names[node], 0),
        needed_by=lambda group_of_weight: group_of_weight,
    )


def units(flow, of_weight=(0, 1, 2), shapes=((3, 4), (4,), (4, 2)), **needed):
    """Weights in their units, without what is noted of them."""
    made = _Units.__new__(_Units)
    made.of_weight, made.needed, made._shapes = list(of_weight), bits(flow, **needed), list(shapes)
    count = len(set(of_weight))
    made.members = [[w for w, unit in enumerate(of_weight) if unit == number] for number in range(count)]
    made.starts, made.through, made.handed_out = [set() for _ in range(count)], [0] * count, set()
    return made


# -- groups ----------------------------------------------------------------------------------------


def grouped(monkeypatch, starts, through=None, of_weight=None, use=None):
    """Weights by layer, given what was noted of each unit and when each weight is first used."""
    count = len(starts)
    flow = flow_of("n NoOp:")
    noted = units(flow, of_weight or range(count), [(1,)] * count)
    noted.starts, noted.through = list(starts), list(through or [0] * count)
    monkeypatch.setattr(layers, "_Units", lambda backward: noted)
    monkeypatch.setattr(layers, "_first_use", lambda gradients: use or [(w, 0) for w in range(count)])
    monkeypatch.setattr(layers, "_used_behind", lambda gradients: [0] * count)
    return group_weights(backward_of(flow))


def test_weights_whose_gradients_start_from_the_same_tensors_are_a_layer(monkeypatch):
    one, other = {(1, 0)}, {(2, 0)}
    assert grouped(monkeypatch, [one, other, one]) == [[0, 2], [1]]
    assert grouped(monkeypatch, [one, {(1, 1)}]) == [[0], [1]]
    assert grouped(monkeypatch, [one, one | other]) == [[0], [1]]


def test_weights_that_start_nowhere_are_layers_of_their_own(monkeypatch):
    assert grouped(monkeypatch, [set(), set()]) == [[0], [1]]
    # By way of the same other layer they are one: that of weight 2.
    assert grouped(monkeypatch, [set(), set(), {(1, 0)}], [C, C, 0]) == [[0, 1], [2]]


def test_a_weight_further_down_is_another_layer(monkeypatch):
    """From the same tensor, but its chain goes back through weight 0; its own value does not count."""
    start = {(1, 0)}
    assert grouped(monkeypatch, [start, start], [0, A]) == [[0], [1]]
    assert grouped(monkeypatch, [start, start], [A, B]) == [[0, 1]]


def test_layers_in_the_order_of_their_first_use(monkeypatch):
    one, two, three = {(1, 0)}, {(2, 0)}, {(3, 0)}
    assert grouped(monkeypatch, [one, two, three], use=[(3, 0), (2, 0), (1, 5)]) == [[2], [1], [0]]
    # The weight that is used first counts, then its place.
    assert grouped(monkeypatch, [one, two, one, two], use=[(3, 0), (2, 9), (2, 1), (4, 0)]) == [
        [0, 2],
        [1, 3],
    ]


def test_only_backward_ops_are_looked_at(monkeypatch):
    flow = flow_of("a Grad:", "b Mul:", "c Grad:")
    noted = []
    monkeypatch.setattr(layers, "_Units", lambda backward: units(flow, (0,)))
    monkeypatch.setattr(layers, "_note", lambda backward, made, node: noted.append(node))
    monkeypatch.setattr(layers, "_first_use", lambda gradients: [(0, 0)])
    monkeypatch.setattr(layers, "_used_behind", lambda gradients: [0])
    group_weights(backward_of(flow, backward="a c"))
    assert noted == [0, 2]


# -- units -----------------------------------------------------------------------------------------


def test_weights_in_their_units(monkeypatch):
    """Weights 0 and 2 are combined before data meet them."""
    monkeypatch.setattr(layers, "units_of", lambda gradients: [0, 1, 0])
    flow = flow_of("n NoOp:")
    weights = [access(flow, name, shape=shape) for name, shape in (("a", (3,)), ("b", (4,)), ("c", (5,)))]
    made = _Units(backward_of(flow, weights=weights))
    assert (made.of_weight, made.needed) == ([0, 1, 0], [0, 1, 0])
    assert made.members == [[0, 2], [1]]
    assert (made.starts, made.through) == ([set(), set()], [0, 0])
    assert [made.shape(unit) for unit in (0, 1)] == [None, (4,)]
    assert [made.of(weights) for weights in (0, A, B, C, A | C, A | B)] == [0, 0b01, 0b10, 0b01, 0b01, 0b11]


# -- what one op says ------------------------------------------------------------------------------

NOTED = flow_of(
    "x _Arg:", "v Read:", "d Grad: x", "c Const:", "dw MatMul: d x", "dh MatMul: d v", "u Mul: dw",
    "two Grad: d:1", "list Pop: d", "own MatMul: two list dh c v",
)  # fmt: skip


@pytest.fixture
def starts_where_asked(monkeypatch):
    """Each gradient starts at the tensor that its own ops read."""
    monkeypatch.setattr(layers, "_start", lambda backward, made, node, port, unit: {(node, port, unit)})


def noted(node, made, **known):
    backward = backward_of(NOTED, **({"backward": "d dw dh two list own"} | known))
    _note(backward, made, NOTED.index[node])
    return made


def test_a_weights_own_op_starts_where_it_reads_shared_ones(starts_where_asked):
    of = NOTED.index
    made = noted(
        "own",
        units(NOTED, d=A | B, two=A | B, list=A | B, dh=B, own=B),
        unstashing="list",
        from_data=ones(NOTED, "x d two list dh dw"),
        depends_on_tensors=bits(NOTED, v=A, c=0),
    )
    # ``two`` is shared; ``list`` hands out what was stashed; ``dh`` is the weight's own; v is another weight.
    assert made.starts == [set(), {(of["two"], 0, 1)}, set()]
    assert made.through == [0, A, 0]


def test_what_is_not_backward_or_has_no_data_starts_nothing(starts_where_asked):
    made = noted("own", units(NOTED, two=A | B, own=B), backward="own", depends_on_tensors=[0] * len(NOTED))
    assert made.starts == [set(), set(), set()]
    known = {"from_data": ones(NOTED, "d"), "depends_on_tensors": bits(NOTED, v=A | C, two=B)}
    made = noted("own", units(NOTED, two=A | B, own=B), **known)
    assert made.starts == [set(), set(), set()]
    assert made.through == [0, A | B | C, 0]


def test_a_shared_op_starts_what_it_hands_over(starts_where_asked, monkeypatch):
    of = NOTED.index
    monkeypatch.setattr(
        layers, "_ports_to_update", lambda backward, node, weight: {0, 3} if weight == 2 else set()
    )
    made = noted("d", units(NOTED, d=A | B | C), hands={"d": B | C})
    assert made.starts == [set(), set(), {(of["d"], 0, 2), (of["d"], 3, 2)}]
    assert made.through == [0, 0, 0]


def test_an_op_that_no_unit_needs_says_nothing(starts_where_asked):
    made = noted("own", units(NOTED, two=A | B), depends_on_tensors=bits(NOTED, v=A))
    assert (made.starts, made.through) == ([set(), set(), set()], [0, 0, 0])


def test_outputs_that_an_update_takes():
    flow = flow_of("d Grad:", "e Grad:", "u Mul: d:2 e d:1", "v Mul: d", "both Mul: d:3", "g Grad: d:4")
    reach = bits(flow, u=B, v=0b1000, both=A | B, g=B)
    backward = backward_of(flow, update="u v both", reach=reach)
    assert _ports_to_update(backward, 0, 1) == {1, 2}
    assert _ports_to_update(backward, 0, 3) == {0}
    assert _ports_to_update(backward, 1, 1) == {0}
    assert _ports_to_update(backward, 1, 0) == set()


# -- where gradients start -------------------------------------------------------------------------


def fused(rows=None, kind="Grad", unit=1, port=1, shape=(4,), outputs=((5, 4), (4,)), update="", **needed):
    """``f`` gives dO by port 0 and something to weight 1's own op by port 1."""
    rows = rows or ("g Grad:", f"f {kind}: g", "on Grad: f", "own Mul: f:1")
    flow = flow_of(*rows, shapes={"f": list(outputs)})
    needed = {name: of for name, of in ({"on": A | B, "own": B} | needed).items() if name in flow.index}
    made = units(flow, shapes=((3, 4), shape, (4, 2)), **needed)
    backward = " ".join(name for name in flow.names if name != update)
    facts_of_all = backward_of(flow, backward, update, reach=bits(flow, own=B))
    return _is_fused_gradient(facts_of_all, made, flow.index["f"], port, unit)


def test_one_op_that_computes_do_and_a_gradient():
    assert fused()
    assert fused(outputs=((5, 4), None))
    # If an update takes it as it is, what that writes says whose it is.
    assert fused(update="own", own=0)


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "Split"},
        {"kind": "Reshape"},
        {"unit": 0},
        {"port": 0},
        {"own": A | B},
        {"own": 0},
        {"shape": (5,)},
        {"outputs": ((5, 4), (5,))},
        {"rows": ("g Grad:", "f Grad: g", "own Mul: f:1")},  # nothing else is read
        {"rows": ("g Grad:", "f Grad: g", "on Grad: f:1", "own Mul: f:1", "x Mul: f")},  # both read one port
    ],
)
def test_ops_that_do_not_compute_both(changed):
    assert not fused(**changed)


def test_an_output_that_nobody_knows_counts_as_the_gradient():
    assert fused(outputs=((5, 4),))


def test_all_that_read_an_output_count():
    rows = ("g Grad:", "f Grad: g", "on Grad: f", "own Mul: f:1", "more Mul: f:1")
    assert fused(rows=rows, more=B)
    assert not fused(rows=rows, more=C)


def test_what_else_a_reader_reads_does_not_count():
    assert fused(rows=("g Grad:", "f Grad: g", "z Grad: g", "on Grad: f g:1 z:1", "own Mul: f:1 g z"))


def test_a_gradient_starts_where_its_fused_op_does(monkeypatch):
    flow = flow_of("g Grad:", "x Tanh:", "h Grad:", "f Grad: g:1 x h")
    monkeypatch.setattr(
        layers, "_origin", lambda backward, node, port, shape: {(flow.names[node], port, shape)}
    )
    backward = backward_of(flow, "g h f", from_data=ones(flow, "g x f"))
    asked = []
    for is_fused, start in ((True, {("g", 1, (4,))}), (False, {("f", 2, (4,))})):
        monkeypatch.setattr(
            layers, "_is_fused_gradient", lambda *given, one=is_fused: asked.append(given[2:]) or one
        )
        assert _start(backward, units(flow), flow.index["f"], 2, 1) == start
    assert asked == [(flow.index["f"], 2, 1)] * 2


ORIGIN = flow_of(
    "x _Arg:", "axes BroadcastGradientArgs: x", "g Grad: x", "h Grad: x", "view Reshape: g:2 x",
    "again Cast: view", "sum Sum: h:1 axes", "both Identity: again sum", "reduced Sum: g x",
    "end Identity: x",
)  # fmt: skip
WITH_DATA = "x g h view again sum both reduced end"
BEHIND_DATA = "axes g h view again sum both reduced end"


def origin(name, port=0, shape=None, backward=BEHIND_DATA, data=WITH_DATA):
    of = backward_of(ORIGIN, backward, from_data=ones(ORIGIN, data))
    return {(ORIGIN.names[node], at) for node, at in _origin(of, ORIGIN.index[name], port, shape)}


def test_the_tensor_behind_views():
    assert origin("g", 2) == {("g", 2)}
    assert origin("view") == {("g", 2)}
    assert origin("again") == {("g", 2)}
    assert origin("sum") == {("h", 1)}
    assert origin("both") == {("g", 2), ("h", 1)}
    # A view of nothing that is backward is the start itself.
    assert origin("end", 1) == {("end", 1)}
    assert origin("again", 5, data="again") == {("again", 5)}
    assert origin("again", 5, backward="again") == {("again", 5)}


def test_the_tensor_behind_what_is_reduced_to_the_weights_shape(monkeypatch):
    assert origin("reduced", shape=(4,)) == {("reduced", 0)}
    monkeypatch.setattr(
        layers,
        "_is_reduced",
        lambda backward, node, port, shape: shape == (4,) and node == ORIGIN.index["reduced"],
    )
    assert origin("reduced", shape=(4,)) == {("g", 0)}
    assert origin("reduced", shape=(5,)) == {("reduced", 0)}


def test_sums_that_undo_a_broadcast():
    flow = flow_of(
        "x _Arg:", "args BroadcastGradientArgs:", "c Const:", "a Sum: x args", "b Sum: x c", "d Mean: x args"
    )
    backward = backward_of(flow)
    assert [_undoes_broadcast(backward, node) for node in nodes(flow, "a b d")] == [True, False, False]


def reduced(shape, port=0, outputs=((5, 4), (4,)), targets=((5, 4), (5, 4)), backward="r s", kind="Sum"):
    flow = flow_of(
        f"g {kind}:",
        f"r {kind}: g",
        f"s {kind}: g",
        shapes={"g": list(outputs), "r": [targets[0]], "s": [targets[1]]},
    )
    return _is_reduced(backward_of(flow, f"g {backward}"), 0, port, shape)


def test_a_result_of_a_vectors_shape():
    assert reduced((4,), port=1)
    assert not reduced((4,), port=0)
    assert reduced((1, 4, 1), port=1)
    # A matrix may have the shape by chance.
    assert not reduced((5, 4))
    assert not reduced((4, 4), port=1, outputs=((5, 4), (4, 4)))
    assert not reduced(None, port=1)
    assert not reduced((), port=1)
    # A kernel of one output is a matrix: as many examples as inputs have its shape.
    assert not reduced((4, 1), outputs=((4, 1),), targets=((4, 1), (4, 1)))


@pytest.mark.parametrize("kind", ["MatMul", "ReluGrad", "Mul"])
def test_what_is_no_sum_may_have_a_vectors_shape(kind):
    """The dO of a batch of one example."""
    assert not reduced((4,), outputs=((1, 4),), targets=((4,), (1, 4)), kind=kind)


def test_what_is_computed_from_a_sum():
    flow = flow_of(
        "d Grad:",
        "a Sum: d",
        "b Mul: a",
        "c Mul: d",
        shapes={"d": [(5, 4)], "a": [(4,)], "b": [(4,)], "c": [(1, 4)]},
    )
    backward = backward_of(flow, "d a b c")
    assert [_is_reduced(backward, node, 0, (4,)) for node in nodes(flow, "a b c")] == [True, True, False]


def test_results_that_only_go_into_a_vectors_shape():
    assert reduced((4,), targets=((4,), (1, 4)))
    assert not reduced((4,), targets=((4,), (5, 4)))
    assert reduced((4,), targets=((4,), (5, 4)), backward="r")  # s is forward
    assert not reduced((4,), backward="")


@pytest.mark.parametrize(
    ("known", "shape", "has"),
    [
        ([(4,)], (4,), True),
        ([(5, 4), (4,)], (4,), True),
        ([(1, 4)], (4,), True),
        ([(4,)], (4, 1), True),
        ([(2, 4)], (4,), False),
        ([(4, 2)], (2, 4), False),
        ([None], (4,), False),
        ([None, (4,)], (4,), True),
        ([], (4,), False),
        ([(4,)], None, False),
        ([()], (), False),
        ([(None,)], (4,), False),
        ([(2,)], (4,), False),
        ([(2, 4)], (2, 4), True),
    ],
)
def test_outputs_of_a_shape_apart_from_ones(known, shape, has):
    assert _has_shape([OutputInfo("float32", one, 4) for one in known], shape) is has


# -- first use -------------------------------------------------------------------------------------


def test_weights_by_the_depth_at_which_data_meet_them():
    """``deep`` comes first in the graph and last from the input; ``one`` reads its weight itself."""
    flow = flow_of(
        "x _Arg:", "d Read:", "v Read:", "w Read:", "scaled Mul: v", "h MatMul: x scaled", "i Tanh: h",
        "deep MatMul: i d", "side MatMul: x w", "one Gather: x", "back MatMul: x v",
    )  # fmt: skip
    weights = [
        access(flow, name, reads=reads)
        for name, reads in (("d", "d"), ("v", "v"), ("w", "w"), ("one", "one"), ("none", ""))
    ]
    depends = bits(flow, d=1, v=2, w=4, scaled=2, h=2, i=2, deep=3, side=4, one=8, back=2)
    gradients = facts(
        flow, weights=weights, depends=depends, order=[*range(9), 10, 9],
        from_data=ones(flow, "x h i deep side one back"),
        forward=ones(flow, "x d v w scaled h i deep side one"),
    )  # fmt: skip
    size = len(flow)
    assert _first_use(gradients) == [(4, 7), (2, 5), (2, 8), (2, 10), (size, size)]


def test_a_weight_counts_where_it_is_used_first():
    flow = flow_of("x _Arg:", "w Read:", "h MatMul: x w", "i MatMul: h w", "j MatMul: x w")
    known = {
        "from_data": ones(flow, "x h i j"),
        "forward": [1] * 5,
        "depends": bits(flow, w=1, h=1, i=1, j=1),
    }
    for order, place in (([0, 1, 2, 3, 4], 2), ([0, 1, 4, 3, 2], 2), ([4, 0, 1, 2, 3], 0)):
        gradients = facts(flow, weights=[access(flow, "w", reads="w")], order=order, **known)
        assert _first_use(gradients) == [(2, place)]


def test_two_weights_that_one_op_reads():
    flow = flow_of("x _Arg:", "both Fused: x")
    weights = [access(flow, name, reads="both") for name in "vw"]
    gradients = facts(flow, weights=weights, order=[0, 1], from_data=[1, 1], forward=[1, 1])
    assert _first_use(gradients) == [(2, 1), (2, 1)]


def test_weights_that_others_are_used_behind():
    """``c`` meets data twice: first those of nobody, then what ``g`` has made; ``t`` its own, too."""
    flow = flow_of(
        "x _Arg:", "c Read:", "g Read:", "t Read:", "real MatMul: x c", "made MatMul: x g",
        "fake MatMul: made c", "first MatMul: x t", "again MatMul: first t", "back MatMul: fake g",
    )  # fmt: skip
    weights = [access(flow, name, reads=name) for name in "cgt"]
    depends = bits(flow, c=A, g=B, t=C, real=A, made=B, fake=A | B, first=C, again=C, back=A | B)
    gradients = facts(
        flow, weights=weights, depends=depends,
        from_data=ones(flow, "x real made fake first again back"),
        forward=ones(flow, "x c g t real made fake first again"),
    )  # fmt: skip
    assert _used_behind(gradients) == [B, 0, C]


def test_layers_in_the_order_in_which_they_are_used_behind_each_other():
    three = [[0], [1], [2]]
    assert _in_order(three, [0, 0, 0]) == [0, 1, 2]
    assert _in_order(three, [B, 0, 0]) == [1, 0, 2]
    assert _in_order(three, [B, C, 0]) == [2, 1, 0], "by way of others"
    assert _in_order(three, [B, A, 0]) == [0, 1, 2], "each behind the other"
    assert _in_order(three, [B | C, A, 0]) == [2, 0, 1]
    assert _in_order([[1, 2], [0]], [0, A, 0]) == [1, 0], "any weight of a layer"
