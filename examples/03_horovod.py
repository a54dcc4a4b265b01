"""Data parallel on scikit-learn's digits, each worker on its part of them.

horovodrun -np 2 python examples/03_horovod.py

Without a launcher it trains in one process; with TF_CONFIG, over TensorFlow's own collectives.
"""

import keras
from sklearn.datasets import load_digits

import tf_ooo
from tf_ooo.modes import data_parallel

workers = data_parallel.connect()

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
images, labels = data_parallel.shard(images, labels)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# With several steps in one execution, the messages of one overlap the forward pass of the next.
model.compile(
    keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False, steps_per_execution=8
)

callback = tf_ooo.OOOBackprop(mode="data_parallel")
history = model.fit(
    images,
    labels,
    batch_size=32,
    epochs=3,
    validation_split=0.2,
    verbose=2 if workers.rank == 0 else 0,
    callbacks=[callback],
)
accuracy = history.history["val_accuracy"][-1]
if workers.rank == 0:
    print(f"verdict: {callback.report.headline}")
print(f"worker {workers.rank} of {workers.size} ({workers.name}): val_accuracy of all {accuracy:.4f}")
