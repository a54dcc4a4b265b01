"""BERT (Devlin et al. 2019) of any depth: fine-tuned on pairs of sentences, or trained on hidden words.

python examples/paper/bert.py --layers 12 --task pretrain --size tiny
"""

import keras
from keras import layers, ops
from paper_data import MASK, SEP, hidden_words, pairs
from paper_options import asked_for

import tf_ooo
from tf_ooo.bench.shared.networks import embedded, encoded

SIZES = {
    "tiny": {
        "layers": 12, "width": 64, "heads": 2, "length": 32, "vocabulary": 500, "hidden": 5, "batch": 12,
        "task": "pretrain",
    },
    "small": {
        "layers": 12, "width": 256, "heads": 4, "length": 64, "vocabulary": 2000, "hidden": 10, "batch": 6,
        "task": "pretrain",
    },
    "full": {
        "layers": 12, "width": 1024, "heads": 16, "length": 128, "vocabulary": 30522, "hidden": 20,
        "batch": 10, "task": "pretrain",
    },
}  # fmt: skip


def build(of, rows=None):
    """Logits of the two answers, or of each hidden word."""
    words = keras.Input((of.length,), dtype="int32", batch_size=rows)
    # The second sentence begins behind the first [SEP].
    is_end = ops.cast(ops.equal(words, SEP), "int32")
    second = ops.minimum(ops.cumsum(is_end, axis=1) - is_end, 1)
    x = embedded(words, of.vocabulary, of.width) + layers.Embedding(2, of.width)(second)
    x = encoded(layers.LayerNormalization()(x), of.layers, of.width, of.heads)
    if of.task == "finetune":
        pooled = layers.Dense(of.width, activation="tanh")(x[:, 0])
        return keras.Model(words, layers.Dense(2)(pooled))
    # Where words are hidden: ones first, from left to right.
    _, places = ops.top_k(ops.cast(ops.equal(words, MASK), "float32"), of.hidden)
    x = ops.matmul(ops.one_hot(places, of.length), x)
    x = layers.LayerNormalization()(layers.Dense(of.width, activation="gelu")(x))
    return keras.Model(words, layers.Dense(of.vocabulary)(x))


def data(of, count, seed=0):
    """Pairs of sentences and whether they belong together, or texts and their hidden words."""
    if of.task == "finetune":
        return pairs(of.data, count, of.length, of.vocabulary, seed)
    return hidden_words(of.data, count, of.length, of.vocabulary, of.hidden, seed)


def optimizer():
    """Of these rates loss falls at size tiny."""
    return keras.optimizers.Adam(3e-4)


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
