"""A recurrent network of 16 layers: the next word of a text.

python examples/paper/rnn.py --layers 16 --size tiny
"""

import keras
from keras import layers
from paper_data import last_words
from paper_options import asked_for

import tf_ooo

SIZES = {
    "tiny": {"layers": 16, "width": 128, "length": 8, "vocabulary": 500, "batch": 48},
    "small": {"layers": 16, "width": 512, "length": 8, "vocabulary": 2000, "batch": 192},
    "full": {"layers": 16, "width": 1024, "length": 32, "vocabulary": 30000, "batch": 64},
}


def build(of, rows=None):
    """Logits of the next word.  Layers are unrolled: from within a loop no dW can be moved."""
    words = keras.Input((of.length,), dtype="int32", batch_size=rows)
    body = [
        layers.SimpleRNN(of.width, return_sequences=number < of.layers - 1, unroll=True)
        for number in range(of.layers)
    ]
    embedding = layers.Embedding(of.vocabulary, of.width)
    return keras.Sequential([words, embedding, *body, layers.Dense(of.vocabulary)])


def data(of, count, seed=0):
    """Texts, and the word that follows each."""
    return last_words(of.data, count, of.length, of.vocabulary, seed)


def optimizer(of):
    """At this rate loss falls at size tiny."""
    return keras.optimizers.Adam(1e-3)


def main():
    """Trains, and says how the step was rewritten."""
    of = asked_for(__doc__, SIZES)
    model = build(of)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(of), loss, metrics=["accuracy"], jit_compile=False)
    x, y = of.shard(*data(of, of.rows_of_epoch))
    callback = tf_ooo.OOOBackprop(mode=of.mode, **of.mode_options)
    model.fit(x, y, batch_size=of.rows_of_step, epochs=of.epochs, verbose=2, callbacks=[callback])
    print(callback.report.summary())


if __name__ == "__main__":
    main()
