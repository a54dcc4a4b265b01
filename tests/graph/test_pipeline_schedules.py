"""All schedules on eight logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import models
from tests.graph.pipeline_fits import Training, assert_near, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import EVEN, TiedTransformer, deep, deep_unet, momentum, normal, whole
from tests.zoo import keras
from tf_ooo.modes.pipeline.planning import SCHEDULES

pytestmark = [pytest.mark.devices(8), pytest.mark.takes(70)]


@pytest.fixture(scope="module")
def deep_training():
    return Training(deep, momentum, EVEN, epochs=3)


@pytest.fixture(scope="module")
def deep_gpipe(deep_training):
    """Three epochs of three steps: the first on one device, 8 in stages; profiled."""
    return fits_of(deep_training, "gpipe", profile_steps=1)


def test_gpipe_is_near_the_unsplit_batch(deep_training, deep_gpipe):
    assert_near(deep_training.stock, deep_gpipe["gpipe"], far=1e-5)
    assert_in_order(deep_gpipe["gpipe"].report, 8)


def test_no_schedule_is_left_out():
    assert len(SCHEDULES) == 14
    assert "gpipe" in SCHEDULES


@pytest.mark.parametrize("schedule", [name for name in (*SCHEDULES, "auto") if name != "gpipe"])
def test_all_schedules_have_gpipe_s_bits(deep_training, deep_gpipe, schedule):
    fits = deep_gpipe | fits_of(deep_training, schedule, check_loss=False)
    assert_same_bits(deep_training, fits, far=None)
    assert fits[schedule].report.schedule == schedule or schedule == "auto"


def test_skips_under_cuts_of_two_stages_a_device():
    images, pixels = normal(48, 16, 16, 3), whole(4, 48, 16, 16)
    training = Training(deep_unet, momentum, (images, pixels), epochs=3)
    assert_same_bits(training, fits_of(training, "gpipe", "zb_v", "zb_interleaved"), weights_everywhere=False)


def test_ties_under_cuts_of_two_stages_a_device():
    tokens = whole(50, 48, 7)
    training = Training(TiedTransformer, momentum, (tokens, tokens[:, ::-1]), epochs=3)
    fits = fits_of(training, "gpipe", "dualpipe_v", "zb_interleaved")
    assert_same_bits(training, fits, weights_everywhere=False)


@pytest.fixture
def deterministic_ops():
    tf.config.experimental.enable_op_determinism()


@pytest.mark.alone
@pytest.mark.usefixtures("deterministic_ops")
def test_wide_tensors():
    """TensorFlow repeats its own bits there only where it is told to: docs/details/pipeline.md."""
    keras.utils.set_random_seed(3)
    sizes = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 512}
    workload = models.make(models.Network("encoder", 16, (64,), sizes, classes=16))
    data = tuple(np.concatenate([array] * 3) for array in (workload.x, workload.y))
    loss = workload.model.loss
    training = Training(lambda: workload.model, lambda: "sgd", data, epochs=1, loss=loss, metrics=None)
    fits = fits_of(training, "gpipe", "zb_v")
    assert_same_bits(training, fits, weights_everywhere=False)
    assert [len(fitted.report.pipeline["stages"]) for fitted in fits.values()] == [8, 16]
    repeated = training.piped(pipelined("gpipe"))
    assert_same_bits(training, {"before": fits["gpipe"], "again": repeated}, weights_everywhere=False)
