"""Ranks that do not train the same thing are refused by name before the first step."""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_fits, keras_layers, keras_losses, keras_optimizers, train_function, versions
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.ranks.base import Message
from tf_ooo.tracing.averaging import unnumbered

if TYPE_CHECKING:
    import keras

_OWN_TO_A_PROCESS = (
    "name", "seed", "function", "registered_name", "build_config", "shared_object_id",
    "batch_shape", "batch_input_shape", "vocabulary",
)  # fmt: skip


@dataclass(frozen=True)
class Description(Message):
    """Holds what must be the same on all ranks; values are of JSON types, and named by where they are."""

    versions: Mapping[str, str]
    weights: Sequence[Any]
    layers: Sequence[Mapping[str, Any]]
    loss: Any
    loss_weights: Any
    class_weight: Any
    optimizers: Sequence[Mapping[str, Any]]
    steps_per_execution: int
    run_eagerly: bool
    options: Mapping[str, Any]
    batch: Sequence[Any] | None = None


def description_of(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    options: Mapping[str, Any],
    batch: Sequence[Any] | None = None,
) -> Description:
    """Describe a built model, and what else its ranks have to agree on."""
    used, weights = versions.keras_of(model), keras_fits.argument_of_fit("class_weight")
    of_classes = isinstance(weights, dict)  # keys of JSON are texts
    return Description(
        versions={
            "python": ".".join(platform.python_version_tuple()[:2]),
            "tensorflow": tf.__version__,
            "keras": f"{used.__name__} {used.__version__}",
        },
        # Keras numbers layers within a process; where they are in the model says which they are.  Keras 2 has
        # the layer's name before the variable's.
        weights=[
            [list(weight.shape), str(weight.dtype), bool(weight.trainable), unnumbered(weight.name)]
            for weight in model.weights
        ],
        layers=[_layer(part) for part in keras_layers.parts_of(model)],
        loss=_loss(getattr(model, "loss", None)),
        loss_weights=keras_losses.loss_weights(model),
        class_weight={str(key): float(value) for key, value in weights.items()} if of_classes else None,
        optimizers=[_optimizer(optimizer) for optimizer in optimizers],
        steps_per_execution=train_function.steps_per_execution(model),
        run_eagerly=bool(model.run_eagerly),
        options=options,
        batch=batch,
    )


def _layer(layer: keras.layers.Layer) -> dict[str, Any]:
    """Describe a layer; of a user's own class only the class, as its parts have entries of their own."""
    described: dict[str, Any] = {"class": type(layer).__name__}
    if keras_layers.is_kerass_own(layer) and not keras_layers.parts_of(layer)[1:]:
        described |= _settings(layer)
        described |= keras_layers.learned_from_data(layer)
    return described


def _settings(part: Any) -> dict[str, Any]:
    """Return the config of a layer or loss; nothing where it tells none."""
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        return dict(json.loads(json.dumps(_nameless(part.get_config()), default=_plain)))
    return {}


def _nameless(config: Any) -> Any:
    """Leave out what may differ: numbered names, drawn seeds, contents of files, sizes of batches."""
    if isinstance(config, dict) and config.get("class_name") == "__lambda__":
        return "lambda"
    if isinstance(config, dict):
        return {key: _nameless(value) for key, value in config.items() if key not in _OWN_TO_A_PROCESS}
    if isinstance(config, (list, tuple)):
        return [_nameless(value) for value in config]
    return "nan" if isinstance(config, float) and math.isnan(config) else config


def _loss(loss: object) -> Any:
    if isinstance(loss, dict):
        return {key: _loss(value) for key, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_loss(value) for value in loss]
    if loss is None or isinstance(loss, str):
        return loss
    name = getattr(loss, "__name__", None) or type(loss).__name__
    settings = _settings(loss) if keras_losses.is_kerass_own(loss) else {}
    return {"class": name, **settings} if settings else name


def _optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    config: dict[str, Any] = {"class": type(optimizer).__name__}
    try:
        config |= json.loads(json.dumps(optimizer.get_config(), default=_plain))
    except (NotImplementedError, TypeError, ValueError):
        config["config"] = "not serializable"
    config = _without_rates(config)
    config["state variables"] = len(keras_optimizers.state_of(optimizer))
    return config


def _without_rates(config: Any) -> Any:
    """Learning rates are variables, which are broadcast; schedules are not.  Also of optimizers in one."""
    if not isinstance(config, dict):
        return config
    return {
        key: value if key == "learning_rate" else _without_rates(value)
        for key, value in config.items()
        if key != "name" and (key != "learning_rate" or isinstance(value, dict))
    }


def _plain(value: object) -> Any:
    return float(value) if hasattr(value, "__float__") else type(value).__name__


def batch_of(element: object) -> list[Any]:
    """Rows, rank and dtype of each tensor of a batch; other dimensions may change from batch to batch."""
    tensors = [value for value in tf.nest.flatten(element) if hasattr(value, "shape")]  # sparse ones as one
    shapes = [(tf.as_dtype(tensor.dtype), tf.TensorShape(tensor.shape)) for tensor in tensors]
    return [
        [dtype.as_datatype_enum, shape.rank, shape[0] if shape.rank else None]
        for dtype, shape in shapes
        if shape.rank is not None
    ]


def refuse_different(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises OptionsError, the same on every rank, where any rank's fields are not rank 0's."""
    lines = [
        line
        for rank, theirs in enumerate(everyone)
        for line in differences(f"rank {rank}", theirs, everyone[0])
    ]
    if lines:
        more = f" (and {len(lines) - 3} more differences)" if len(lines) > 3 else ""
        raise OptionsError(f"the ranks do not train the same thing: {'; '.join(lines[:3])}{more}")


def differences(who: str, theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Return each place where two JSON values, the second rank 0's, differ, in words."""
    parts: list[tuple[Any, Any, str]] = []
    lists = isinstance(theirs, list) and isinstance(ours, list)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted(set(theirs) | set(ours))
        parts = [(theirs.get(key), ours.get(key), f"{where}.{key}".lstrip(".")) for key in keys]
    elif lists and any(isinstance(item, (list, dict)) for item in ours):
        if len(theirs) != len(ours):
            return [f"{who} has {len(theirs)} {where}, rank 0 has {len(ours)}"]
        parts = [(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(theirs, ours, strict=True))]
    elif theirs != ours:
        return [f"{who} has {where} {_text(theirs)}, rank 0 has {_text(ours)}"]
    return [line for part in parts for line in differences(who, *part)]


def _text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
