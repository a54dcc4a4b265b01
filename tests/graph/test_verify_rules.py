"""Each rule broken by itself in a hand-made graph, and the nearest thing that is allowed."""

from __future__ import annotations

import pytest
from graphs import graph_of, node

from grappler_passes.errors import PassError, VerifyError
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph
from grappler_passes.passes.base import REORDERING, Relaxation
from grappler_passes.passes.verify import VerifyPass, verify

STEP = (
    "h _Arg:",
    "x _Arg:",
    "read ReadVariableOp: h",
    "mul Mul: read x",
    "pair IdentityN: mul x",
    "copy Identity: pair:1",
    "add Add: copy mul",
    "group NoOp: ^mul",
    "new Identity: add ^group",
    "write AssignVariableOp: h new ^read",
    "out _Retval: add ^write",
)


def step(**changed):
    """The step with other rows for some names; None leaves one out."""
    rows = {row.split()[0]: row for row in STEP}
    unknown = {name: row for name, row in changed.items() if name not in rows}
    rows |= {name: f"{name} {row}" for name, row in changed.items() if row is not None}
    return graph_of(*(row for name, row in rows.items() if name in unknown or changed.get(name, row)))


def broken(after, before=None, **options):
    with pytest.raises(VerifyError) as caught:
        verify(before or step(), after, **options)
    return caught.value.node, caught.value.rule, str(caught.value)


def test_the_step_itself_is_allowed():
    verify(step(), step())
    verify(graph_of(), graph_of())


def test_control_inputs_come_last():
    assert broken(step(mul="Mul: ^x read x"))[:2] == ("mul", "structure")
    assert "data input 'x' after a control input" in broken(step(mul="Mul: read ^h x"))[2]
    # In every node anew: the control input of one says nothing of the next.
    verify(step(), step(mul="Mul: read x ^h ^read", add="Add: copy mul ^x"))


def test_inputs_have_producers_and_names_are_given_once():
    assert broken(step(mul="Mul: read nobody"))[:2] == ("mul", "structure")
    twice = step()
    node(twice, "x", "_Arg")
    assert broken(twice)[:2] == ("x", "structure")
    assert broken(step(read="ReadVariableOp: h ^out"))[1] == "acyclic"
    assert broken(step(mul="Mul: read out"))[:2] == ("mul", "acyclic")


def test_ends_side_effects_and_fetches_are_kept():
    placeholder = graph_of("p Placeholder:", "a Identity: p")
    assert broken(graph_of(), placeholder)[:2] == ("p", "kept")
    assert "a Placeholder may not be dropped" in broken(graph_of("a Identity:"), placeholder)[2]
    assert broken(step(out=None))[:2] == ("out", "kept")
    assert broken(step(write=None, out="_Retval: add"))[:2] == ("write", "kept")
    assert broken(step(out=None), replaced={"out"})[:2] == ("out", "kept")
    assert broken(step(group=None, new="Identity: add ^mul"), fetches=["group"])[:2] == ("group", "kept")
    verify(step(), step(group=None, new="Identity: add ^mul"), fetches=["mul"])


def test_copies_and_groups_may_go_and_others_when_a_pass_says_so():
    verify(step(), step(group=None, new="Identity: add"))
    verify(step(), step(copy=None, add="Add: pair:1 mul"))
    verify(step(), step(pair=None, copy="Identity: x"))
    without = step(add=None, new="Identity: mul ^group", out="_Retval: mul ^write")
    node_of, rule, message = broken(without)
    assert (node_of, rule) == ("add", "kept")
    assert "a Add was dropped and no pass says it replaced it" in message
    # Ops that read it read something else, unless they were replaced with it.
    assert broken(without, replaced={"add"})[:2] == ("new", "data inputs")
    verify(step(), without, replaced={"add", "new", "out"})


