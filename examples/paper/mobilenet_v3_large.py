"""MobileNetV3-Large (Howard et al. 2019) of any width.

python examples/paper/mobilenet_v3_large.py --alpha 0.5 --size tiny
"""

import keras
from paper_data import images
from paper_options import asked_for

import tf_ooo

SIZES = {
    "tiny": {"alpha": 0.25, "pixels": 64, "classes": 100, "batch": 16},
    "small": {"alpha": 0.5, "pixels": 96, "classes": 100, "batch": 32},
    "full": {"alpha": 0.5, "pixels": 224, "classes": 1000, "batch": 32},
}


def check(of):
    """ValueError where Keras' own network takes no such images."""
    if of.pixels < 32:
        raise ValueError(f"pixels={of.pixels}: MobileNetV3 takes 32 or more")


def build(of, rows=None):
    """Logits of the classes."""
    shape = (of.pixels, of.pixels, 3)
    images = keras.Input(shape, batch_size=rows)
    # Images are standardized already, where Keras' own scaling expects 0 to 255.
    return keras.applications.MobileNetV3Large(
        shape, of.alpha, weights=None, input_tensor=images, classes=of.classes, classifier_activation=None,
        include_preprocessing=False,
    )  # fmt: skip


def data(of, count, seed=0):
    """Images, their classes."""
    return images(of.data, count, of.pixels, of.classes, seed)


def optimizer(of):
    """The authors' (expr/single_gpu/code/mobilenet_v3_expr_ooo.py, commit 0beb419: rate 0.1)."""
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
