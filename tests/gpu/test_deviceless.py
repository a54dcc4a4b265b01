"""Compiled for an H100, dW runs beside the dO chain: starts early, is waited for at the end."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import hlo_order
from tests.gpu.hlo_compiler import compiled, why_not
from tf_ooo.compat import xla
from tf_ooo.costs.table import GainTable
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled.controller import ways
from tf_ooo.modes.compiled.session import CONCURRENT, CONCURRENT_FLAGS, CompiledModule, StreamSession
from tf_ooo.modes.compiled.step import STOCK_WAY, CompiledStep, StreamStep, Way
from tf_ooo.planning.building.regions import LEAST_RUN

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
BATCH = 8
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
CONVOLUTIONS_TOO = NO_GRAPHS + "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"


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


def compiled_step(
    name: str, way: Way | None = None, flags: tuple[str, ...] = (), **options
) -> tuple[str, CompiledModule]:
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
    return compiled(xla.hlo_of(made._run, made.inputs.specs), *way.flags, *flags)


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


def test_stock_steps_are_in_one_graph():
    """With XLA's concurrency too; convolutions only where XLA is told so."""
    for way in (STOCK_WAY, Way(STOCK_WAY.rewrite, CONCURRENT, CONCURRENT_FLAGS)):
        assert in_graphs(compiled_step("dense", way)[1]) == (1.0, 1, 0)
    assert 0 < in_graphs(compiled_step("conv", STOCK_WAY)[1])[0] < 1
    assert in_graphs(compiled_step("conv", STOCK_WAY, (CONVOLUTIONS_TOO,))[1]) == (1.0, 1, 0)


def in_graphs(module: CompiledModule) -> tuple[float | None, int, int]:
    """(share in graphs, how many graphs, launches on side streams outside of them)."""
    return module.share_in_graphs, module.graphs, module.on_side_streams


def test_calls_that_can_be_captured_are_in_the_graph_of_the_step():
    """jaxlib 0.11.2 captures them; TensorFlow 2.21 does not (tests/unit/test_xla_captured.py)."""
    assert in_graphs(compiled_step("dense")[1]) == (1.0, 1, 0)
    assert in_graphs(compiled_step("dense", flags=(NO_GRAPHS,))[1]) == (0.0, 0, 4)
    assert in_graphs(compiled_step("conv", flags=(CONVOLUTIONS_TOO,))[1]) == (1.0, 1, 0)


def test_what_leaves_the_cuda_graphs_is_said():
    """Calls with a convolution are not captured, nor what is between."""
    _, stock = compiled_step("conv", STOCK_WAY)
    _, ours = compiled_step("conv")
    assert ours.on_side_streams >= 4
    assert 0 < ours.share_in_graphs < 1
    assert ours.total_bytes >= stock.total_bytes


def test_runs_between_calls_are_captured_if_they_are_long_enough():
    """The joint schedule counts on this: five kernels make a graph, four do not unless XLA is told so."""
    shorter, same, longer = (
        compiled_step("depthwise", flags=(f"--xla_gpu_graph_min_graph_size={least}",))[1]
        for least in (LEAST_RUN - 1, LEAST_RUN, LEAST_RUN + 1)
    )
    assert same == compiled_step("depthwise")[1]
    assert shorter.graphs == same.graphs + 5, "five runs of four"
    assert shorter.in_graphs == same.in_graphs + 5 * (LEAST_RUN - 1)
    assert same.graphs == longer.graphs + 7, "seven runs of five"
    assert same.in_graphs == longer.in_graphs + 7 * LEAST_RUN


def test_updates_on_the_side_stream():
    """Plain gradient descent: fewer kernels are left for the main stream."""
    _, without = compiled_step("conv", flags=(NO_GRAPHS,))
    _, aside = compiled_step("conv", flags=(NO_GRAPHS,), side_updates=True)
    main = [module.launches - module.on_side_streams for module in (without, aside)]
    assert main[1] < main[0]
    assert aside.on_side_streams > without.on_side_streams


def test_the_compiler_says_what_is_wrong_and_goes_on():
    right = "HloModule m\n\nENTRY e { a = f32[8] parameter(0)\n ROOT b = f32[8] negate(a) }\n"
    with pytest.raises(RuntimeError, match="no_such_op"):
        compiled(right.replace("negate", "no_such_op"))
    assert compiled(right)[1].launches == 1