def training(**kinds):
    ops = {name: Op(name, "Any", kind) for name, kind in kinds.items()}
    return TrainingGraph(ops, (Layer(0, ("v",)),), ())


def test_updates_and_communication_are_kept():
    after = step(copy=None, group=None, add="Add: x mul", new="Identity: add")
    verify(step(), after, training(copy=OpKind.WEIGHT_GRAD, group=OpKind.OTHER))
    assert broken(after, training_graph=training(copy=OpKind.UPDATE))[:2] == ("copy", "kept")
    assert broken(after, training_graph=training(group=OpKind.COMMUNICATION))[:2] == ("group", "kept")
    with pytest.raises(PassError, match="copy"):
        VerifyPass(step())(after, training(copy=OpKind.UPDATE))
    verify(step(), after, training(mul=OpKind.UPDATE, write=OpKind.UPDATE))
    check = VerifyPass(step(), frozenset({"mul"})).knowing(frozenset({"add"}))
    assert check.replaced == {"mul", "add"}


def test_a_node_keeps_its_op_and_what_it_computes_with():
    for keys in ("T", "_note dtype", "dtype _note"):
        assert broken(noted(*keys.split()))[:2] == ("mul", "attributes")
        assert broken(step(), before=noted(*keys.split()))[:2] == ("mul", "attributes")
        verify(step(), noted(*keys.split()), replaced={"mul"})
    verify(step(), noted("_note"))
    name, rule, message = broken(step(mul="Div: read x"))
    assert (name, rule) == ("mul", "op")
    assert "was Mul, is Div" in message
    assert broken(step(mul="Div: read x"), replaced={"mul"})[1] == "op"


def test_data_inputs_are_the_same_tensors_seen_through_copies():
    verify(step(), step(add="Add: pair:1 mul"))
    verify(step(), step(add="Add: x mul"))
    verify(step(), step(new="Identity: extra ^group", extra="Identity: add"))
    assert broken(step(add="Add: pair mul"))[:2] == ("add", "data inputs")
    assert broken(step(add="Add: mul copy"))[:2] == ("add", "data inputs")
    assert broken(step(add="Add: copy mul mul"))[:2] == ("add", "data inputs")
    assert broken(step(mul="Mul: read x:1"))[:2] == ("mul", "data inputs")
    verify(step(), step(add="Add: mul copy"), replaced={"add"})
    # With side effects not even a pass may give it other inputs.
    assert broken(step(write="AssignVariableOp: h add:1 ^read"), replaced={"write"})[:2] == (
        "write",
        "data inputs",
    )


def test_ops_on_one_state_keep_their_order():
    name, rule, message = broken(
        step(write="AssignVariableOp: h x"), before=step(write="AssignVariableOp: h x ^read")
    )
    assert (name, rule) == ("write", "side effects")
    assert "no longer runs after 'read'" in message
    # Another way from the one to the other will do; ``add`` reads what was read.
    verify(step(), step(write="AssignVariableOp: h new"))
    # The order may be kept by what the new value waits for, also behind a copy.
    held = {"write": "AssignVariableOp: h new", "new": "Identity: x ^group"}
    for lost in ({"write": "AssignVariableOp: h x"}, {"new": "Identity: x"}):
        assert broken(step(**held | lost), before=step(**held))[:2] == ("write", "side effects")
    otherwise = {"new": "Identity: x", "group": None, "write": "AssignVariableOp: h new ^read"}
    verify(step(**held), step(**held | otherwise))
    # Two reads need no order.
    reads = ("h _Arg:", "a ReadVariableOp: h", "b ReadVariableOp: h ^a")
    verify(graph_of(*reads), graph_of("h _Arg:", "a ReadVariableOp: h", "b ReadVariableOp: h"))
    writes = ("h _Arg:", "a AssignVariableOp: h h", "b AssignVariableOp: h h ^a")
    apart = graph_of("h _Arg:", "a AssignVariableOp: h h", "b AssignVariableOp: h h")
    assert broken(apart, before=graph_of(*writes))[:2] == ("b", "side effects")
    # The first node of the graph counts as any other.
    swapped = graph_of("b PrintV2: ^a", "a PrintV2:")
    assert broken(graph_of("b PrintV2:", "a PrintV2:"), before=swapped)[:2] == ("b", "side effects")


