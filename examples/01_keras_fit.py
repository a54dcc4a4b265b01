"""model.fit with out-of-order backprop on scikit-learn's digits: one line more than without.

One CPU has nothing to gain by another order, as the verdict says; a gain comes where devices wait, as GPUs do
for one another.  Four emulated ones show it at the end.
"""

import keras
from sklearn.datasets import load_digits

import tf_ooo
from tf_ooo.demo.strips import strips, verdict
from tf_ooo.demo.training import trained

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callback = tf_ooo.OOOBackprop(timeline="out/keras_fit", compare=True)  # however short the fit is
model.fit(images, labels, batch_size=64, epochs=3, validation_split=0.2, callbacks=[callback])
print(callback.report.summary())

ways = trained()  # by stock Keras, by 1F1B and by tf_ooo, in a process of its own
print("", *strips(ways, columns=110), verdict(ways), sep="\n")
