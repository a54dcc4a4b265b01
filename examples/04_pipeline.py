"""A small BERT, fine-tuned on two worker processes: does the second sentence answer the first?

The pairs are made by a rule, as no installed package ships any.  A question asks who, where or when; an
answer names somebody, a place or a time.  Two of three are of the kind that was asked for (label 1).
The encoder has learned before to fill in hidden words of questions and their answers, on one device.

Both workers run on this machine.  On two machines start on each, with the same list,
    tf-ooo worker --cluster host1:2222,host2:2222 --task 0 --insecure-network   (--task 1 on the other)
"""

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import tf_ooo
from tf_ooo.hosts.devices import free_port

WHO = ["anna", "ben", "clara", "david", "emma", "felix", "grace", "henry"]
WHERE = ["paris", "rome", "cairo", "lima", "oslo", "tokyo", "delhi", "boston"]
WHEN = ["dawn", "noon", "dusk", "midnight", "six", "seven", "eight", "nine"]
DOES = ["sleep", "run", "eat", "sing", "talk", "work", "wait", "smile"]
QUESTIONS = (
    "who did {does} in {where} at {when} ?",
    "where did {who} {does} at {when} ?",
    "when did {who} {does} in {where} ?",
)
ANSWERS = ("it was {who}", "it was in {where}", "it was at {when}")
WORDS = (
    ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "who", "where", "when", "did", "in", "at", "?", "it", "was"]
    + WHO
    + WHERE
    + WHEN
    + DOES
)
TOKEN = {word: number for number, word in enumerate(WORDS)}
LENGTH, WIDTH, DEPTH, HEADS = 16, 32, 2, 4
BATCH, MICROBATCHES, EPOCHS = 64, 2, 3
HIDDEN_SHARE = 0.2


def pairs(count, seed, always=False):
    """Tokens and segments (0 in the first sentence, 1 in the second), labels, all 1 if ``always``."""
    random = np.random.default_rng(seed)
    tokens, segments, labels = np.zeros((count, LENGTH), "int32"), np.zeros((count, LENGTH), "int32"), []
    for row in range(count):
        asked, answered = random.integers(3), random.integers(3)
        if always or random.integers(2):
            answered = asked
        question = ["[CLS]", *filled(QUESTIONS[asked], random), "[SEP]"]
        answer = [*filled(ANSWERS[answered], random), "[SEP]"]
        numbers = [TOKEN[word] for word in question + answer]
        tokens[row, : len(numbers)] = numbers
        segments[row, len(question) : len(numbers)] = 1
        labels.append(asked == answered)
    return (tokens, segments), np.array(labels, "int32")


def hidden_words(count, seed):
    """Pairs that belong together, some of their words hidden; all words; 1 where a word was hidden."""
    (tokens, segments), _ = pairs(count, seed, always=True)
    hidden = (np.random.default_rng(seed).random(tokens.shape) < HIDDEN_SHARE) & (tokens > TOKEN["[MASK]"])
    return (np.where(hidden, TOKEN["[MASK]"], tokens), segments), tokens, hidden.astype("float32")


def filled(sentence, random):
    """The words of a sentence, each blank with one of its words."""
    words = {"who": WHO, "where": WHERE, "when": WHEN, "does": DOES}
    return sentence.format(**{blank: random.choice(choices) for blank, choices in words.items()}).split()


class Places(layers.Layer):
    """Adds what each place of a sentence has learned."""

    def build(self, shape):
        self.places = self.add_weight(shape=(LENGTH, WIDTH), initializer="uniform", name="places")

    def call(self, x):
        return x + self.places


def encoder():
    """Token, position and segment embeddings, encoder layers."""
    tokens, segments = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(len(WORDS), WIDTH)(tokens) + layers.Embedding(2, WIDTH)(segments)
    x = layers.LayerNormalization()(Places()(x))
    for _ in range(DEPTH):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x))
        y = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(x))
        x = layers.LayerNormalization()(x + y)
    return keras.Model([tokens, segments], x)


def classifier(body):
    """With a pooler on [CLS]."""
    pooled = layers.Dense(WIDTH, activation="tanh")(body.output[:, 0])
    return keras.Model(body.input, layers.Dense(2)(pooled))


def pretrained():
    """An encoder that has learned to fill in hidden words; stock Keras."""
    body = encoder()
    model = keras.Model(body.input, layers.Dense(len(WORDS))(body.output))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, weighted_metrics=["accuracy"], jit_compile=False)
    x, words, hidden = hidden_words(100 * BATCH, seed=0)
    model.fit(x, words, sample_weight=hidden, batch_size=BATCH, epochs=EPOCHS, verbose=2)
    return body


def main():
    """Pretrains, starts the workers, fine-tunes, prints where the layers went."""
    keras.utils.set_random_seed(1)
    model = classifier(pretrained())
    cluster = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task"]
    workers = [
        subprocess.Popen([*command, str(task)], stdout=subprocess.PIPE, text=True) for task in range(2)
    ]
    try:
        for worker in workers:
            print(worker.stdout.readline().strip())
        fine_tune(model, cluster)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def fine_tune(model, cluster):
    """Trains as a pipeline; prints how well, and the partition."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"], jit_compile=False)
    callback = tf_ooo.OOOBackprop(mode="pipeline", devices=cluster, microbatches=MICROBATCHES)
    x, y = pairs(100 * BATCH, seed=1)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=2, callbacks=[callback])
    test_x, test_y = pairs(1000, seed=2)
    test_loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"1000 other pairs: loss {test_loss:.4f}, accuracy {accuracy:.3f}")
    for stage in callback.report.pipeline["stages"]:
        print(
            f"stage {stage['stage']} on {stage['device']}: {', '.join(stage['layers'])}\n    {stage['why']}"
        )
    report = callback.report
    print(f"schedule {report.schedule}: predicted {report.predicted_step_s * 1e3:.0f} ms a step, ", end="")
    print(f"measured {report.measured_step_s * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
