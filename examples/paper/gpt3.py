"""GPT-3 medium (Brown et al. 2020): of each word the next one.

python examples/paper/gpt3.py --layers 24 --size tiny
"""

import keras
import numpy as np
from keras import layers
from paper_data import next_words
from paper_options import adam_w, asked_for

import tf_ooo

SIZES = {
    "tiny": {"layers": 24, "width": 64, "heads": 2, "length": 32, "vocabulary": 500, "batch": 12},
    "small": {"layers": 24, "width": 256, "heads": 4, "length": 64, "vocabulary": 2000, "batch": 6},
    "full": {"layers": 24, "width": 1024, "heads": 16, "length": 512, "vocabulary": 50257, "batch": 4},
}


def check(of):
    """ValueError where settings do not go together."""
    if of.width % of.heads:
        raise ValueError(f"width={of.width} is no multiple of heads={of.heads}")


def build(of, rows=None):
    """Logits of each next word.  GPT-3 has GPT-2's layers; every second one's attention is sparse there."""
    words = keras.Input((of.length,), dtype="int32", batch_size=rows)
    x = states(words, of)
    return keras.Model(words, layers.Dense(of.vocabulary)(x))


def states(words, of):
    """The normalized state behind all layers for each word."""
    x = embedded(words, of)
    for _ in range(of.layers):
        attention = layers.MultiHeadAttention(of.heads, of.width // of.heads)
        y = layers.LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * of.width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(of.width)(y)
    return layers.LayerNormalization()(x)


def embedded(words, of):
    """Vectors of words: the sum of one for each word and one for each place."""
    # Places are computed from the words: an embedding of a constant would be no layer of the model.
    places = 0 * words + np.arange(words.shape[1], dtype="int32")
    return layers.Embedding(of.vocabulary, of.width)(words) + layers.Embedding(words.shape[1], of.width)(
        places
    )


def data(of, count, seed=0):
    """Texts, and of each word the next one."""
    return next_words(of.data, count, of.length, of.vocabulary, seed)


def optimizer(of):
    """Return the authors' optimizer for BERT, at a rate at which loss falls at size tiny."""
    return adam_w(3e-4)


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
