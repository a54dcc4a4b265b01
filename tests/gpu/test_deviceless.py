"""Compiled for an H100, dW runs beside the dO chain: starts early, is waited for at the end."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import hlo_order
from tests.gpu.hlo_compiler import compiled, why_not
from tf_ooo.compat import xla_functions
from tf_ooo.costs.gains import GainTable
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled.captured import CompiledModule
from tf_ooo.modes.compiled.controller import ways
from tf_ooo.modes.compiled.session import CONCURRENT, CONCURRENT_FLAGS, StreamSession
from tf_ooo.modes.compiled.step import STOCK_WAY, CompiledStep, StreamStep, Way
from tf_ooo.planning.building.capture import LEAST_RUN

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
BATCH = 8


def dense():
    hidden = [layers.Dense(512, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)])


def conv():
    blocks = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(4)]
    return keras.Sequential(
        [keras.Input((16, 16, 8)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def depthwise():
    def block():
        for conv in (layers.DepthwiseConv2D(3, padding="same", use_bias=False), layers.Conv2D(48, 1)):
            yield from (conv, layers.BatchNormalization(), layers.ReLU())

    body = [layer for _ in range(3) for layer in block()]
    return keras.Sequential(
        [keras.Input((16, 16, 24)), *body, layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def attention():
    inputs = keras.Input((32, 64))
    h = inputs
    for _ in range(2):
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(4, 16)(h, h))
        h = layers.LayerNormalization()(h + layers.Dense(64)(layers.Dense(128, activation="gelu")(h)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(h)))


def lstm():
    rnn = [layers.LSTM(64, return_sequences=True, unroll=True), layers.LSTM(64, unroll=True)]
    return keras.Sequential([keras.Input((6, 32)), *rnn, layers.Dense(10)])


NETWORKS = {f.__name__: f for f in (dense, conv, depthwise, attention, lstm)}


def order_of(name: str, **options) -> list[hlo_order.Launch]:
    """Return what the rewritten train step of a network launches on an H100."""
    return hlo_order.launches(compiled_step(name, **options)[0])


def compiled_step(name: str, way: Way | None = None, **options) -> tuple[str, CompiledModule]:
    """(module in launch order, what XLA made of it) of a network's train step."""
    keras.utils.set_random_seed(0)
    model = NETWORKS[name]()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    model.optimizer.build(model.trainable_variables)
    data = (tf.zeros((BATCH, *model.input_shape[1:])), tf.zeros((BATCH,), tf.int32))
    model.train_step(data)
    session = StreamSession(Options(schedule="multi_stream", any_platform=True, **options))
    way = way or ways(session.options)[0]
    step = StreamStep(model.train_step, model.train_step, session, way)
    made = CompiledStep(step, (data,), {})
    return compiled(xla_functions.hlo_of(made._run, made.inputs.specs), *way.flags)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_weight_gradients_run_beside_the_output_gradients(name):
    order = order_of(name)
    starts = [place for place, launch in enumerate(order) if launch.kind == "start"]
    dones = [place for place, launch in enumerate(order) if launch.kind == "done"]
    assert len(starts) == len(dones) >= 3
    assert max(starts) < min(dones), "a call is waited for before the last one has started"
    gaps = np.diff(starts)
    assert (gaps > 1).sum() >= len(gaps) // 2, "calls start in one heap, not between the dO"
    assert np.median(list(hlo_order.beside(order).values())) >= 2


def test_gains_hold_a_weight_gradient_back(tmp_path):
    """dW of the last layer gains beside dO:1 only: it starts once dO:2 is there, after the one below."""
    gains = {("dO:1", 4): 1.0, ("dO:2", 3): 1.0}
    table = GainTable(gains).save(tmp_path / "gains.json")
    order = [launch.name for launch in order_of("dense", gains=table) if launch.kind == "start"]
    assert order == ["ooo_dW_3_0", "ooo_dW_4_0"]


def test_streams_are_kept():
    order = order_of("dense", streams=2)
    assert {launch.stream for launch in order if launch.kind == "start"} == {1, 2}


def test_what_leaves_the_cuda_graphs_is_said():
    """Stock steps are in graphs as a whole, with XLA's concurrency too; calls and what is between are not."""
    for way in (STOCK_WAY, Way(STOCK_WAY.rewrite, CONCURRENT, CONCURRENT_FLAGS)):
        _, stock = compiled_step("dense", way)
        assert (stock.share_in_graphs, stock.graphs, stock.on_side_streams) == (1.0, 1, 0)
    _, ours = compiled_step("dense")
    assert ours.on_side_streams >= 4
    assert 0 < ours.share_in_graphs < 1
    assert ours.total_bytes >= stock.total_bytes


def test_runs_between_calls_are_captured_if_they_are_long_enough():
    """The joint schedule counts on this: five kernels make a graph, three do not unless XLA is told so."""
    way = ways(Options(schedule="multi_stream", any_platform=True))[0]
    _, dense_ours = compiled_step("dense", way)
    shorter = dataclasses.replace(way, flags=(f"--xla_gpu_graph_min_graph_size={LEAST_RUN - 2}",))
    _, dense_shorter = compiled_step("dense", shorter)
    assert dense_ours.graphs == 2, "before the first call and behind the last"
    assert dense_shorter.graphs == 3
    assert dense_shorter.in_graphs == dense_ours.in_graphs + LEAST_RUN - 2
    _, conv_ours = compiled_step("conv", way)
    assert conv_ours.graphs == 3, "a run of six kernels stands between two calls"


def test_updates_on_the_side_stream():
    """Plain gradient descent: fewer kernels are left for the main stream."""
    _, without = compiled_step("dense")
    _, aside = compiled_step("dense", side_updates=True)
    main = [module.launches - module.on_side_streams for module in (without, aside)]
    assert main[1] <= main[0]
    assert aside.on_side_streams >= without.on_side_streams
