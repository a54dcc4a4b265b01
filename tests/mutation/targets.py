"""The modules that are mutated, each with the quick tests that are to notice."""

from __future__ import annotations

UNIT, GRAPH = "tests/unit/test_{}.py", "tests/graph/test_{}.py"


def _tests(folder: str, names: str) -> list[str]:
    return [folder.format(name) for name in names.split()]


# Tests stop at the first failure: those that notice most come first.
_SCHEDULES = _tests(UNIT, "relation_edges simulator frozen_values")
_CLASSIFY = _tests(GRAPH, "classify_parts classify_rules")
TESTS: dict[str, list[str]] = {
    "tf_ooo/relation.py": _SCHEDULES,
    "tf_ooo/validate.py": [*_tests(UNIT, "validate_errors"), *_SCHEDULES],
    "tf_ooo/simulator.py": [*_tests(UNIT, "simulator_parts"), *_SCHEDULES],
    "tf_ooo/memory.py": [*_tests(UNIT, "memory_curves"), *_SCHEDULES],
    "tf_ooo/lowering.py": [*_tests(UNIT, "lowering_edges frozen_values"), *_tests(GRAPH, "lowering")],
    "tf_ooo/data_parallel/ordering.py": _tests(UNIT, "data_parallel_order unrolled_parts frozen_values"),
    "tf_ooo/data_parallel/agreement.py": _tests(UNIT, "agreement data_parallel_parts"),
    "tf_ooo/pipeline/ordering.py": [
        *_tests(UNIT, "lane_edges sent_after_its_dw frozen_values"),
        *_tests(GRAPH, "pipeline_order"),
    ],
    "tf_ooo/pipeline/micro_batches.py": _tests(UNIT, "micro_batch_weights pipeline_parts"),
    "tf_ooo/pipeline/collecting.py": _tests(UNIT, "micro_batch_weights"),
    "tf_ooo/layerpipe/delays.py": _tests(UNIT, "layerpipe_delays frozen_values"),
    "grappler_passes/order.py": [*_tests(GRAPH, "order_edges"), *_tests(UNIT, "frozen_values")],
    "grappler_passes/verify.py": [*_tests(GRAPH, "verify_rules verify"), *_tests(UNIT, "frozen_values")],
    "grappler_passes/classify.py": _CLASSIFY,
    "grappler_passes/kinds.py": _CLASSIFY,
}
