"""Lists the passes that run over the graph of a step in each mode, in their order.

| | before the step is planned | to put it in its order |
|---|---|---|
| one device | separate | annotate, order, verify |
| data parallel | separate | annotate and order each step by itself; steps, verify |
| pipeline | plain sums, repeat, read once | placement, local constants, joins, order, annotate, verify |
| its evaluation | | placement, local constants, verify |

What comes out is verified against the graph as it came; plain sums and what runs again are checked by
their own pass.  With a ``dump_dir`` all passes of a graph write into it, numbered in the order in which they
run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from tensorflow.core.framework import graph_pb2

from grappler_passes.passes.annotate import AnnotatePass
from grappler_passes.passes.base import Pass, PassPipeline, PassResult, relaxed_by
from grappler_passes.passes.joins import JoinsPass
from grappler_passes.passes.local_constants import LocalConstantsPass
from grappler_passes.passes.order import OrderPass
from grappler_passes.passes.placement import PlacementPass
from grappler_passes.passes.plain_sums import PlainSumsPass
from grappler_passes.passes.read_once import ReadOncePass
from grappler_passes.passes.repeat import RepeatPass
from grappler_passes.passes.rewrite_plan import RewritePlan
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.steps import Additions, StepsPass
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.rewriting.repeating import to_repeat
from tf_ooo.rewriting.step_graph import StepGraph

Folder = str | os.PathLike[str] | None


def separating(dump_dir: Folder = None) -> PassPipeline:
    """Takes ops apart that compute dO and dW; what is new is in its step's name scope."""
    return PassPipeline([SeparatePass()], dump_dir)


def separating_only(original: graph_pb2.GraphDef) -> PassPipeline:
    """Make the passes for steps that run in stock order, to be measured."""
    return PassPipeline([SeparatePass(), VerifyPass(original, frozenset(), SeparatePass.relaxes)])


def ordering(
    plan: RewritePlan, original: graph_pb2.GraphDef, separated: PassResult, dump_dir: Folder = None
) -> PassPipeline:
    """Return one device: for a graph that was ``separated``."""
    return _verified([AnnotatePass(plan), OrderPass(plan)], original, separated, dump_dir)


def ordering_one_step(plan: RewritePlan, dump_dir: Folder = None) -> PassPipeline:
    """Return data parallel: for the graph of one step."""
    return PassPipeline([AnnotatePass(plan), OrderPass(plan)], dump_dir)


def ordering_steps(
    gained: Sequence[Additions],
    original: graph_pb2.GraphDef,
    separated: PassResult,
    dump_dir: Folder = None,
) -> PassPipeline:
    """Return data parallel: for the graph of all steps, with what the graph of each step has gained."""
    return _verified([StepsPass(gained)], original, separated, dump_dir)


def adding_up(dump_dir: Folder = None) -> PassPipeline:
    """Pipeline: sums are one op again that TensorFlow has taken apart."""
    return PassPipeline([PlainSumsPass()], dump_dir)


def changing(
    step: StepGraph, repeated: Collection[int], stands_for: Mapping[str, str], dump_dir: Folder = None
) -> PassPipeline:
    """Pipeline: these layers run their forward again for their dO, and one read stands for others.

    Without any there is no pass.
    """
    passes: list[Pass] = [RepeatPass(*to_repeat(step, repeated))] if repeated else []
    passes += [ReadOncePass(stands_for)] if stands_for else []
    return PassPipeline(passes, dump_dir, ran=1)


def placing(
    plan: RewritePlan,
    available: Sequence[str],
    original: graph_pb2.GraphDef,
    dump_dir: Folder = None,
    before: PassPipeline | None = None,
) -> PassPipeline:
    """Pipeline: for a graph whose sums are ops, behind the passes ``before``; ``available``: all devices."""
    placement = PlacementPass(plan, tuple(available))
    passes = [placement, LocalConstantsPass(), JoinsPass(plan), OrderPass(plan), AnnotatePass(plan)]
    check = VerifyPass(original, frozenset(), relaxed_by(*passes))
    return PassPipeline([*passes, check], dump_dir, ran=1 + (len(before.passes) if before else 0))


def placing_forward(
    plan: RewritePlan, available: Sequence[str], original: graph_pb2.GraphDef, dump_dir: Folder = None
) -> PassPipeline:
    """Pipeline: for a graph that evaluates or predicts."""
    run = [PlacementPass(plan, tuple(available)), LocalConstantsPass()]
    return PassPipeline([*run, VerifyPass(original, frozenset(), relaxed_by(*run))], dump_dir)


def _verified(
    passes: Sequence[Pass], original: graph_pb2.GraphDef, separated: PassResult, dump_dir: Folder
) -> PassPipeline:
    """Verify a ``separated`` graph: nothing may differ from ``original`` but what passes declare."""
    check = VerifyPass(original, separated.replaced, relaxed_by(SeparatePass, *passes))
    return PassPipeline([*passes, check], dump_dir, ran=1)
