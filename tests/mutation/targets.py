"""The modules that are mutated, each with the quick tests that are to notice."""

from __future__ import annotations

UNIT, GRAPH = "tests/unit/test_{}.py", "tests/graph/test_{}.py"


def _tests(folder: str, names: str) -> list[str]:
    """Return files, or ``file::test`` of those that take long."""
    parted = (name.partition("::") for name in names.split())
    return [folder.format(file) + separator + test for file, separator, test in parted]


# Tests stop at the first failure: those that notice most come first.
_SCHEDULES = _tests(UNIT, "relation_edges simulator frozen_values")
_CLASSIFY = _tests(GRAPH, "classify_parts classify_steps classify_rules")
_CLOCK = _tests(UNIT, "simulator_parts simulator clock justification")
_PEAKS = _tests(UNIT, "peaks liveness")
_LAYERPIPE = [
    *_tests(UNIT, "layerpipe_registers frozen_values"),
    *_tests(
        GRAPH,
        "layerpipe_delays layerpipe_node_edits layerpipe::test_frozen_weights_are_not_copied_in_every_round "
        "layerpipe::test_delays_are_twice_the_stages_after[two-ema]",
    ),
]
TESTS: dict[str, list[str]] = {
    "tf_ooo/planning/model/relation.py": [*_SCHEDULES, *_tests(UNIT, "justification")],
    "tf_ooo/planning/simulation/simulator.py": [
        *_tests(UNIT, "validate_errors simulator_parts"),
        *_SCHEDULES,
        *_tests(UNIT, "runtime_times"),
    ],
    "tf_ooo/planning/model/memory.py": [*_tests(UNIT, "memory_curves"), *_SCHEDULES],
    "tf_ooo/rewriting/lowering.py": [
        *_tests(UNIT, "lane_edges lowering_edges frozen_values"),
        *_tests(UNIT, "timed_ops costs_from_graph"),
        *_tests(GRAPH, "lowering"),
    ],
    "tf_ooo/modes/data_parallel/ordering.py": _tests(
        UNIT,
        "data_parallel_order data_parallel_planned frozen_values "
        "agreement::test_another_plan_has_another_digest",
    ),
    "tf_ooo/modes/data_parallel/agreement.py": _tests(UNIT, "agreement data_parallel_parts"),
    "tf_ooo/rewriting/ordering.py": [
        *_tests(UNIT, "lane_edges sent_after_its_dw frozen_values"),
        *_tests(GRAPH, "pipeline_order"),
    ],
    "tf_ooo/tracing/micro_batches.py": [
        *_tests(UNIT, "micro_batch_weights"),
        *_tests(GRAPH, "splitting pipeline::test_two_devices_and_uneven_batches"),
    ],
    "tf_ooo/tracing/collecting.py": [
        *_tests(UNIT, "micro_batch_weights"),
        *_tests(GRAPH, "pipeline_fixed_rows plain_sums"),
    ],
    "tf_ooo/modes/layerpipe/delays.py": _LAYERPIPE,
    "tf_ooo/modes/layerpipe/cutting.py": _LAYERPIPE,
    "grappler_passes/passes/rewrite_plan.py": [
        *_tests(GRAPH, "order_edges passes"),
        *_tests(UNIT, "frozen_values"),
    ],
    "grappler_passes/passes/verify.py": [
        *_tests(GRAPH, "verify_rules verify"),
        *_tests(UNIT, "frozen_values"),
    ],
    "tf_ooo/planning/simulation/clock.py": _CLOCK,
    "tf_ooo/rewriting/one_device.py": [*_PEAKS, *_tests(GRAPH, "function")],
    "grappler_passes/graph/training_graph.py": [
        *_PEAKS,
        *_tests(UNIT, "costs_from_graph graph lowering_edges frozen_values"),
    ],
    "grappler_passes/analysis/classify.py": _CLASSIFY,
    "grappler_passes/analysis/backward.py": [*_tests(GRAPH, "backward_parts"), *_CLASSIFY],
    "grappler_passes/analysis/gradients.py": [*_tests(GRAPH, "gradients_parts weights_parts"), *_CLASSIFY],
    "grappler_passes/analysis/layers.py": [*_tests(GRAPH, "layers_parts"), *_CLASSIFY],
}
