"""ResNet-18, -34, -50, -101, -152 or -200 (He et al. 2016).

python examples/paper/resnet.py --layers 50 --size tiny
"""

import keras
from keras import layers
from paper_data import images
from paper_options import asked_for, channels, check_channels

import tf_ooo

BLOCKS = {
    18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}  # fmt: skip
_SMALL = {"layers": 50, "blocks": 1.0, "pixels": 32, "classes": 100, "channels": "last"}
SIZES = {
    "tiny": {**_SMALL, "width": 0.125, "batch": 8},
    "small": {**_SMALL, "width": 0.5, "batch": 32},
    "full": {**_SMALL, "width": 1.0, "pixels": 224, "classes": 1000, "channels": "first", "batch": 128},
}


def check(of):
    """ValueError where settings do not go together."""
    check_channels(of)
    if of.layers not in BLOCKS:
        raise ValueError(f"layers={of.layers}: a ResNet has {', '.join(map(str, BLOCKS))}")


def build(of, rows=None):
    """Logits of the classes; with ``width`` times the channels and ``blocks`` times the blocks of a stage.

    Images of up to 32 pixels begin without the stride of 4.
    """
    with channels(of) as (axis, shape):
        images = keras.Input(shape, batch_size=rows)
        first = round(64 * of.width)
        if of.pixels > 32:
            x = layers.MaxPooling2D(3, 2, padding="same")(convolved(images, first, 7, axis, 2))
        else:
            x = convolved(images, first, 3, axis)
        for stage, count in enumerate(BLOCKS[of.layers]):
            for number in range(max(1, round(of.blocks * count))):
                strides = 2 if number == 0 and stage else 1
                x = block(x, first * 2**stage, strides, axis, bottleneck=of.layers >= 50)
        return keras.Model(images, layers.Dense(of.classes)(layers.GlobalAveragePooling2D()(x)))


def block(x, filters, strides, axis, bottleneck):
    """Three convolutions, the last to four times the channels, or two; and what leads around them."""
    outputs, short = 4 * filters if bottleneck else filters, x
    if strides != 1 or x.shape[axis] != outputs:
        short = convolved(x, outputs, 1, axis, strides, active=False)
    if bottleneck:
        x = convolved(convolved(x, filters, 1, axis), filters, 3, axis, strides)
    else:
        x = convolved(x, filters, 3, axis, strides)
    return layers.ReLU()(convolved(x, outputs, 1 if bottleneck else 3, axis, active=False) + short)


def convolved(x, filters, kernel, axis, strides=1, active=True):
    """Convolution, normalized, and ReLU where it is ``active``."""
    x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(axis=axis)(x)
    return layers.ReLU()(x) if active else x


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed, of.channels)


def optimizer(of):
    """The authors' (expr/data_par/code/run.py, commit 0beb419: RMSProp, there at 0.001 times the workers).

    TensorFlow 1's has no momentum, decays by 0.9, and adds 1e-10 under the root.
    """
    return keras.optimizers.RMSprop(1e-3, epsilon=1e-10)


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
