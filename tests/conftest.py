"""For all tests: a process for each file, which skips are allowed, which files begin first."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# TensorFlow takes oneDNN by itself on CPUs with AVX-512 only; tests have its kernels, and its allocator's
# figures, on all.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import hypothesis
import pytest

from tests import last, processes, skips
from tf_ooo.fit import timing

# No example fails for the time that it takes on a busy machine.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# For make test-quick beside the unit tests: one thing of each mode, some 60 seconds of a core.
QUICK = (
    "tests/test_smoke.py",
    "tests/graph/test_bit_equal.py::test_models[mlp]",
    "tests/graph/test_function.py",
    "tests/graph/test_verify.py",
    "tests/graph/test_classify_rules.py",
    "tests/graph/test_xla.py::TestHlo",
    "tests/graph/test_pipeline.py::test_two_devices_and_uneven_batches",
    "tests/graph/test_layerpipe.py::test_frozen_weights_are_not_copied_in_every_round",
    "tests/distributed/test_cluster_lost.py::test_worker_lost_in_a_step_of_a_fit_is_named",
    "tests/distributed/test_data_parallel_stock.py::test_one_step_at_a_time[momentum]",
    "tests/distributed/test_data_parallel_schedules.py::test_reverse_first_k",
)


# In the fits of all other files of tests/graph, and of ranks, stock steps would take a quarter of the time.
COMPARED = (
    "test_baselines.py",
    "test_measured_pipelines.py",
    "test_pipeline_models.py",
)


@pytest.fixture(autouse=True)
def _short_fits_are_not_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks = request.path.name.startswith("test_data_parallel")
    if of_ranks or (request.path.parent.name == "graph" and request.path.name not in COMPARED):
        monkeypatch.setattr(timing, "FEW", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--in-process", action="store_true", help="fork no processes, for a debugger")
    parser.addoption("--strict-skips", action="store_true", help="fail where a skip's reason is not allowed")
    last.add_option(parser)
    parser.addini("timeout", "how many seconds a test may take", default="900")


def pytest_configure(config: pytest.Config) -> None:
    processes.configure(config)
    if config.option.strict_skips and not hasattr(config, "workerinput"):
        config.pluginmanager.register(skips.StrictSkips())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long first, so that all processes end at the same time; some behind all others.

    In one process files come as they are named.
    """

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("takes")
        return float(mark.args[0]) if mark else 5.0

    first: dict[str, float] = {}
    for item in items:
        first[str(item.path)] = max(first.get(str(item.path), 0.0), seconds(item))
    if not config.option.in_process:
        items.sort(key=lambda item: (item.nodeid.startswith(last.LAST), -first[str(item.path)]))
    for item in items:
        unit = item.path.parent.name == "unit" and not item.get_closest_marker("slow")
        if unit or item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.quick)
