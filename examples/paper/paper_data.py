"""The data sets of the scripts of this folder, as arrays.

``real``: downloaded by Keras or tensorflow-datasets.  ``shipped``: real data that comes with a package:
scikit-learn's digits, the text of Python's manual.  ``generated``: made by a rule that can be learned.
``auto``: shipped, where the package is installed, else generated.
"""

import re

import keras
import numpy as np

# The first words of every vocabulary.
PAD, CLS, SEP, MASK, UNKNOWN = range(5)
_SPECIAL = 5
# These are names in tensorflow-datasets, and where the text is in a row. OpenWebText is not among them.
_MRPC = ("glue/mrpc", "sentence1", "sentence2")
_ARTICLES, _TALKS = ("wiki40b/en", "text"), ("ted_hrlr_translate/ru_to_en", "en")
_MOST = 5000  # rows of them
# Wikipedia's articles have these between their parts.
_MARKS = re.compile("_START_[A-Z]+_|_NEWLINE_")
_FOLLOWED = 0.9  # of the generated words


def images(source, count, pixels, classes, seed=0, channels="last"):
    """Images of shape (count, pixels, pixels, 3), or with their channels first, and their classes.

    Each channel has mean 0 and standard deviation 1, of these images together.

    real: CIFAR-100 up to 32 pixels, above that ImageNet.  shipped: 1797 digits of 8 x 8 pixels, enlarged.
    generated: each class has a pattern of its own, which noise is added to.
    """
    random = np.random.default_rng(seed)
    source = _there(source, "sklearn")
    if source == "real":
        x, y = _cifar100() if pixels <= 32 else _imagenet(count, pixels)
    elif source == "shipped":
        x, y = _digits()
        x = np.repeat(x.reshape(-1, 8, 8, 1), 3, axis=-1)
    else:
        patterns = np.random.default_rng(0).random((classes, 8, 8, 3), "float32")
        y = random.integers(0, classes, count)
        x = np.clip(patterns[y] + random.normal(0, 0.2, (count, 8, 8, 3)), 0, 1)
    chosen = random.permutation(len(x))[np.arange(count) % len(x)]
    x, y = x[chosen], y[chosen] % classes
    if source == "real" and pixels <= 32:
        x = _cropped_and_flipped(x, random)
    places = np.arange(pixels) * x.shape[1] // pixels
    said = {"real": "CIFAR-100" if pixels <= 32 else "ImageNet", "shipped": "scikit-learn's digits"}
    print(f"data: {source}{', ' + said[source] if source in said else ''}; {count} images of {pixels} pixels")
    x = _standardized(x)[:, places][:, :, places]
    return x if channels == "last" else x.transpose(0, 3, 1, 2), y.astype("int32")


def pairs(source, count, length, vocabulary, seed=0):
    """Two sentences in ``length`` words, [CLS] a [SEP] b [SEP], and whether they belong together.

    real: MRPC, whether they say the same.  shipped, generated: whether b follows a.
    """
    random, half = np.random.default_rng(seed), (length - 3) // 2
    source = _source_of_words(source, vocabulary)
    if source == "real":
        first, second, y = _mrpc(vocabulary, half)
        chosen = random.integers(0, len(y), count)
        first, second, y = first[chosen], second[chosen], y[chosen]
    else:
        words = _words(source, vocabulary, seed)
        y = random.integers(0, 2, count)
        starts = random.integers(0, len(words) - 2 * half, count)
        elsewhere = random.integers(0, len(words) - half, count)
        first = words[starts[:, None] + np.arange(half)]
        second = words[np.where(y == 1, starts + half, elsewhere)[:, None] + np.arange(half)]
    print(f"data: {source}, {_about(source, 'MRPC')}; {count} pairs of sentences, {length} words")
    cls, sep = np.full((count, 1), CLS), np.full((count, 1), SEP)
    pad = np.full((count, length - 3 - 2 * half), PAD)
    return np.concatenate([cls, first, sep, second, sep, pad], 1).astype("int32"), y.astype("int32")


def hidden_words(source, count, length, vocabulary, hidden, seed=0):
    """Texts of ``length`` words with so many of them hidden, and the hidden ones from left to right."""
    random = np.random.default_rng(seed)
    texts = _texts(source, count, length, vocabulary, seed, _ARTICLES)
    places = np.sort(np.argsort(random.random((count, length)), axis=1)[:, :hidden], axis=1)
    y = np.take_along_axis(texts, places, 1)
    np.put_along_axis(texts, places, MASK, 1)
    return texts, y


def next_words(source, count, length, vocabulary, seed=0):
    """Texts of ``length`` words, and of each word the next one."""
    texts = _texts(source, count, length + 1, vocabulary, seed, _ARTICLES)
    return texts[:, :-1], texts[:, 1:]


def last_words(source, count, length, vocabulary, seed=0):
    """Texts of ``length`` words, and the one word that follows each.  real: of talks, as IWSLT is."""
    texts = _texts(source, count, length + 1, vocabulary, seed, _TALKS)
    return texts[:, :-1], texts[:, -1]


