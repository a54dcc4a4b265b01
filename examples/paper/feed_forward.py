"""A plain network of dense layers.

python examples/paper/feed_forward.py --layers 16 --size tiny
"""

import keras
from keras import layers
from paper_data import images
from paper_options import asked_for

import tf_ooo

SIZES = {
    "tiny": {"layers": 16, "width": 384, "pixels": 16, "classes": 10, "batch": 96},
    "small": {"layers": 16, "width": 1280, "pixels": 16, "classes": 10, "batch": 768},
    "full": {"layers": 16, "width": 4096, "pixels": 32, "classes": 100, "batch": 1024},
}


def build(of, rows=None):
    """Logits of the classes."""
    hidden = [layers.Dense(of.width, activation="relu") for _ in range(of.layers)]
    pixels = keras.Input((3 * of.pixels**2,), batch_size=rows)
    return keras.Sequential([pixels, *hidden, layers.Dense(of.classes)])


def data(of, count, seed=0):
    """Images in one line, their classes."""
    x, y = images(of.data, count, of.pixels, of.classes, seed)
    return x.reshape(count, -1), y


def optimizer(of):
    """At this rate loss falls at size tiny."""
    return keras.optimizers.Adam(3e-4)


def main():
    """Trains, and says how the step was rewritten."""
    of = asked_for(__doc__, SIZES)
    model = build(of)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(of), loss, metrics=["accuracy"], jit_compile=False)
    x, y = of.shard(*data(of, of.rows_of_epoch))
    callback = tf_ooo.OOOBackprop(mode=of.mode, **of.mode_options)
    model.fit(x, y, batch_size=of.rows_of_step, epochs=of.epochs, verbose=2, callbacks=[callback])
    print(callback.report.summary())


if __name__ == "__main__":
    main()
