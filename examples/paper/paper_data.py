"""The data sets of the scripts of this folder, as arrays.

``real``: downloaded by Keras or tensorflow-datasets.  ``shipped``: real data that comes with a package:
scikit-learn's digits, the text of Python's manual.  ``generated``: made by a rule that can be learned.
``auto``: shipped, where the package is installed, else generated.
"""

import numpy as np

# The first words of every vocabulary.
PAD, CLS, SEP, MASK, UNKNOWN = range(5)
_SPECIAL = 5
# Of tensorflow-datasets, and where the text is in a row of it.  OpenWebText is not among them.
_MRPC, _TEXTS, _TRANSLATED = "glue/mrpc", "wiki40b/en", "ted_hrlr_translate/ru_to_en"
_FOLLOWED = 0.9  # of the generated words


def images(source, count, pixels, classes, seed=0):
    """Images of shape (count, pixels, pixels, 3), 0 to 1, with their classes.

    real: CIFAR-100 up to 32 pixels, above that ImageNet.  shipped: 1797 digits of 8 x 8 pixels, enlarged.
    generated: each class has a pattern of its own, which noise is added to.
    """
    random = np.random.default_rng(seed)
    source = _there(source, "sklearn")
    if source == "real":
        pictures, labels = _cifar100() if pixels <= 32 else _imagenet(count, pixels)
        x, y = pictures[: 8 * count] / np.float32(255), labels[: 8 * count] % classes
    elif source == "shipped":
        x, y = _digits()
        x, y = np.repeat(x.reshape(-1, 8, 8, 1).astype("float32") / 16, 3, axis=-1), y % classes
    else:
        patterns = np.random.default_rng(0).random((classes, 8, 8, 3), "float32")
        y = random.integers(0, classes, count)
        x = np.clip(patterns[y] + random.normal(0, 0.2, (count, 8, 8, 3)), 0, 1).astype("float32")
    chosen = random.permutation(len(x))[np.arange(count) % len(x)]
    places = np.arange(pixels) * x.shape[1] // pixels
    said = {"real": "CIFAR-100" if pixels <= 32 else "ImageNet", "shipped": "scikit-learn's digits"}
    print(f"data: {source}{', ' + said[source] if source in said else ''}; {count} images of {pixels} pixels")
    return x[chosen][:, places][:, :, places], y[chosen].astype("int32")


def pairs(source, count, length, vocabulary, seed=0):
    """Two sentences in ``length`` words, [CLS] a [SEP] b [SEP], and whether they belong together.

    real: MRPC, whether they say the same.  shipped, generated: whether b follows a.
    """
    random, half = np.random.default_rng(seed), (length - 3) // 2
    source, words, rows = _words(source, vocabulary, seed, _MRPC)
    if rows is not None:
        first, second = ([_cut(row[name], half) for row in rows] for name in ("sentence1", "sentence2"))
        y = np.array([row["label"] for row in rows])
        chosen = random.integers(0, len(rows), count)
        first, second, y = np.array(first)[chosen], np.array(second)[chosen], y[chosen]
    else:
        y = random.integers(0, 2, count)
        starts = random.integers(0, len(words) - 2 * half, count)
        elsewhere = random.integers(0, len(words) - half, count)
        first = np.stack([words[start : start + half] for start in starts])
        second = np.stack([words[at : at + half] for at in np.where(y == 1, starts + half, elsewhere)])
    said = "MRPC" if rows is not None else _about(source)
    print(f"data: {source}, {said}; {count} pairs of sentences, {length} words")
    cls, sep = np.full((count, 1), CLS), np.full((count, 1), SEP)
    pad = np.full((count, length - 3 - 2 * half), PAD)
    return np.concatenate([cls, first, sep, second, sep, pad], 1).astype("int32"), y.astype("int32")


def hidden_words(source, count, length, vocabulary, hidden, seed=0):
    """Texts of ``length`` words with so many of them hidden, and the hidden ones from left to right."""
    random = np.random.default_rng(seed)
    texts = _texts(source, count, length, vocabulary, seed, _TEXTS)
    places = np.sort(np.argsort(random.random((count, length)), axis=1)[:, :hidden], axis=1)
    y = np.take_along_axis(texts, places, 1)
    np.put_along_axis(texts, places, MASK, 1)
    return texts, y


