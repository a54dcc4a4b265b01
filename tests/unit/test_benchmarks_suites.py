"""Suites on worker processes: what each case has, and that ways' options are those of a callback."""

from __future__ import annotations

import pytest

from benchmarks import models
from benchmarks.cases import OURS, SUITES, cases_of
from benchmarks.runners.torch import cut
from tf_ooo.modes.table import LayerPipe, Pipeline

ON_WORKERS = ("pipelines", "meshes", "unequal", "layerpipe", "torch")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("suite", ON_WORKERS)
def test_cases_can_be_run(suite, quick):
    cases = cases_of(suite, quick)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.turns >= (6 if quick else 8)
        assert [way.name for way in case.ways if way.had_by == OURS] == ["auto"]
        assert any(way.is_baseline for way in case.ways)
        assert suite != "layerpipe" or case.parameters["steps"] % 8 == 0, "eight rounds run as one function"
        assert case.parameters["model"] in models.NETWORKS[case.parameters["networks"]]
        for way in case.ways:
            check_options(case, way)


def check_options(case, way):
    options = dict(way.options)
    if {"stock", "torch"} & options.keys():
        return
    if "unfused" in options:
        names = [other.name for other in case.ways]
        assert names.index(options["unfused"]) < names.index(way.name), "its order is taken from there"
        return
    if options.pop("alike", False):
        assert case.ways[0].had_by == OURS, "measures the workers' speeds"
    options.pop("usual_microbatches", False)
    late = options.pop("layerpipe", False)
    assert (LayerPipe if late else Pipeline)(**options)


def test_pipelines_are_compared_with_all_that_pytorch_has_of_old():
    for quick in (False, True):
        for case in cases_of("pipelines", quick):
            baselines = {way.name for way in case.ways if way.is_baseline}
            assert {"gpipe", "1f1b", "interleaved_1f1b", "one device"} <= baselines


def test_torchs_stages_hold_all_layers():
    for stages in (1, 2, 3, 4, 8):
        parts = [cut(17, stages, stage) for stage in range(stages)]
        assert [layer for part in parts for layer in part] == list(range(17))


@pytest.mark.parametrize("suite", SUITES)
def test_one_way_is_ours_and_each_has_a_name_of_its_own(suite):
    for quick in (False, True):
        for case in cases_of(suite, quick):
            assert len({way.name for way in case.ways}) == len(case.ways)
            assert sum(way.had_by == OURS for way in case.ways) == 1
