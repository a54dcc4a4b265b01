"""Recorded steps of a pipeline whose devices are workers: this process' profiler does not see their ops."""

from __future__ import annotations

import pytest

from tests.distributed.cluster_models import perceptron, pipeline, train
from tests.distributed.clusters import addresses, workers
from tests.same_bits import same, values_of

pytestmark = [pytest.mark.alone, pytest.mark.takes(40)]


def test_ops_of_workers_are_seen_by_their_own_profilers(tmp_path):
    cluster = addresses(2)
    with workers(cluster, [1]):
        models = perceptron(), perceptron()
        train(models[0], [pipeline(cluster)], epochs=4)
        callback = pipeline(cluster, timeline=tmp_path)
        train(models[1], [callback], epochs=4)
    assert same(*map(values_of, models))
    report = callback.report
    assert report.measured_timeline is not None, report.not_measured
    measured = set(report.measured_timeline.schedule.tasks)
    without_ops = {task for task in report.planned.tasks if task.kind == "dO" and not task.stage}
    assert set(report.planned.tasks) - without_ops <= measured
    assert {event.device for event in report.measured_timeline.events} == {0, 1}
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 2


def test_costs_of_a_model_that_began_cut_are_measured_on_the_workers():
    """All of its ops, though this process runs none of them; the bits are those of steps that began whole."""
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        models = perceptron(), perceptron()
        train(models[0], [pipeline(cluster)], epochs=4)
        callback = pipeline(cluster, first_steps="cut", costs=None, profile_steps=2)
        train(models[1], [callback], epochs=4)
    assert same(*map(values_of, models))
    report = callback.report
    assert any("planned again with costs that were measured" in note for note in report.notes), report.notes
    assert report.costs.source in ("measured", "mixed")
    assert all(layer.forward_s > 0 and layer.busy_s > 0 for layer in report.costs.layers), report.costs.layers