def next_words(source, count, length, vocabulary, seed=0):
    """Texts of ``length`` words, and of each word the next one."""
    texts = _texts(source, count, length + 1, vocabulary, seed, _TEXTS)
    return texts[:, :-1], texts[:, 1:]


def last_words(source, count, length, vocabulary, seed=0):
    """Texts of ``length`` words, and the one word that follows each.  real: of talks, as IWSLT is."""
    texts = _texts(source, count, length + 1, vocabulary, seed, _TRANSLATED)
    return texts[:, :-1], texts[:, -1]


def _texts(source, count, length, vocabulary, seed, real):
    source, words, rows = _words(source, vocabulary, seed, real)
    if rows is not None:
        words = np.concatenate([row["text"] if "text" in row else row["en"] for row in rows])
    starts = np.random.default_rng(seed).integers(0, len(words) - length, count)
    print(f"data: {source}, {_about(source, real)}; {count} texts of {length} words")
    return np.stack([words[start : start + length] for start in starts]).astype("int32")


def _words(source, vocabulary, seed, real):
    """Where data are from, and one long text as numbers; of a real data set instead its rows."""
    if vocabulary <= _SPECIAL:
        raise SystemExit(f"vocabulary={vocabulary}: the first {_SPECIAL} numbers are no words; take more")
    source = _there(source, "pydoc_data")
    if source == "real":
        return source, None, _downloaded(real, vocabulary)
    if source == "shipped":
        from pydoc_data.topics import topics

        words = " ".join(topics.values()).lower().split()
        return source, _numbers([words], vocabulary)[0], None
    random, words = np.random.default_rng(seed), [_SPECIAL]
    drawn = random.random(20_000), random.integers(_SPECIAL, vocabulary, 20_000)
    for follows, any_word in zip(*drawn, strict=True):
        following = _SPECIAL + (7 * words[-1] + 3) % (vocabulary - _SPECIAL)
        words.append(following if follows < _FOLLOWED else int(any_word))
    return source, np.array(words), None


def _numbers(texts, vocabulary):
    """Of each word its number: the most frequent ones come first, what has no number is unknown."""
    words, counts = np.unique([word for text in texts for word in text], return_counts=True)
    kept = words[np.argsort(-counts, kind="stable")][: vocabulary - _SPECIAL]
    number = {word: place + _SPECIAL for place, word in enumerate(kept)}
    return [np.array([number.get(word, UNKNOWN) for word in text]) for text in texts]


def _cut(words, length):
    return np.pad(words[:length], (0, max(0, length - len(words))), constant_values=PAD)


def _about(source, real=""):
    names = {"shipped": "Python's manual", "generated": "a made-up language"}
    return names.get(source, real)


def _there(source, package):
    """``auto``: shipped where the package is installed, else generated."""
    if source != "auto":
        return source
    try:
        __import__(package)
    except ModuleNotFoundError:
        return "generated"
    return "shipped"


def _digits():
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise SystemExit(
            "the digits come with scikit-learn: pip install 'tf_ooo[digits]'; or --data generated"
        ) from None
    return load_digits(return_X_y=True)


def _cifar100():
    import keras

    (x, y), _ = _loaded("CIFAR-100", keras.datasets.cifar100.load_data)
    return x, y[:, 0]


def _imagenet(count, pixels):
    import tensorflow as tf

    rows = _load("imagenet2012").take(count)
    x = np.stack([tf.image.resize(row["image"], (pixels, pixels)).numpy() for row in rows])
    return x, np.array([int(row["label"]) for row in rows])


def _downloaded(name, vocabulary, most=5000):
    """The first rows, their texts as numbers."""
    rows = [dict(row) for row in _load(name).take(most).as_numpy_iterator()]
    texts = [key for key, value in rows[0].items() if isinstance(value, bytes)]
    split = [row[key].decode().lower().split() for row in rows for key in texts]
    numbers = iter(_numbers(split, vocabulary))
    return [row | {key: next(numbers) for key in texts} for row in rows]


def _load(name):
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError:
        raise SystemExit(
            f"{name} needs: pip install tensorflow-datasets (and a network); or --data shipped, generated"
        ) from None
    return _loaded(name, lambda: tfds.load(name, split="train"))


def _loaded(name, load):
    """What ``load`` returns; what goes wrong in it, or must be downloaded by hand, is told in one line."""
    try:
        return load()
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SystemExit(
            f"{name} cannot be loaded: {reason:.200}; --data shipped or generated needs no download"
        ) from None
