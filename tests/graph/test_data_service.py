"""Data that TensorFlow's data service prepares on other hosts: a dataset like any other."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.graph import pipeline_models as models
from tests.graph.pipeline_fits import pipelined
from tests.same_bits import bits_of

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(30)]


def service():
    """Its dispatcher and a worker, each on a port of its own."""
    own = tf.data.experimental.service
    dispatcher = own.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    return dispatcher, own.WorkerServer(own.WorkerConfig(dispatcher_address=address))


def test_a_pipeline_trains_with_the_same_bits():
    dispatcher, worker = service()
    off = tf.data.experimental.service.ShardingPolicy.OFF
    served = tf.data.experimental.service.distribute(off, dispatcher.target)
    bits = []
    for apply in ((), (served,)):
        dataset = tf.data.Dataset.from_tensor_slices((models.X, models.Y)).map(lambda x, y: (2 * x, y))
        dataset = dataset.batch(12)
        for transformation in apply:
            dataset = dataset.apply(transformation)
        keras.utils.set_random_seed(4)
        model = models.mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(models.momentum(), loss, jit_compile=False)
        callback = pipelined("gpipe", devices=2, microbatches=3)
        model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
        assert callback.report.pipeline.step_s
        bits.append(bits_of(model))
    assert bits[0] == bits[1]
    del worker, dispatcher
