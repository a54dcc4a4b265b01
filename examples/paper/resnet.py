"""ResNet-50, -101 or -152 (He et al. 2016).

python examples/paper/resnet.py --layers 50 --size tiny
"""

import keras
from paper_data import images
from paper_options import asked_for

import tf_ooo
from tf_ooo.bench.shared.networks import resnet

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
SIZES = {
    "tiny": {"layers": 50, "blocks": 1.0, "width": 0.125, "pixels": 32, "classes": 100, "batch": 8},
    "small": {"layers": 50, "blocks": 1.0, "width": 0.5, "pixels": 32, "classes": 100, "batch": 32},
    "full": {"layers": 50, "blocks": 1.0, "width": 1.0, "pixels": 224, "classes": 1000, "batch": 128},
}


def build(of, rows=None):
    """Logits of the classes; small images begin without the stride of 4.

    With ``width`` times the channels and ``blocks`` times the blocks of each stage; of large images all.
    """
    if of.layers not in BLOCKS:
        raise ValueError(f"layers={of.layers}: a ResNet has {', '.join(map(str, BLOCKS))}")
    stages = tuple(max(1, round(of.blocks * count)) for count in BLOCKS[of.layers])
    if of.pixels > 32:
        network = getattr(keras.applications, f"ResNet{of.layers}")
        images = keras.Input((of.pixels, of.pixels, 3), batch_size=rows)
        return network(weights=None, input_tensor=images, classes=of.classes, classifier_activation=None)
    return resnet(stages, of.width, of.pixels, rows, of.classes)


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed)


def optimizer():
    """Of these rates loss falls at size tiny."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


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
