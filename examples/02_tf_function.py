"""A custom training step with out-of-order backprop on scikit-learn's digits."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_ooo

images, labels = load_digits(return_X_y=True)
data = tf.data.Dataset.from_tensor_slices(((images / 16.0).astype("float32"), labels.astype("int32")))
data = data.shuffle(2000, seed=1).batch(64, drop_remainder=True).repeat(3)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)


@tf_ooo.function(schedule="auto", compare=True)  # from the first step on
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for step, (x, y) in enumerate(data):
    loss = train_step(x, y)
    if step % 20 == 0:
        print(f"step {step}: loss {float(loss):.4f}")
print(train_step.report.summary())
