"""Ten models of which some are best replicated, some cut, and some both; rows are those of a micro-batch."""

from __future__ import annotations

from functools import partial

from tf_ooo.bench.shared.networks import Network, encoder, gpt2, mlp, plain_resnet
from tf_ooo.bench.shared.plain_networks import convolutions, text, unet

_IMAGE = (32, 32, 3)
_EVEN, _ONE_LARGE = (900,) * 9, (600, 2600, 1400, 700, 400, 10)
_FALLING = (1600, 1200, 900, 600, 400, 10)

CASES: dict[str, Network] = {
    "mlp_even": Network(partial(mlp, (*_EVEN, 10)), 192, _EVEN[:1]),
    "mlp_one_large": Network(partial(mlp, _ONE_LARGE), 192, _ONE_LARGE[:1]),
    "mlp_falling": Network(partial(mlp, _FALLING), 256, _FALLING[:1]),
    "mlp_few_rows": Network(partial(mlp, (1400,) * 7 + (10,)), 24, (1400,)),
    "cnn": Network(partial(convolutions, (24, 40, 56, 88), 32, 200), 16, _IMAGE),
    "resnet": Network(partial(plain_resnet, (2, 2, 2), 16, 10), 16, _IMAGE),
    "unet": Network(partial(unet, 16, 3, 48, 3), 4, (48, 48, 3), classes=3, labels=(48, 48)),
    "transformer": Network(partial(encoder, 4, 192, 4, 48, 2000), 6, (48,), 2000),
    "gpt2": Network(partial(gpt2, 3, 160, 4, 40, 600), 8, (40,), 600, 600, labels=(40,)),
    "text": Network(partial(text, 5000, 96, 64), 24, (64,), 5000),
}
