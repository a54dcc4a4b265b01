"""TensorFlow 2.15, Keras 2 and tensorflow-addons: pip install '.[legacy]' on Python 3.10 or 3.11."""

import os

os.environ.setdefault("TF_ADDONS_PY_OPS", "1")  # no CUDA ops on a CPU

import tensorflow as tf
import tensorflow_addons as tfa

import tf_ooo

layers = tf.keras.layers
tf.keras.utils.set_random_seed(1)

model = tf.keras.Sequential(
    [
        tf.keras.Input((20,)),
        layers.Embedding(100, 32),
        layers.RNN(tfa.rnn.LayerNormLSTMCell(48)),
        tfa.layers.WeightNormalization(layers.Dense(64, activation="relu"), data_init=False),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=tfa.optimizers.MovingAverage(tfa.optimizers.LAMB(1e-3)),
    loss=tfa.losses.SigmoidFocalCrossEntropy(from_logits=True),
)

x = tf.random.stateless_uniform((256, 20), seed=(1, 2), maxval=100, dtype=tf.int32)
y = tf.one_hot(tf.random.stateless_uniform((256,), seed=(3, 4), maxval=10, dtype=tf.int32), 10)
callback = tf_ooo.OOOBackprop(compare=True)
model.fit(x, y, epochs=2, verbose=0, callbacks=[callback, tfa.callbacks.TimeStopping(seconds=600)])
print(callback.report.summary())
