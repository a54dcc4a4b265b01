"""DenseNet-121 (Huang et al. 2017) with any growth rate.

python examples/paper/densenet121.py --growth 12 --size tiny
"""

import keras
from keras import layers
from paper_data import images
from paper_options import asked_for

import tf_ooo

_BLOCKS = (6, 12, 24, 16)
SIZES = {
    "tiny": {"growth": 12, "blocks": _BLOCKS, "pixels": 32, "classes": 100, "batch": 8},
    "small": {"growth": 12, "blocks": _BLOCKS, "pixels": 32, "classes": 100, "batch": 32},
    "full": {"growth": 12, "blocks": _BLOCKS, "pixels": 224, "classes": 1000, "batch": 32},
}


def check(of):
    """ValueError where settings do not go together."""
    least = (1 if of.pixels < 128 else 4) * 2 ** (len(of.blocks) - 1)
    if of.pixels < least:
        raise ValueError(f"pixels={of.pixels}: {len(of.blocks)} blocks take {least} or more")


def build(of, rows=None):
    """Logits of the classes; DenseNet-BC, of which Keras has growth 32 only."""
    images = keras.Input((of.pixels, of.pixels, 3), batch_size=rows)
    large = of.pixels >= 128  # images of ImageNet's size begin with a stride of 4
    kernel, stride = (7, 2) if large else (3, 1)
    x = layers.Conv2D(2 * of.growth, kernel, stride, padding="same", use_bias=False)(images)
    if large:
        x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
    for number, count in enumerate(of.blocks):
        for _ in range(count):
            x = layers.Concatenate()([x, convolved(convolved(x, 4 * of.growth, 1), of.growth, 3)])
        if number < len(of.blocks) - 1:
            x = layers.AveragePooling2D(2)(convolved(x, x.shape[-1] // 2, 1))
    x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
    return keras.Model(images, layers.Dense(of.classes)(layers.GlobalAveragePooling2D()(x)))


def convolved(x, filters, kernel):
    """Normalized, ReLU, convolution."""
    x = layers.ReLU()(layers.BatchNormalization(epsilon=1.001e-5)(x))
    return layers.Conv2D(filters, kernel, padding="same", use_bias=False)(x)


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed)


def optimizer(of):
    """At this rate loss falls at size tiny."""
    return keras.optimizers.SGD(0.1)


def main():
    """Trains, and says how the step was rewritten."""
    of = asked_for(__doc__, SIZES, check)
    model = build(of)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(of), loss, metrics=["accuracy"], jit_compile=False)
    x, y = of.shard(*data(of, of.rows_of_epoch))
    callback = tf_ooo.OOOBackprop(mode=of.mode, **of.mode_options)
    model.fit(x, y, batch_size=of.rows_of_step, epochs=of.epochs, verbose=2, callbacks=[callback])
    print(callback.report.summary())


if __name__ == "__main__":
    main()