def test_a_new_edge_has_to_be_legal_in_the_original_graph():
    assert broken(step(x="_Arg: ^h"))[:2] == ("x", "control edge")
    verify(step(), step(out="_Retval: add ^write ^group", copy="Identity: pair:1 ^read"))
    # Nodes that are new may wait, and be waited for.
    verify(step(), step(copy="Identity: pair:1 ^join", join="NoOp: ^read"))


COND = (
    "p Placeholder:",
    "x Placeholder:",
    "y Tanh: x",
    "switch Switch: x p",
    "sin Sin: switch:1",
    "cos Cos: switch",
    "merge Merge: cos sin",
    "end Exp: merge",
)


def cond(**changed):
    rows = {row.split()[0]: row for row in COND}
    return graph_of(*(rows | {name: f"{name} {row}" for name, row in changed.items()}).values())


def test_an_edge_out_of_a_branch_spreads_deadness():
    """Also where a node stands before the Merge that would bring both sides together again."""
    name, rule, message = broken(cond(y="Tanh: x ^sin"), before=cond())
    assert (name, rule) == ("y", "control edge")
    assert "from 'sin': the source may be dead where the target is not" in message
    assert broken(cond(end="Exp: merge ^sin"), before=cond())[:2] == ("end", "control edge")
    verify(cond(), cond(sin="Sin: switch:1 ^y", end="Exp: merge ^y"))
    # Edges that were there before may stay, whatever they are.
    verify(cond(end="Exp: merge ^sin"), cond(end="Exp: merge ^sin ^y"))
    # An edge behind one that was there before is looked at too.
    both = cond(end="Exp: merge ^y ^cos")
    assert broken(both, before=cond(end="Exp: merge ^y"))[:2] == ("end", "control edge")


LOOP = (
    "x Placeholder:",
    "enter Enter: x",
    "merge Merge: enter next",
    "cond LoopCond: merge",
    "switch Switch: merge cond",
    "body Sin: switch:1",
    "next NextIteration: body",
    "exit Exit: switch",
    "outside Exp: x",
)


def loop(**changed):
    rows = {row.split()[0]: row for row in LOOP}
    return graph_of(*(rows | {name: f"{name} {row}" for name, row in changed.items()}).values())


def test_all_inputs_arrive_in_one_frame():
    verify(loop(), loop())
    name, rule, message = broken(loop(body="Sin: switch:1 ^outside"), before=loop())
    assert (name, rule) == ("body", "frames")
    assert "inputs arrive in frames [(), ('loop',)]" in message
    assert broken(loop(outside="Exp: x ^body"), before=loop())[:2] == ("outside", "frames")


def with_library(*names):
    graph = step()
    for name in names:
        graph.library.function.add().signature.name = name
    return graph


def moved(name, device):
    graph = step()
    next(made for made in graph.node if made.name == name).device = device
    return graph


def noted(*keys):
    graph = step()
    for key in keys:
        next(made for made in graph.node if made.name == "mul").attr[key].i = 1
    return graph


