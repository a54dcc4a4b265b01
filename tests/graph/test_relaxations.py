"""Each pass declares what it changes: nothing else, and nothing that it does not change."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from graphs import graph_of, node, recurrent
from tensorflow.core.framework import types_pb2

from grappler_passes import passes
from grappler_passes.errors import PassError, VerifyError
from grappler_passes.passes.base import Pass, PassPipeline, Relaxation, relaxed_by
from grappler_passes.passes.gates import GatesPass
from grappler_passes.passes.plain_assigns import PlainAssignsPass
from grappler_passes.passes.plain_sums import PlainSumsPass
from grappler_passes.passes.repeat import RepeatPass
from grappler_passes.passes.rewrite_plan import AnnotatePass, JoinsPass, OrderPass, PlacementPass, RewritePlan
from grappler_passes.passes.sending import GatherPass, LocalConstantsPass, ReadOncePass
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.separate_loops import SeparateLoopsPass
from grappler_passes.passes.steps import StepsPass, additions
from grappler_passes.passes.verify import VerifiedPass, VerifyPass, verify

CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"


def two_ops():
    return graph_of("a Abs:", "b Abs:")


def gates():
    graph = graph_of(
        "x Placeholder:",
        "y Placeholder:",
        "h _Arg:",
        "read ReadVariableOp: h",
        "a Abs: x",
        "b Abs: y",
        "group NoOp: ^a ^b",
        "gate Identity: a ^group",
        "pair IdentityN: gate b ^read",
        "first Abs: pair",
        "second Abs: pair:1",
        "write AssignVariableOp: h first ^group ^read",
    )
    nodes = {made.name: made for made in graph.node}
    nodes["pair"].attr["T"].list.type.extend([1, 1])
    nodes["first"].attr["_class"].list.s.append(b"loc:@pair")
    return graph


def lost_order():
    """The read comes before the write by way of a gate that is opened."""
    return graph_of(
        "h _Arg:", "x Placeholder:", "read ReadVariableOp: h", "used Abs: read", "a Abs: x",
        "group NoOp: ^a ^used", "gate Identity: a ^group", "other Identity: used ^group",
        "write AssignVariableOp: h gate",
    )  # fmt: skip


def loops():
    return recurrent(3)[0]


def sums():
    graph = graph_of("a Placeholder:", "b Placeholder:", "c Placeholder:", "late Placeholder:")
    node(graph, "s/tmp_var", "TemporaryVariable")
    node(graph, "s/tmp_var_zeros", "ZerosLike", "a")
    node(graph, "s/tmp_var_initializer", "Assign", "s/tmp_var", "s/tmp_var_zeros")
    for number, text in enumerate("abc"):
        node(graph, f"s/tmp_var_accum_{number}", "AssignAdd", "s/tmp_var_initializer", text)
    waits = [f"^s/tmp_var_accum_{number}" for number in range(3)]
    node(graph, "s", "DestroyTemporaryVariable", "s/tmp_var_initializer", *waits, "^late")
    return graph


def shared_terms():
    graph = graph_of("a Placeholder:", "b Placeholder:", "c Placeholder:", "a_again Abs: a")
    node(graph, "s", "AddN", "a", "b", "c")
    graph.node[-1].attr["N"].i = 3
    graph.node[-1].attr["T"].type = types_pb2.DT_FLOAT
    return graph


def shared_constant():
    devices = {name: CPU.format(number) for number, name in enumerate("dabc")} | {"d": ""}
    return graph_of("c Const:", "a Abs: c", "b Abs: c", "d Abs: c", **devices)


def unrolled():
    graph = two_ops()
    for made in graph.node:
        made.attr["_ooo_step"].i = 0
    return graph


def read_twice():
    return graph_of("x Const:", "a Abs: x", "b Abs: a", "c Abs: a")


def two_reads():
    return graph_of("h _Arg:", "r1 ReadVariableOp: h", "r2 ReadVariableOp: h", "a Abs: r1", "b Abs: r2")


def update():
    return graph_of(
        "h _Arg:", "x Placeholder:", "old ReadVariableOp: h", "change Mul: old x",
        "add AssignAddVariableOp: h change", "new ReadVariableOp: h ^add", "used Abs: new",
    )  # fmt: skip


def waits():
    graph = graph_of("a Abs:", "b Abs:", "end NoOp: ^a ^b")
    graph.node[2].device = CPU.format(1)
    return graph


PLAN = RewritePlan(edges=(("a", "b"),), kinds={"a": "dO"}, devices={"a": CPU.format(1)}, joins={"join": ""})


def gained():
    return additions(unrolled(), PassPipeline([OrderPass(PLAN), AnnotatePass(PLAN)])(unrolled()).graph_def)


CASES = [
    (AnnotatePass(PLAN), two_ops),
    (GatesPass(), gates),
    (GatherPass(), waits),
    (JoinsPass(PLAN), two_ops),
    (LocalConstantsPass(), shared_constant),
    (OrderPass(PLAN), two_ops),
    (PlacementPass(PLAN, (CPU.format(1),)), two_ops),
    (PlainAssignsPass(), update),
    (PlainSumsPass(), sums),
    (PlainSumsPass(), shared_terms),
    (ReadOncePass({"r2": "r1"}), two_reads),
    (RepeatPass(frozenset({"a"}), frozenset({"b"})), read_twice),
    (SeparatePass(), gates),
    (SeparatePass(), lost_order),
    (SeparatePass(), loops),
    (SeparateLoopsPass(), loops),
    (StepsPass([gained()]), unrolled),
]


@pytest.mark.parametrize(("rewriting", "graph"), CASES, ids=lambda value: getattr(value, "name", None))
def test_a_pass_changes_what_it_declares_and_nothing_else(rewriting, graph):
    before = graph()
    result = rewriting(before)
    assert result.modified
    verify(before, result.graph_def, replaced=result.replaced, relaxes=rewriting.relaxes)


def refused_without(rewriting, before, relaxation):
    result = rewriting(before)
    try:
        verify(before, result.graph_def, replaced=result.replaced, relaxes=rewriting.relaxes - {relaxation})
    except VerifyError:
        return True
    return False


def test_no_pass_declares_what_it_never_changes():
    declared, needed = set(), set()
    for rewriting, graph in CASES:
        for relaxation in rewriting.relaxes:
            declared.add((type(rewriting), relaxation))
            if refused_without(rewriting, graph(), relaxation):
                needed.add((type(rewriting), relaxation))
    assert declared - needed == set()


def test_every_pass_has_a_case():
    for module in pkgutil.iter_modules(passes.__path__):
        importlib.import_module(f"{passes.__name__}.{module.name}")
    kinds = {*Pass.__subclasses__(), *VerifiedPass.__subclasses__()}
    here = {kind for kind in kinds if kind.__module__.startswith(passes.__name__)}
    assert here - {type(rewriting) for rewriting, _ in CASES} == {PassPipeline, VerifyPass, VerifiedPass}


def test_what_several_passes_may_change():
    assert relaxed_by() == frozenset()
    assert relaxed_by(OrderPass, AnnotatePass(PLAN)) == {Relaxation.MORE_WAITS, Relaxation.NOTES}
    graph = two_ops()
    ordering, placing = OrderPass(PLAN), PlacementPass(PLAN, (CPU.format(1),))
    done = PassPipeline([ordering, placing, VerifyPass(graph, allowed=relaxed_by(ordering, placing))])(graph)
    assert done.modified
    with pytest.raises(PassError, match="rule 'devices' broken at node 'a'"):
        PassPipeline([ordering, placing, VerifyPass(graph, allowed=ordering.relaxes)])(graph)


def test_a_sum_that_is_read_on_the_way_is_refused(monkeypatch):
    """The pass looks at its own work: nobody verifies it later."""
    monkeypatch.setattr("grappler_passes.passes.plain_sums._make_sum", lambda kept, parts: kept.input.pop())
    with pytest.raises(PassError, match="'plain_sums' failed: VerifyError"):
        PlainSumsPass()(sums())
