"""DenseNet-121 (Huang et al. 2017) with any growth rate.

python examples/paper/densenet121.py --growth 12 --size tiny
"""

import keras
from paper_data import images
from paper_options import asked_for

import tf_ooo
from tf_ooo.bench.single.networks import densenet

_BLOCKS = (6, 12, 24, 16)
SIZES = {
    "tiny": {"growth": 12, "blocks": _BLOCKS, "pixels": 32, "classes": 100, "batch": 8},
    "small": {"growth": 12, "blocks": _BLOCKS, "pixels": 32, "classes": 100, "batch": 32},
    "full": {"growth": 12, "blocks": _BLOCKS, "pixels": 224, "classes": 1000, "batch": 32},
}


def build(of, rows=None):
    """Logits of the classes."""
    return densenet(of.blocks, of.growth, of.pixels, of.classes, rows)


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed)


def optimizer():
    """Of these rates loss falls at size tiny."""
    return keras.optimizers.SGD(0.1)


def main():
    """Trains, and says how the step was rewritten."""
    of = asked_for(__doc__, SIZES)
    model = build(of)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], jit_compile=False)
    x, y = of.shard(*data(of, of.steps * of.batch))
    callback = tf_ooo.OOOBackprop(mode=of.mode, **of.mode_options)
    model.fit(x, y, batch_size=of.batch, epochs=of.epochs, verbose=2, callbacks=[callback])
    print(callback.report.summary())


if __name__ == "__main__":
    main()
