"""ResNet-50, -101 or -152 (He et al. 2016).

python examples/paper/resnet.py --layers 50 --size tiny
"""

import keras
from keras import layers
from paper_data import images
from paper_options import asked_for

import tf_ooo

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
SIZES = {
    "tiny": {"layers": 50, "blocks": 1.0, "width": 0.125, "pixels": 32, "classes": 100, "batch": 8},
    "small": {"layers": 50, "blocks": 1.0, "width": 0.5, "pixels": 32, "classes": 100, "batch": 32},
    "full": {"layers": 50, "blocks": 1.0, "width": 1.0, "pixels": 224, "classes": 1000, "batch": 128},
}


def check(of):
    """ValueError where settings do not go together."""
    if of.layers not in BLOCKS:
        raise ValueError(f"layers={of.layers}: a ResNet has {', '.join(map(str, BLOCKS))}")
    if of.pixels > 32 and (of.blocks, of.width) != (1, 1):
        raise ValueError(
            f"pixels={of.pixels}: above 32 a ResNet is Keras' own, which takes blocks=1 and width=1 only"
        )


def build(of, rows=None):
    """Logits of the classes; small images begin without the stride of 4.

    With ``width`` times the channels and ``blocks`` times the blocks of a stage; above 32 pixels Keras' own.
    """
    images = keras.Input((of.pixels, of.pixels, 3), batch_size=rows)
    if of.pixels > 32:
        network = getattr(keras.applications, f"ResNet{of.layers}")
        return network(weights=None, input_tensor=images, classes=of.classes, classifier_activation=None)
    x = convolved(images, round(64 * of.width), 3)
    for stage, count in enumerate(BLOCKS[of.layers]):
        channels = round(64 * of.width) * 2**stage
        for number in range(max(1, round(of.blocks * count))):
            x = bottleneck(x, channels, 2 if number == 0 and stage else 1)
    return keras.Model(images, layers.Dense(of.classes)(layers.GlobalAveragePooling2D()(x)))


def bottleneck(x, channels, strides):
    """Three convolutions, and what leads around them."""
    short = x
    if strides != 1 or x.shape[-1] != 4 * channels:
        short = convolved(x, 4 * channels, 1, strides, active=False)
    x = convolved(convolved(x, channels, 1), channels, 3, strides)
    return layers.ReLU()(convolved(x, 4 * channels, 1, active=False) + short)


def convolved(x, channels, kernel, strides=1, active=True):
    """Convolution, normalized, and ReLU where it is ``active``."""
    x = layers.Conv2D(channels, kernel, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(x) if active else x


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed)


def optimizer(of):
    """At this rate loss falls at size tiny."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


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
