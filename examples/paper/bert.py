"""BERT (Devlin et al. 2019) of any depth: fine-tuned on pairs of sentences, or trained on hidden words.

python examples/paper/bert.py --layers 12 --task pretrain --size tiny
"""

import keras
from gpt3 import embedded
from keras import layers, ops
from paper_data import MASK, SEP, hidden_words, pairs
from paper_options import adam_w, asked_for

import tf_ooo

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
        "layers": 12, "width": 768, "heads": 12, "length": 128, "vocabulary": 30522, "hidden": 20,
        "batch": 16, "task": "pretrain",
    },
}  # fmt: skip
TASKS = ("pretrain", "finetune")


def check(of):
    """ValueError where settings do not go together."""
    if of.task not in TASKS:
        raise ValueError(f"task={of.task!r}: expected {' or '.join(TASKS)}")
    if of.width % of.heads:
        raise ValueError(f"width={of.width} is no multiple of heads={of.heads}")
    if of.task == "pretrain" and of.hidden >= of.length:
        raise ValueError(f"hidden={of.hidden} words of texts of length={of.length}: hide fewer")
    if of.task == "finetune" and of.length < 5:
        raise ValueError(f"length={of.length}: two sentences with their marks take 5 words or more")


def build(of, rows=None):
    """Logits of the two answers, or of each hidden word."""
    words = keras.Input((of.length,), dtype="int32", batch_size=rows)
    # The second sentence begins behind the first [SEP].
    is_end = ops.cast(ops.equal(words, SEP), "int32")
    second = ops.minimum(ops.cumsum(is_end, axis=1) - is_end, 1)
    x = blocks(layers.LayerNormalization()(embedded(words, of) + layers.Embedding(2, of.width)(second)), of)
    if of.task == "finetune":
        pooled = layers.Dense(of.width, activation="tanh")(x[:, 0])
        return keras.Model(words, layers.Dense(2)(pooled))
    # These are the places of hidden words: ones first, from left to right.
    _, hidden = ops.top_k(ops.cast(ops.equal(words, MASK), "float32"), of.hidden)
    x = ops.matmul(ops.one_hot(hidden, of.length), x)
    x = layers.LayerNormalization()(layers.Dense(of.width, activation="gelu")(x))
    return keras.Model(words, layers.Dense(of.vocabulary)(x))


def blocks(x, of):
    """The encoder's layers, each of which normalizes what it has added."""
    for _ in range(of.layers):
        attended = layers.MultiHeadAttention(of.heads, of.width // of.heads)(x, x)
        x = layers.LayerNormalization()(x + attended)
        inner = layers.Dense(4 * of.width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(of.width)(inner))
    return x


def data(of, count, seed=0):
    """Pairs of sentences and whether they belong together, or texts and their hidden words."""
    if of.task == "finetune":
        return pairs(of.data, count, of.length, of.vocabulary, seed)
    return hidden_words(of.data, count, of.length, of.vocabulary, of.hidden, seed)


def optimizer(of):
    """The authors', but for the rate of pre-training, at which loss falls at size tiny; they have 2e-5."""
    return adam_w(2e-5 if of.task == "finetune" else 3e-4)


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