@pytest.mark.parametrize(
    ("relaxation", "after", "node_of", "rule", "detail"),
    [
        (Relaxation.NEW_NODES, step(extra="Abs: mul"), "extra", "new nodes", "a Abs was added"),
        (Relaxation.MORE_WAITS, step(add="Add: copy mul ^read"), "add", "more waits", "waits for ['read']"),
        (Relaxation.FEWER_WAITS, step(new="Identity: add"), "new", "fewer waits", "waits for ['group']"),
        (Relaxation.DEVICES, moved("add", "/GPU:0"), "add", "devices", "was on '', is on '/GPU:0'"),
        (Relaxation.NOTES, noted("_note"), "mul", "attributes", "_note is not what it was"),
        (Relaxation.COPIES, step(add="Add: pair:1 mul"), "add", "data inputs", "reads [('pair', 1)"),
        (Relaxation.COPIES, step(copy=None, add="Add: pair:1 mul"), "copy", "kept", "was dropped"),
    ],
)
def test_a_difference_that_no_pass_declares(relaxation, after, node_of, rule, detail):
    name, broken_rule, message = broken(after, relaxes=REORDERING - {relaxation})
    assert (name, broken_rule) == (node_of, rule)
    assert detail in message
    assert broken(after, relaxes=())[0] == node_of
    verify(step(), after, relaxes={relaxation})


def test_the_library_is_part_of_the_graph():
    before, after = with_library("one", "two"), with_library("one", "three")
    assert broken(after, before, relaxes=REORDERING)[:2] == ("three", "functions")
    verify(before, after, relaxes={Relaxation.FUNCTIONS})
    verify(before, with_library("one", "two"), relaxes=())


def test_replaced_nodes_count_only_where_that_is_declared():
    without = step(add=None, new="Identity: mul ^group", out="_Retval: mul ^write")
    replaced = {"add", "new", "out"}
    assert broken(without, replaced=replaced, relaxes=REORDERING - {Relaxation.REPLACED_NODES})[0] == "add"
    verify(step(), without, replaced=replaced, relaxes={Relaxation.REPLACED_NODES})
    # Declared or not, a node that is not among them stays as it was, and one that is stays on its device.
    assert broken(without, replaced={"add", "new"}, relaxes={Relaxation.REPLACED_NODES})[0] == "out"
    on_another = moved("add", "/GPU:0")
    assert broken(on_another, replaced={"add"}, relaxes={Relaxation.REPLACED_NODES})[1] == "devices"
    waiting = step(add="Add: copy mul ^read")
    verify(step(), waiting, replaced={"add"}, relaxes={Relaxation.REPLACED_NODES})
    assert broken(waiting, replaced={"mul"}, relaxes={Relaxation.REPLACED_NODES})[:2] == ("add", "more waits")


def test_a_replaced_node_may_be_another_op_where_that_is_declared():
    after, replaced = step(mul="Div: read x"), {"mul"}
    allowed = {Relaxation.REPLACED_NODES, Relaxation.OPS}
    verify(step(), after, replaced=replaced, relaxes=allowed)
    assert broken(after, replaced=(), relaxes=allowed)[:2] == ("mul", "op")
    assert broken(after, replaced=replaced, relaxes={Relaxation.OPS})[:2] == ("mul", "op")
    assert broken(after, replaced=replaced, relaxes={Relaxation.REPLACED_NODES})[:2] == ("mul", "op")


def test_a_replaced_node_may_have_side_effects_where_that_is_declared():
    allowed = {Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS}
    after = step(write="AssignVariableOp: h add:1 ^read")
    verify(step(), after, replaced={"write"}, relaxes=allowed)
    assert broken(after, replaced=(), relaxes=allowed)[:2] == ("write", "data inputs")
    gone = step(write=None, out="_Retval: add")
    verify(step(), gone, replaced={"write", "out"}, relaxes=allowed)
    assert broken(gone, replaced={"write", "out"}, relaxes=allowed - {Relaxation.SIDE_EFFECTS})[1] == "kept"
    # The graph's ends stay all the same, and those that stay keep their order.
    assert broken(step(out=None), replaced={"out"}, relaxes=set(Relaxation))[:2] == ("out", "kept")
    early, waiting = step(write="AssignVariableOp: h x"), step(write="AssignVariableOp: h x ^read")
    assert broken(early, waiting, replaced={"write"}, relaxes=set(Relaxation))[:2] == (
        "write",
        "side effects",
    )
