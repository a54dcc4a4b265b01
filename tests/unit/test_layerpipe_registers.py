"""Registers of a small step that is spread over rounds, and what each op then reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.errors import PassError, VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.passes.base import copy_of
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.cutting import LATE, LOCAL, CutPass, Reads, Register, RoundPass
from tf_ooo.modes.layerpipe.delays import delays_of
from tf_ooo.modes.layerpipe.rounds import Rounds

A, B = "/device:A", "/device:B"


def traced(*rows, fetches=(), outputs=None):
    """``"name Op: input input"``; all outputs are floats, but for those given."""
    graph = graph_pb2.GraphDef()
    for row in rows:
        head, _, inputs = row.partition(":")
        name, op = head.split()
        graph.node.add(name=name, op=op, input=inputs.split(), device="/device:old")
    number = OutputInfo("float32", (), 4)
    infos = {node.name: [number] * 3 for node in graph.node} | (outputs or {})
    index = GraphIndex(graph)
    return SimpleNamespace(
        graph_def=graph, index=index, outputs=infos, fetches=tuple(fetches), dump_dir=None, ran=0
    )


def rounds(of, device_of=None, batch=0, before=(), frozen=()):
    return Rounds(of, device_of or {}, batch, tuple(before), {}, frozenset(frozen))


def nodes(delays):
    return {node.name: node for node in delays.graph_def.node}


def inputs(delays):
    return {name: list(node.input) for name, node in nodes(delays).items()}


def late(number, delay):
    return f"{LATE}/{number}_{delay}"


STEP = ("x Placeholder:", "one Const:", "f Tanh: x one", "g Tanh: f:1 x:2", "h Add: f:1 g ^f", "k Add: f h:1")


def test_each_round_between_is_a_register():
    """f runs in round 1 on A; g in 2 and h in 4 on B, k in 4 on A."""
    step = traced(*STEP, fetches=("k:1", "h"))
    devices = {"f": A, "g": B, "h": B, "k": A}
    delays = delays_of(step, rounds({"x": 1, "f": 1, "g": 2, "h": 4, "k": 4}, devices, batch=1))
    assert inputs(delays) == {
        "x": [], "one": [], "f": ["x", "one"], "g": [late(0, 1), late(1, 1)],
        "h": [late(0, 3), late(2, 2)], "k": [late(3, 3), "h:1"],
    }  # fmt: skip
    assert delays.registers == [
        Register(0, "f:1", B, 1, 3),
        Register(1, "x:2", B, 1, 1),
        Register(2, "g", B, 2, 2),
        Register(3, "f", A, 1, 3),
    ]
    assert [register.name(2) for register in delays.registers[:2]] == [late(0, 2), late(1, 2)]
    assert (delays.logs, delays.logs_round) == (["k:1", "h"], 4)
    assert {name: node.device for name, node in nodes(delays).items()} == {
        "x": "", "one": "", "f": A, "g": B, "h": B, "k": A,
    }  # fmt: skip
    assert delays.copies == {}
    assert all(node.device == "/device:old" for node in step.graph_def.node)


def test_the_pass_makes_another_graph():
    """A copy of f under another name; what is not named goes."""
    graph = traced(*STEP).graph_def
    result = CutPass({"late_f": Reads("f", ("x", "late/0_1"), B)}, rounds({}), (), {}).run(graph, None)
    assert result.modified
    assert [(n.name, n.op, list(n.input), n.device) for n in result.graph_def.node] == [
        ("late_f", "Tanh", ["x", "late/0_1"], B)
    ]
    assert [node.name for node in graph.node] == ["x", "one", "f", "g", "h", "k"]


CUT = {
    "x": Reads("x", (), ""),
    "f": Reads("f", ("x",), A),
    "g": Reads("g", (late(0, 1), "^f"), B),
    "h": Reads("h", (late(0, 2), late(1, 1)), B),
}


def cut(changed, more=()):
    """Cut a step of which some nodes read other inputs than they should."""
    step = traced("x Placeholder:", "f Tanh: x", "g Tanh: f:1", "h Add: f:1 g", *more).graph_def
    in_rounds = rounds({"x": 0, "f": 0, "g": 1, "h": 2}, before=[("f", "g")])
    reads = {name: read for name, read in (CUT | changed).items() if read is not None}
    rows = (Register(0, "f:1", B, 0, 2), Register(1, "g", B, 1, 1))
    return CutPass(reads, in_rounds, rows, {})(step).graph_def


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"h": None}, "'kept' broken at node 'h': it is in no round"),
        ({"m": CUT["g"]}, "'new nodes' broken at node 'm': it is not in the step"),
        ({"h": Reads("g", CUT["h"].inputs, B)}, "'op' broken at node 'h': was Add, is Tanh"),
        ({"f": Reads("f", ("x:1",), A)}, "at node 'f': read x, reads x:1"),
        ({"f": Reads("f", ("a",), A)}, "at node 'f': read x, reads a"),
        ({"g": Reads("g", (late(0, 1),), B)}, "at node 'g': no longer runs after 'f'"),
        ({"h": Reads("h", ("f:1", late(1, 1)), B)}, "at node 'h': reads f:1 of round 0 in round 2, past all"),
        (
            {"g": Reads("g", (late(1, 2), "^f"), B)},
            f"'g': reads {late(1, 2)} of round 0 in round 1, past",
        ),
        ({"h": Reads("h", (late(0, 1), late(1, 1)), B)}, "read f:1 of round 0, reads f:1 of 1 rounds before"),
        ({"h": Reads("h", (late(0, 2), late(0, 1)), B)}, "read g of round 1, reads f:1 of 1 rounds before"),
    ],
)
def test_a_wrong_cut_is_refused(changed, message):
    with pytest.raises(PassError, match=message):
        cut(changed)


def test_an_op_in_no_round_reads_nothing_of_a_round():
    assert [node.name for node in cut({}).node] == list("xfgh")
    with pytest.raises(PassError, match="at node 'k': in round None it reads x, which round 0 makes"):
        cut({"k": Reads("k", ("x",), A)}, ["k Tanh: x"])


def test_nothing_is_read_before_it_is_made():
    step = traced("x Placeholder:", "f Tanh: x").graph_def
    earlier = CutPass({name: CUT[name] for name in "xf"}, rounds({"x": 2, "f": 1}), (), {})
    with pytest.raises(PassError, match="at node 'f': in round 1 it reads x, which round 2 makes"):
        earlier(step)


def test_within_a_round_all_is_as_it_was():
    delays = delays_of(traced(*STEP, fetches=("k",)), rounds(dict.fromkeys("xfghk", 3), {}, batch=3))
    assert inputs(delays)["k"] == ["f", "h:1"]
    assert (delays.registers, delays.logs, delays.logs_round) == ([], ["k"], 3)


def test_results_are_those_of_one_batch():
    """g, made two rounds before h, is read as late as h is; constants are never late."""
    step = traced(*STEP, fetches=("g", "h", "one"))
    delays = delays_of(step, rounds({"x": 0, "f": 0, "g": 1, "h": 3, "k": 3}, {"g": B, "f": A}))
    assert delays.logs[1:] == ["h", "one"]
    assert delays.logs_round == 3
    last = delays.logs[0]
    (register,) = (r for r in delays.registers if last in (r.name(d) for d in range(1, r.depth + 1)))
    # On the device where it was made.
    assert (register.source, register.device, register.name(2)) == ("g", B, last)
    none = delays_of(traced("one Const:", fetches=("one",)), rounds({}, batch=2))
    assert (none.logs, none.logs_round) == (["one"], 0)
    assert delays_of(traced("one Const:"), rounds({}, batch=5)).logs_round == 5


def test_an_input_that_is_on_no_device_is_kept_on_the_first():
    step = traced("x Placeholder:", "f Tanh: x", fetches=("x", "f"))
    delays = delays_of(step, rounds({"x": 0, "f": 2}, {"f": B}))
    assert delays.registers == [Register(0, "x", B, 0, 2)]
    assert delays.logs == [late(0, 2), "f"]


def test_control_inputs_are_those_between_ops_on_one_variable():
    """The old ones go; each new one once."""
    order = [("f", "h"), ("g", "h"), ("f", "h"), ("f", "k")]
    delays = delays_of(traced(*STEP), rounds(dict.fromkeys("xfghk", 0), before=order))
    assert inputs(delays)["h"] == ["f:1", "g", "^f", "^g"]
    assert inputs(delays)["k"] == ["f", "h:1", "^f"]


@pytest.mark.parametrize("dtype", ["resource", "variant"])
def test_what_cannot_be_stored_is_refused_by_name(dtype):
    outputs = {"f": [OutputInfo("float32", (), 4), OutputInfo(dtype, (), 4)]}
    step = traced(*STEP, outputs=outputs)
    of = {"x": 0, "f": 0, "g": 1, "h": 1, "k": 1}
    with pytest.raises(GraphError, match=f"'f' makes a {dtype}, which later rounds would read"):
        delays_of(step, rounds(of, {"f": A}))
    delays_of(step, rounds(dict.fromkeys(of, 0)))


READS = (
    "v VarHandleOp:", "u VarHandleOp:", "first ReadVariableOp: v", "again ReadVariableOp: v ^first",
    "other ReadVariableOp: u", "x Placeholder:", "assign AssignVariableOp: v x ^again",
    "newer ReadVariableOp: v ^assign", "a Tanh: first", "b Tanh: again", "c Tanh: newer", "d Tanh: other",
)  # fmt: skip


def test_reads_of_one_value_share_their_registers():
    """``again`` reads what ``first`` does; ``newer`` what was written between, ``other`` another variable."""
    of = {"first": 1, "again": 1, "other": 1, "assign": 1, "newer": 1, "x": 1, "a": 2, "b": 3, "c": 2, "d": 2}
    devices = dict.fromkeys(of, A)
    delays = delays_of(traced(*READS), rounds(of, devices))
    assert [inputs(delays)[name] for name in "abcd"] == [
        [late(0, 1)],
        [late(0, 2)],
        [late(1, 1)],
        [late(2, 1)],
    ]
    assert [(r.source, r.depth) for r in delays.registers] == [("first", 2), ("newer", 1), ("other", 1)]
    # Two writes, another state, another round: nothing is shared.
    apart = delays_of(traced(*READS), rounds(of | {"again": 2}, devices))
    assert [(r.source, r.depth) for r in apart.registers] == [
        ("first", 1), ("again", 1), ("newer", 1), ("other", 1),
    ]  # fmt: skip
    # Handles are in no round, and read as they are.
    assert inputs(delays)["again"] == ["v"]


def test_only_writes_of_the_step_part_reads():
    """A write that is in no round, and an op that changes no state, do not."""
    of = {"first": 1, "again": 1, "newer": 1, "a": 2, "b": 2, "c": 2}
    delays = delays_of(traced(*READS), rounds(of, dict.fromkeys(of, A)))
    assert [inputs(delays)[name] for name in "abc"] == [[late(0, 1)]] * 3
    gathered = [row.replace("assign AssignVariableOp: v x", "assign ResourceGather: v x") for row in READS]
    of |= {"assign": 1, "x": 1, "rows": 2}
    delays = delays_of(traced(*gathered, "rows Tanh: assign"), rounds(of, dict.fromkeys(of, A)))
    assert [inputs(delays)[name] for name in "abc"] == [[late(0, 1)]] * 3
    assert inputs(delays)["rows"] == [late(1, 1)]
    scatter = [
        row.replace("assign AssignVariableOp: v x", "assign ResourceScatterAdd: v x x") for row in READS
    ]
    delays = delays_of(traced(*scatter), rounds(of, dict.fromkeys(of, A)))
    assert [inputs(delays)[name] for name in "abc"] == [[late(0, 1)], [late(0, 1)], [late(1, 1)]]


FROZEN = (
    "v VarHandleOp:", "w ReadVariableOp: v", "two Const:", "scaled Mul: w:1 two ^w", "x Placeholder:",
    "f Tanh: x scaled:2", "g Tanh: f scaled:2", "h Tanh: g w",
)  # fmt: skip


def test_each_device_has_its_own_copy_of_what_no_step_changes():
    of = {"x": 0, "f": 0, "g": 1, "h": 1}
    devices = {"f": A, "g": B, "h": B}
    step = traced(*FROZEN)
    delays = delays_of(step, rounds(of, devices, frozen={"w", "scaled"}))
    on_a, w_on_a, on_b, w_on_b = (f"{n}/{LOCAL}_{i}" for i, n in enumerate(["scaled", "w", "scaled", "w"]))
    assert inputs(delays) == {
        "v": [], "two": [], "x": [], on_a: [f"{w_on_a}:1", "two"], "f": ["x", f"{on_a}:2"],
        on_b: [f"{w_on_b}:1", "two"], "g": [late(0, 1), f"{on_b}:2"], "h": ["g", w_on_b],
    }  # fmt: skip
    assert nodes(delays)[on_a].device == A
    assert (nodes(delays)[on_b].device, nodes(delays)[on_b].name, nodes(delays)[on_b].op) == (B, on_b, "Mul")
    info = step.outputs["w"][0]
    assert delays.copies == {w_on_a: ("v", A, info), w_on_b: ("v", B, info)}
    # A result that is frozen is on no device.
    result = delays_of(traced(*FROZEN, fetches=("w",)), rounds(of, devices, frozen={"w", "scaled"}))
    assert result.copies[result.logs[0]][1] == ""


def test_classes_of_ops_are_forgotten():
    """They would ask for a device."""
    step = traced("x Placeholder:", "f Tanh: x")
    step.graph_def.node[1].attr["_class"].list.s.append(b"loc:@x")
    step.graph_def.node[1].attr["T"].type = 1
    delays = delays_of(step, rounds({"x": 0, "f": 0}))
    assert list(nodes(delays)["f"].attr) == ["T"]
    assert "_class" in step.graph_def.node[1].attr


def test_nodes_of_some_rounds():
    """And constants, which are in none; waits for what is not among them are dropped."""
    order = [("f", "g"), ("g", "h"), ("f", "k"), ("h", "k")]
    of = {"x": 0, "f": 1, "g": 2, "h": 3, "k": 4}
    spread = rounds(of, dict.fromkeys(of, A), before=order)
    delays = delays_of(traced(*STEP), spread)

    def between(low, high, *given):
        part = RoundPass(spread, low, high, frozenset(given))(delays.graph_def).graph_def
        return {node.name: list(node.input) for node in part.node}

    everything = inputs(delays)
    assert between(0, 4) == everything
    assert set(between(2, 3)) == {"one", "g", "h"}
    assert between(2, 3)["g"] == everything["g"][:-1]
    assert between(2, 3)["h"] == everything["h"]
    assert set(between(2, 3, "h", "one")) == {"g"}
    assert between(4, 4)["k"] == everything["k"][:2]
    part = RoundPass(spread, 2, 3, frozenset())
    for low, high, node, whose in ((2, 2, "h", "no"), (2, 4, "k", "the wrong")):
        other = RoundPass(spread, low, high, frozenset()).run(delays.graph_def, None)
        with pytest.raises(VerifyError, match=f"at node '{node}': is in {whose} round"):
            part.postconditions(delays.graph_def, other, None)
    for has_it in (0, 1):
        before, result = copy_of(delays.graph_def), part.run(delays.graph_def, None)
        next(n for n in (before, result.graph_def)[has_it].node if n.name == "g").attr["T"].type = 1
        with pytest.raises(VerifyError, match="at node 'g': T is not what it was"):
            part.postconditions(before, result, None)
    assert list(nodes(delays)["k"].input) == everything["k"]