def _texts(source, count, length, vocabulary, seed, real):
    source = _source_of_words(source, vocabulary)
    words = _words(source, vocabulary, seed, real)
    starts = np.random.default_rng(seed).integers(0, len(words) - length, count)
    print(f"data: {source}, {_about(source, real[0])}; {count} texts of {length} words")
    return words[starts[:, None] + np.arange(length)].astype("int32")


def _source_of_words(source, vocabulary):
    if vocabulary <= _SPECIAL:
        raise SystemExit(f"vocabulary={vocabulary}: the first {_SPECIAL} numbers are no words; take more")
    return _there(source, "pydoc_data")


def _words(source, vocabulary, seed, real=()):
    """One long text as numbers; of real data the rows of a set, one behind the other."""
    if source == "real":
        name, key = real
        return np.concatenate(_numbers([_text(row[key]) for row in _rows(name)], vocabulary))
    if source == "shipped":
        from pydoc_data.topics import topics

        return _numbers([" ".join(topics.values())], vocabulary)[0]
    random, words = np.random.default_rng(seed), [_SPECIAL]
    drawn = random.random(20_000), random.integers(_SPECIAL, vocabulary, 20_000)
    for follows, any_word in zip(*drawn, strict=True):
        following = _SPECIAL + (7 * words[-1] + 3) % (vocabulary - _SPECIAL)
        words.append(following if follows < _FOLLOWED else int(any_word))
    return np.array(words)


def _numbers(texts, vocabulary):
    """The numbers of each text's words, in lower case and without punctuation.

    The most frequent words have the first numbers; a word that has none is unknown.
    """
    # Its first two numbers are no words: padding, and unknown words.
    vectorization = keras.layers.TextVectorization(vocabulary - _SPECIAL + 2, ragged=True)
    vectorization.adapt(texts)
    numbers = vectorization(texts)
    words = numbers.flat_values.numpy()
    words = np.where(words < 2, UNKNOWN, words + _SPECIAL - 2)
    return np.split(words, numbers.row_splits.numpy()[1:-1])


def _cut(words, length):
    return np.pad(words[:length], (0, max(0, length - len(words))), constant_values=PAD)


def _about(source, real):
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


def _standardized(x):
    """Give each channel mean 0 and standard deviation 1."""
    x = x.astype("float32")
    x -= x.mean((0, 1, 2), dtype="float64").astype("float32")
    variance = np.square(x).mean((0, 1, 2), dtype="float64")
    x /= np.sqrt(np.maximum(variance, 1e-12)).astype("float32")
    return x


def _cropped_and_flipped(x, random):
    """Change pictures as usual for CIFAR: moved by up to 4 pixels, black beyond the edge; half mirrored."""
    count, pixels = x.shape[:2]
    rows, columns = (random.integers(0, 9, (count, 1)) + np.arange(pixels) for _ in range(2))
    columns = np.where(random.random((count, 1)) < 0.5, columns, columns[:, ::-1])
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _cifar100():
    (x, y), _ = _loaded("CIFAR-100", keras.datasets.cifar100.load_data)
    return x, y[:, 0]


def _imagenet(count, pixels):
    """Take the square in the middle of each image, 7/8 of the shorter side: as 224 pixels of 256."""
    import tensorflow as tf

    def square(row):
        side = tf.reduce_min(tf.shape(row["image"])[:2]) * 7 // 8
        image = tf.image.resize_with_crop_or_pad(row["image"], side, side)
        return tf.image.resize(image, (pixels, pixels), antialias=True), row["label"]

    rows = _load("imagenet2012").take(count).map(square, tf.data.AUTOTUNE)
    x, y = zip(*rows.as_numpy_iterator(), strict=True)
    return np.stack(x), np.array(y)


def _mrpc(vocabulary, length):
    """First and second sentences of so many words, and whether they say the same."""
    name, *keys = _MRPC
    rows = _rows(name)
    numbers = _numbers([_text(row[key]) for key in keys for row in rows], vocabulary)
    first, second = np.array([_cut(words, length) for words in numbers]).reshape(2, len(rows), length)
    return first, second, np.array([row["label"] for row in rows])


def _text(of_row):
    return _MARKS.sub(" ", of_row.decode())


def _rows(name):
    return list(_load(name).take(_MOST).as_numpy_iterator())


def _load(name):
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError:
        raise SystemExit(
            f"{name} needs: pip install 'tf_ooo[datasets]' (and a network); or --data shipped, generated"
        ) from None
    return _loaded(name, lambda: tfds.load(name, split="train"))


def _loaded(name, load):
    """Return what ``load`` returns; an error in it, or a download by hand, is told in one line."""
    try:
        return load()
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SystemExit(
            f"{name} cannot be loaded: {reason:.200}; --data shipped or generated needs no download"
        ) from None
