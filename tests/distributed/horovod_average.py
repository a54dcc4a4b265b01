"""Run by test_horovod_smoke.py in each of two processes: averages a gradient, checks it, says so."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
assert hvd.size() == 2
x = tf.Variable([1.0, 2.0])


@tf.function
def step() -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x * x) * float(hvd.rank() + 1)
    return hvd.DistributedGradientTape(tape).gradient(loss, [x])


# Rank 0 has the gradient 2x, rank 1 has 4x.
averaged = step()[0].numpy().tolist()
assert averaged == [3.0, 6.0], averaged
print(f"rank {hvd.rank()} averaged")
