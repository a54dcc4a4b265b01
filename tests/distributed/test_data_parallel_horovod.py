"""Only Horovod has these: its launcher, its optimizer, an allreduce in the middle of a model."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests import forked, launches
from tests.distributed import training as t

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

pytestmark = pytest.mark.takes(30)
on_two_ranks = pytest.mark.ranks(2)

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_horovod.py"


@on_two_ranks
def test_two_processes_average_a_gradient(engine):
    """Horovod alone: what of all this is its work."""
    import horovod.tensorflow as hvd

    assert (hvd.size(), hvd.rank()) == (2, engine.rank)
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x) * float(hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape).gradient(loss, [x])

    # Rank 0 has the gradient 2x, rank 1 has 4x.
    assert step()[0].numpy().tolist() == [3.0, 6.0]


if t.KERAS_3:

    @on_two_ranks
    def test_horovods_optimizer_is_detected(engine):
        import horovod.tensorflow.keras as hvd

        a = t.compiled(t.mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        b = t.compiled(t.mlp(), keras.optimizers.Adam(0.01))
        with t.warnings_of_tf_ooo() as lines:
            callback = t.ours(a, t.data(engine.rank, 80))
        assert [line for line in lines if "averages nothing with Keras 3" in line] == lines
        assert len(lines) == 1
        assert t.communicates(callback, a)
        t.assert_not_reordered(callback.report)
        t.ours(b, t.data(engine.rank, 80))
        assert t.bits(a) == t.bits(b)
        assert t.equal_on_all_ranks(engine, a)

else:

    @on_two_ranks
    def test_horovods_optimizer_averages(engine):
        """With Keras 2 it does, and is left to it: the bits are those of stock Horovod."""
        import horovod.tensorflow.keras as hvd

        a, b = (
            t.compiled(t.mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.5)))
            for _ in range(2)
        )
        t.fit(a, t.data(engine.rank, 80))
        callback = t.ours(b, t.data(engine.rank, 80))
        assert t.communicates(callback, b)
        t.assert_not_reordered(callback.report)
        assert t.bits(a) == t.bits(b)
        assert t.equal_on_all_ranks(engine, b)


@on_two_ranks
def test_sync_batch_norm_is_no_averaged_gradient(engine):
    """Horovod's synchronized BatchNorm communicates within the backward pass; weights still are averaged."""

    class Shared(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            import horovod.tensorflow as hvd

            return x - hvd.allreduce(tf.reduce_mean(x, 0), op=hvd.Average)

    layers = [keras.Input((12,)), keras.layers.Dense(8), Shared(), keras.layers.Dense(4)]
    model = t.compiled(keras.Sequential(layers), keras.optimizers.SGD(0.05))
    callback = t.ours(model, t.data(engine.rank, 80))
    assert len(callback._life.mode.averaged.averaging.averaged) == len(model.trainable_weights)
    assert t.equal_on_all_ranks(engine, model)


def test_example():
    process = launches.start_horovodrun(2, [sys.executable, EXAMPLE])
    try:
        said = process.communicate(timeout=800)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    told = re.findall(r"worker (\d) of 2 \(horovod\): val_accuracy of all ([\d.]+)", said)
    assert sorted(rank for rank, _ in told) == ["0", "1"]
    assert len({accuracy for _, accuracy in told}) == 1
    assert float(told[0][1]) > 0.8


def test_horovod_is_not_needed_to_import():
    code = (
        "import sys; from tf_ooo import data_parallel as d; assert 'horovod' not in sys.modules; "
        "print(d.connect().size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=launches.script_environment()
    )
    assert done.stdout.strip() == "1", done.stderr
    assert importlib.util.find_spec("horovod") is not None


def _refused() -> str:
    from tf_ooo.errors import BackendError
    from tf_ooo.hosts.ranks.horovod_engine import HorovodEngine

    with pytest.raises(BackendError) as caught:
        HorovodEngine()
    return str(caught.value)


def test_a_rank_that_never_comes_is_named():
    """Horovod itself aborts, after more than a minute."""
    with launches.rendezvous(2) as port:
        variables = {**launches.horovod_variables(0, 2, port), "HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}
        said = forked.result_of(_refused, environment=variables)
    assert said.startswith("rank 0 of 2: rank 1 did not come within 2 s")


def test_horovod_elastic_is_refused():
    assert "tf-ooo run --ranks N" in forked.result_of(_refused, environment={"HOROVOD_ELASTIC": "1"})
