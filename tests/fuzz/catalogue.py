"""Lists what set-ups are drawn from: layers with their arguments, optimizers, losses, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Among an argument's values: it is left out, as its default is taken. The first value is the simplest.
LEFT_OUT = ...

# An input has these dimensions beside that of the rows, in the tensor that the first layer takes.
RANKS = {"features": 1, "tokens": 2, "sequence": 2, "image": 3, "volume": 4}
WORDS = 11
BATCH_SIZE = 4

ACTIVATIONS = (LEFT_OUT, LEFT_OUT, "relu", "tanh", "sigmoid", "gelu", "elu", "swish", "softplus", "softmax")
REGULARIZERS = (LEFT_OUT, LEFT_OUT, LEFT_OUT, LEFT_OUT, "l2", "l1")
CONSTRAINTS = (*(LEFT_OUT,) * 8, "max_norm", "non_neg", "unit_norm")
FROZEN = (*(LEFT_OUT,) * 7, False)
UNITS = (3, 5, 6, 8)
RATES = (0.1, 0.3)
SEEDS = tuple(range(1, 9))


@dataclass(frozen=True)
class Kind:
    """A class of layers.

    Attributes:
        ranks: of the tensors that it takes; without the dimension of the rows, so that 1 is features.
        choices: ``{argument: its values}``.
        to: the rank of what it gives; None: that of what it takes.
        keeps_shape: all dimensions but the last are as before (where strides and padding let them be).
        recurrent: gives the last of a sequence's results, or with return_sequences all.
        takes: what it is called with: ``h``, ``h, h`` or ``[h, h]``.
        trains: has weights.
        not_in: stock TensorFlow or Keras fails at it under these policies.
        wraps: the argument that is a layer of one of these kinds; cells: a tuple of them.
    """

    ranks: tuple[int, ...]
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    to: int | None = None
    keeps_shape: bool = True
    recurrent: bool = False
    takes: str = "h"
    trains: bool = True
    not_in: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    def rank_after(self, rank: int) -> int:
        return rank - 1 if self.recurrent else self.to or rank


ANY = (1, 2, 3, 4)
# Losses are float32: a penalty of another type cannot be added to them.
OTHER_TYPES = ("mixed_float16", "mixed_bfloat16", "float64")
PENALTIES = frozenset(
    f"{name}_regularizer" for name in ("kernel", "bias", "activity", "recurrent", "depthwise", "alpha")
)
WEIGHTS = {
    "activation": ACTIVATIONS,
    "use_bias": (LEFT_OUT, LEFT_OUT, False),
    "kernel_regularizer": REGULARIZERS,
    "bias_regularizer": REGULARIZERS,
    "activity_regularizer": REGULARIZERS,
    "kernel_constraint": CONSTRAINTS,
    "trainable": FROZEN,
}
DEPTHWISE = {name.replace("kernel", "depthwise"): values for name, values in WEIGHTS.items()}
# A separable convolution has no one kernel.
SEPARABLE = {name: values for name, values in WEIGHTS.items() if "kernel" not in name}
WINDOWS = {
    "kernel_size": (2, 3),
    "strides": (LEFT_OUT, LEFT_OUT, 2),
    "padding": ("same", "same", "valid"),
}
# TensorFlow has no gradient of a transposed convolution that would leave nothing: "same" only.
WIDENING = {"kernel_size": (2, 3), "strides": (LEFT_OUT, 2), "padding": ("same",)}
RECURRENT = {
    "units": UNITS,
    "return_sequences": (LEFT_OUT, True, True),
    "go_backwards": (LEFT_OUT, LEFT_OUT, True),
    "unroll": (LEFT_OUT, LEFT_OUT, True),
    "dropout": (LEFT_OUT, LEFT_OUT, 0.2),
    "recurrent_dropout": (LEFT_OUT, LEFT_OUT, LEFT_OUT, 0.1),
    "kernel_regularizer": REGULARIZERS,
    "recurrent_regularizer": REGULARIZERS,
    "trainable": FROZEN,
    "seed": SEEDS,
}
POOLING = {"pool_size": (2,), "padding": ("same",)}
ATTENTION = {"dropout": (LEFT_OUT, LEFT_OUT, 0.2), "seed": SEEDS}

LAYERS = {
    # of any shape
    "Dense": Kind(ANY, {"units": UNITS, **WEIGHTS}),
    "Dropout": Kind(ANY, {"rate": RATES, "seed": SEEDS}, trains=False),
    "GaussianDropout": Kind(ANY, {"rate": RATES, "seed": SEEDS}, trains=False),
    "AlphaDropout": Kind(ANY, {"rate": RATES, "seed": SEEDS}, trains=False),
    "GaussianNoise": Kind(ANY, {"stddev": RATES, "seed": SEEDS}, trains=False),
    "BatchNormalization": Kind(
        ANY,
        {
            "momentum": (LEFT_OUT, 0.9),
            "center": (LEFT_OUT, LEFT_OUT, False),
            "scale": (LEFT_OUT, LEFT_OUT, False),
            "trainable": FROZEN,
        },
    ),
    "LayerNormalization": Kind(ANY, {"center": (LEFT_OUT, False), "scale": (LEFT_OUT, False)}),
    "RMSNormalization": Kind(ANY),
    "GroupNormalization": Kind((2, 3, 4), {"groups": (1, -1)}),
    "UnitNormalization": Kind(ANY, trains=False),
    "PReLU": Kind(ANY, {"alpha_regularizer": REGULARIZERS}),
    "LeakyReLU": Kind(ANY, {"negative_slope": (LEFT_OUT, 0.1)}, trains=False),
    "Softmax": Kind(ANY, trains=False),
    "ActivityRegularization": Kind(ANY, {"l2": (0.01, 0.1)}, trains=False, not_in=OTHER_TYPES),
    "Rescaling": Kind(ANY, {"scale": (0.5, -1.5)}, trains=False),
    "RepeatVector": Kind((1,), {"n": (2, 3)}, to=2, keeps_shape=False, trains=False),
    "SpectralNormalization": Kind((1, 2), wraps=("Dense",)),
    # of sequences
    "Conv1D": Kind((2,), {"filters": UNITS, **WINDOWS, **WEIGHTS}),
    "SeparableConv1D": Kind((2,), {"filters": UNITS, **WINDOWS, **SEPARABLE}),
    "DepthwiseConv1D": Kind((2,), {**WINDOWS, **DEPTHWISE}),
    "Conv1DTranspose": Kind((2,), {"filters": UNITS, **WIDENING, **WEIGHTS}),
    "LSTM": Kind((2,), RECURRENT, recurrent=True),
    "GRU": Kind((2,), {**RECURRENT, "reset_after": (LEFT_OUT, False)}, recurrent=True),
    "SimpleRNN": Kind((2,), RECURRENT, recurrent=True),
    "RNN": Kind(
        (2,),
        {"return_sequences": (LEFT_OUT, True)},
        recurrent=True,
        cells=("LSTMCell", "GRUCell", "SimpleRNNCell"),
    ),
    "Bidirectional": Kind(
        (2,),
        {"merge_mode": ("concat", "sum", "mul", "ave")},
        recurrent=True,
        wraps=("LSTM", "GRU", "SimpleRNN"),
    ),
    "TimeDistributed": Kind((2,), wraps=("Dense", "BatchNormalization")),
    "MultiHeadAttention": Kind((2,), {"num_heads": (1, 2), "key_dim": (3, 4), **ATTENTION}, takes="h, h"),
    "GroupQueryAttention": Kind(
        (2,),
        {"head_dim": (3, 4), "num_query_heads": (4,), "num_key_value_heads": (2,), **ATTENTION},
        takes="h, h",
    ),
    "Attention": Kind((2,), {"use_scale": (LEFT_OUT, True), **ATTENTION}, takes="[h, h]"),
    "AdditiveAttention": Kind((2,), ATTENTION, takes="[h, h]"),
    "EinsumDense": Kind(
        (2,), {"equation": ("...c,cd->...d",), "output_shape": (5,), "bias_axes": (LEFT_OUT, "d")}
    ),
    "MaxPooling1D": Kind((2,), POOLING, keeps_shape=False, trains=False),
    "AveragePooling1D": Kind((2,), POOLING, keeps_shape=False, trains=False),
    "UpSampling1D": Kind((2,), {"size": (2,)}, keeps_shape=False, trains=False),
    "ZeroPadding1D": Kind((2,), {"padding": (1,)}, keeps_shape=False, trains=False),
    "SpatialDropout1D": Kind((2,), {"rate": RATES, "seed": SEEDS}, trains=False),
    # of images
    "Conv2D": Kind((3,), {"filters": UNITS, **WINDOWS, **WEIGHTS}),
    "SeparableConv2D": Kind((3,), {"filters": UNITS, **WINDOWS, **SEPARABLE}),
    "DepthwiseConv2D": Kind((3,), {**WINDOWS, **DEPTHWISE, "depth_multiplier": (LEFT_OUT, 2)}),
    "Conv2DTranspose": Kind((3,), {"filters": UNITS, **WIDENING, **WEIGHTS}),
    "ConvLSTM1D": Kind((3,), {"filters": (3, 4), "kernel_size": (2,), "padding": ("same",)}, to=2),
    "MaxPooling2D": Kind((3,), POOLING, keeps_shape=False, trains=False),
    "AveragePooling2D": Kind((3,), POOLING, keeps_shape=False, trains=False),
    "UpSampling2D": Kind(
        (3,), {"size": (2,), "interpolation": ("nearest", "bilinear")}, keeps_shape=False, trains=False
    ),
    "ZeroPadding2D": Kind((3,), {"padding": (1,)}, keeps_shape=False, trains=False),
    "SpatialDropout2D": Kind((3,), {"rate": RATES, "seed": SEEDS}, trains=False),
    # of volumes
    "Conv3D": Kind((4,), {"filters": UNITS, **WINDOWS, **WEIGHTS}),
    # On a CPU the largest of a volume has kernels for float32 and bfloat16.
    "MaxPooling3D": Kind((4,), POOLING, keeps_shape=False, trains=False, not_in=("mixed_float16", "float64")),
}
# Drawn more often than others: those that are common, and soon traced.
OFTEN = ("Dense", "Conv1D", "Conv2D", "Conv3D", "Dropout")
CELLS = {name: {"units": UNITS} for name in ("LSTMCell", "GRUCell", "SimpleRNNCell")}

CLIPPING = {
    "clipnorm": (*(LEFT_OUT,) * 7, 0.5),
    "clipvalue": (*(LEFT_OUT,) * 7, 0.1),
    "global_clipnorm": (*(LEFT_OUT,) * 7, 0.5),
}
AVERAGES = {
    "use_ema": (*(LEFT_OUT,) * 9, True),
    "gradient_accumulation_steps": (*(LEFT_OUT,) * 11, 2),
    "weight_decay": (*(LEFT_OUT,) * 9, 0.01),
    "loss_scale_factor": (*(LEFT_OUT,) * 9, 8.0),
}
OPTIMIZERS = {
    "SGD": {"momentum": (LEFT_OUT, 0.9), "nesterov": (LEFT_OUT, True)},
    "Adam": {"amsgrad": (LEFT_OUT, True)},
    "AdamW": {},
    "Adamax": {},
    "Nadam": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adafactor": {},
    "RMSprop": {"momentum": (LEFT_OUT, 0.9), "centered": (LEFT_OUT, True)},
    "Ftrl": {"l1_regularization_strength": (LEFT_OUT, 0.01)},
    "Lion": {},
    "Lamb": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
}
RATE_SCHEDULES = {
    "ExponentialDecay": {"initial_learning_rate": (0.02,), "decay_steps": (2,), "decay_rate": (0.7,)},
    "CosineDecay": {"initial_learning_rate": (0.02,), "decay_steps": (5,)},
    "PiecewiseConstantDecay": {"boundaries": ([1, 3],), "values": ([0.03, 0.02, 0.01],)},
}

# Each loss has such targets.
LOSSES = {
    "MeanSquaredError": "values",
    "SparseCategoricalCrossentropy": "classes",
    "CategoricalCrossentropy": "one_hot",
    "CategoricalFocalCrossentropy": "one_hot",
    "BinaryCrossentropy": "binary",
    "BinaryFocalCrossentropy": "binary",
    "MeanAbsoluteError": "values",
    "Huber": "values",
    "LogCosh": "values",
    "CosineSimilarity": "values",
    "Hinge": "binary",
    "SquaredHinge": "binary",
    "CategoricalHinge": "one_hot",
}
LOSS_ARGUMENTS = {
    **{name: {"from_logits": (True,)} for name in LOSSES if "rossentropy" in name},
    "CategoricalCrossentropy": {"from_logits": (True,), "label_smoothing": (LEFT_OUT, 0.1)},
    "Huber": {"delta": (LEFT_OUT, 0.5)},
}
METRICS = {
    "classes": ("accuracy", "sparse_categorical_crossentropy"),
    "one_hot": ("accuracy", "categorical_crossentropy"),
    "binary": ("accuracy", "auc"),
    "values": ("mae", "mse", "cosine_similarity"),
}
POLICIES = ("float32", "float32", "mixed_float16", "float32", "mixed_bfloat16", "float64")
SCHEDULES = ("fast_forward", "fast_forward", "in_order")
JOINS = ("Concatenate", "Add", "Multiply", "Average", "Maximum", "Subtract", "Minimum")
REDUCTIONS = ("Flatten", "GlobalAveragePooling", "GlobalMaxPooling")
