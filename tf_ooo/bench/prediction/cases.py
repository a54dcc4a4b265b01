"""Ten workloads whose steps are predicted: no two layers of one take equally long, optimizers have slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tf_ooo.bench.shared.networks import Network, encoder, gpt2, mlp, rnn
from tf_ooo.bench.shared.plain_networks import convolutions, text, unet

LOGICAL, WORKERS, RANKS = "logical devices", "worker processes", "ranks"


@dataclass(frozen=True)
class PredictionCase:
    """What trains, and on what.

    Attributes:
        network: with the rows of one micro-batch, of ranks those of one batch.
        where: ``LOGICAL`` CPU devices of one process, ``WORKERS`` of this machine, or ``RANKS`` of Horovod.
        devices: so many of them.
        schedule, optimizer: by name.
        microbatches: of a step; of ranks the steps in one execution.
    """

    network: Network
    where: str
    devices: int
    schedule: str
    optimizer: str
    microbatches: int


_IMAGE, _ODD, _RISING = (32, 32, 3), (300, 1111, 702, 1500, 257, 10), (400, 600, 900, 1300, 800, 10)
_NARROW = (96, *(180 + 20 * (n % 3) for n in range(20)), 10)

CASES: dict[str, PredictionCase] = {
    "mlp": PredictionCase(Network(partial(mlp, _ODD), 192, _ODD[:1]), LOGICAL, 2, "1f1b", "adam", 4),
    "cnn": PredictionCase(
        Network(partial(convolutions, (24, 40, 56, 88), 32, 200), 24, _IMAGE), LOGICAL, 3, "gpipe", "sgd", 6
    ),
    "lstm": PredictionCase(
        Network(partial(rnn, "LSTM", 3, 192, 10, 10), 64, (10, 192)),
        LOGICAL, 2, "fast_forward", "rmsprop", 4,
    ),
    "transformer": PredictionCase(
        Network(partial(encoder, 4, 192, 4, 48, 2000), 8, (48,), 2000), LOGICAL, 4, "zb_h1", "adamw", 8
    ),
    "deep_narrow": PredictionCase(
        Network(partial(mlp, _NARROW), 256, _NARROW[:1]), LOGICAL, 4, "zb_v", "nadam", 6
    ),
    "unet": PredictionCase(
        Network(partial(unet, 16, 3, 48, 3), 6, (48, 48, 3), classes=3, labels=(48, 48)),
        WORKERS, 2, "auto", "adam", 4,
    ),
    "text": PredictionCase(
        Network(partial(text, 5000, 96, 64), 32, (64,), 5000), WORKERS, 2, "1f1b", "adagrad", 4
    ),
    "ranks_mlp": PredictionCase(
        Network(partial(mlp, _RISING), 384, _RISING[:1]), RANKS, 2, "reverse_first_k", "adam", 4
    ),
    "ranks_cnn": PredictionCase(
        Network(partial(convolutions, (32, 48, 72, 80), 32, 300), 32, _IMAGE), RANKS, 2, "search", "sgd", 4
    ),
    "ranks_gpt2": PredictionCase(
        Network(partial(gpt2, 3, 160, 4, 40, 600), 8, (40,), 600, 600, labels=(40,)),
        RANKS, 2, "reverse_first_k", "adamw", 4,
    ),
}  # fmt: skip
