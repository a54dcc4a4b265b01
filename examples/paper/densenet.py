"""DenseNet-121, -169, -201 or -264 (Huang et al. 2017) with any growth rate.

python examples/paper/densenet.py --layers 121 --growth 12 --size tiny
"""

import keras
from keras import layers
from paper_data import images
from paper_options import asked_for, channels, check_channels

import tf_ooo

BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32), 264: (6, 12, 64, 48)}
_SMALL = {"layers": 121, "growth": 12, "pixels": 32, "classes": 100, "channels": "last"}
SIZES = {
    "tiny": {**_SMALL, "batch": 8},
    "small": {**_SMALL, "batch": 32},
    "full": {**_SMALL, "pixels": 224, "classes": 1000, "channels": "first", "batch": 32},
}


def check(of):
    """ValueError where settings do not go together."""
    check_channels(of)
    if of.layers not in BLOCKS:
        raise ValueError(f"layers={of.layers}: a DenseNet has {', '.join(map(str, BLOCKS))}")
    least = 8 if of.pixels < 128 else 32
    if of.pixels < least:
        raise ValueError(f"pixels={of.pixels}: four blocks take {least} or more")


def build(of, rows=None):
    """Logits of the classes; DenseNet-BC, of which Keras has growth 32 only."""
    with channels(of) as (axis, shape):
        images = keras.Input(shape, batch_size=rows)
        large = of.pixels >= 128  # images of ImageNet's size begin with a stride of 4
        kernel, stride = (7, 2) if large else (3, 1)
        x = layers.Conv2D(2 * of.growth, kernel, stride, padding="same", use_bias=False)(images)
        if large:
            x = layers.MaxPooling2D(3, 2, padding="same")(normalized(x, axis))
        blocks = BLOCKS[of.layers]
        for number, count in enumerate(blocks):
            for _ in range(count):
                y = convolved(convolved(x, 4 * of.growth, 1, axis), of.growth, 3, axis)
                x = layers.Concatenate(axis=axis)([x, y])
            if number < len(blocks) - 1:
                x = layers.AveragePooling2D(2)(convolved(x, x.shape[axis] // 2, 1, axis))
        x = layers.GlobalAveragePooling2D()(normalized(x, axis))
        return keras.Model(images, layers.Dense(of.classes)(x))


def convolved(x, filters, kernel, axis):
    """Normalized, ReLU, convolution."""
    return layers.Conv2D(filters, kernel, padding="same", use_bias=False)(normalized(x, axis))


def normalized(x, axis):
    """Normalized, ReLU."""
    return layers.ReLU()(layers.BatchNormalization(axis=axis, epsilon=1.001e-5)(x))


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed, of.channels)


def optimizer(of):
    """The authors' (expr/single_gpu/code/densenet_expr_ooo.py, commit 0beb419: rate 0.1)."""
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
