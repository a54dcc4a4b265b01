"""A reader follows a fit through a bounded number of files, which docs/design/house.md lists in order."""

import keras
import pytest

import tf_ooo
from tests import walks
from tests.distributed import training


def walk_of(**options):
    model = training.compiled(training.deep(), keras.optimizers.SGD(0.1))
    callback = tf_ooo.OOOBackprop(**options)
    data = training.data(0, rows=60 * training.ROWS)
    files = walks.files_of(lambda: training.fit(model, data, [callback]))
    assert callback.report.rewritten_graph is not None or callback.report.compared_steps, callback.report
    return files


def test_one_device():
    files = walk_of(compare=True)
    walks.check("One device", files, 69)


@pytest.mark.devices(2)
def test_a_pipeline():
    files = walk_of(devices=2, compare=True)
    walks.check("Pipeline", files, 130)


@pytest.mark.ranks(2)
def test_horovod(engine):
    model = training.compiled(
        training.deep(), keras.optimizers.SGD(0.1), steps_per_execution=training.TOGETHER
    )
    callback = tf_ooo.OOOBackprop(tf_ooo.DataParallel(schedule="reverse_first_k", k=2))
    files = walks.files_of(lambda: training.fit(model, training.data(engine.rank), [callback]))
    training.assert_reordered(callback.report, training.TOGETHER)
    if engine.rank == 0:
        walks.check("Horovod", files, 80)
