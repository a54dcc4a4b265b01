"""Lets ranks agree: a rank that trains something else is refused early; all run the same number of steps.

A rank that receives another kind of message than its own knows what the others are doing, so none waits for a
rank that has run out of data or has stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_fits, keras_layers, train_function, versions
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.ranks.base import Engine, Message
from tf_ooo.tracing.averaging import unnumbered

if TYPE_CHECKING:
    import keras

_OWN_TO_A_PROCESS = (
    "name", "seed", "function", "registered_name", "build_config", "shared_object_id",
    "batch_shape", "batch_input_shape", "vocabulary",
)  # fmt: skip
_LOG = logging.getLogger("tf_ooo")
Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class Description(Message):
    """Holds everything that must be equal on all ranks: JSON values under the names of their places."""

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
    """Describe a built model, with everything else on which ranks have to agree."""
    used, weights = versions.keras_of(model), keras_fits.argument_of_fit("class_weight")
    of_classes = isinstance(weights, dict)  # keys of JSON are texts
    return Description(
        versions={
            "python": ".".join(platform.python_version_tuple()[:2]),
            "tensorflow": tf.__version__,
            "keras": f"{used.__name__} {used.__version__}",
        },
        # Keras numbers layers within a process, so their place in the model identifies them.  Keras 2 puts
        # the layer's name before the variable's.
        weights=[
            [list(weight.shape), str(weight.dtype), bool(weight.trainable), unnumbered(weight.name)]
            for weight in model.weights
        ],
        layers=[_layer(part) for part in keras_layers.parts_of(model)],
        loss=_loss(getattr(model, "loss", None)),
        loss_weights=keras_compiled.loss_weights(model),
        class_weight={str(key): float(value) for key, value in weights.items()} if of_classes else None,
        optimizers=[_optimizer(optimizer) for optimizer in optimizers],
        steps_per_execution=train_function.steps_per_execution(model),
        run_eagerly=bool(model.run_eagerly),
        options=options,
        batch=batch,
    )


def _layer(layer: keras.layers.Layer) -> dict[str, Any]:
    """Describe a layer; for a user's own class only the class, as its parts have entries of their own."""
    described: dict[str, Any] = {"class": type(layer).__name__}
    if keras_layers.is_kerass_own(layer) and not keras_layers.parts_of(layer)[1:]:
        described |= _settings(layer)
        described |= keras_layers.learned_from_data(layer)
    return described


def _settings(part: Any) -> dict[str, Any]:
    """Return the config of a layer or loss; empty if it has none."""
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        return dict(json.loads(json.dumps(_nameless(part.get_config()), default=_plain)))
    return {}


def _nameless(config: Any) -> Any:
    """Remove what may differ: numbered names, drawn seeds, contents of files, sizes of batches."""
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
    settings = _settings(loss) if keras_compiled.is_kerass_own(loss) else {}
    return {"class": name, **settings} if settings else name


def _optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    config: dict[str, Any] = {"class": type(optimizer).__name__}
    try:
        config |= json.loads(json.dumps(optimizer.get_config(), default=_plain))
    except (NotImplementedError, TypeError, ValueError):
        config["config"] = "not serializable"
    config = _without_rates(config)
    config["state variables"] = len(keras_compiled.state_of(optimizer))
    return config


def _without_rates(config: Any) -> Any:
    """Remove learning rates, also of nested optimizers: these are broadcast, but schedules are not."""
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
    """Return rows, rank and dtype of each tensor of a batch; other dimensions may vary by batch."""
    tensors = [value for value in tf.nest.flatten(element) if hasattr(value, "shape")]  # sparse ones as one
    shapes = [(tf.as_dtype(tensor.dtype), tf.TensorShape(tensor.shape)) for tensor in tensors]
    return [
        [dtype.as_datatype_enum, shape.rank, shape[0] if shape.rank else None]
        for dtype, shape in shapes
        if shape.rank is not None
    ]


def refuse_different(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptionsError, the same on every rank, if any rank's fields are not rank 0's."""
    lines = [
        line
        for rank, theirs in enumerate(everyone)
        for line in differences(f"rank {rank}", theirs, everyone[0])
    ]
    if lines:
        more = f" (and {len(lines) - 3} more differences)" if len(lines) > 3 else ""
        raise OptionsError(f"the ranks do not train the same thing: {'; '.join(lines[:3])}{more}")


def differences(who: str, theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Return in words each place where two JSON values differ, the second of which is rank 0's."""
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


@dataclass(frozen=True)
class EpochBegins(Message):
    """Says, when an epoch begins, how many ``steps`` this rank has, if known."""

    epoch: int
    steps: int | None


@dataclass(frozen=True)
class MayRun(Message):
    """Says before each execution, if asked for, for how many ``steps`` this rank has data."""

    steps: int


@dataclass(frozen=True)
class EpochEnds(Message):
    """Says, when an epoch ends, logs, samples of training and of validation, and the weights' bits."""

    logs: Mapping[str, float] = field(default_factory=dict)
    train_samples: float = 0.0
    test_samples: float = 0.0
    weights: int = 0


@dataclass(frozen=True)
class CallbacksRan(Message):
    """Says, after all callbacks of an epoch, whether one of them has stopped the training."""

    stop: bool


@dataclass(frozen=True)
class TrainingEnds(Message):
    """Says, after the last epoch, the weights' bits, which callbacks may have changed, and if a step ran."""

    weights: int = 0
    trained: bool = True


class Lockstep:
    """Counts how many steps this rank may run.

    Args:
        asks: before each execution ask whether all go on, which costs a message but lets one rank alone stop
            within an epoch.  This is always done if the number of batches is not known.
        counts: ask with the batches in hand, even if their number is known: one rank's data may end early.
    """

    def __init__(self, engine: Engine, asks: bool = False, counts: bool = False) -> None:
        self.engine, self.asks, self.counts = engine, asks, counts
        self.left: int | None = None  # steps left in this epoch; None: agree before each execution
        self.of_epoch: int | None = None  # steps of this epoch, where all ranks know them
        self.others_ended = False
        self.trained = True  # whether a rank has run a step, as far as they have told
        self._told = False

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """Agree on the number of steps of an epoch.  OptionsError: the ranks are at different epochs."""
        replies = self._exchange(EpochBegins(epoch, steps))
        if not replies:
            return
        epochs = [reply.epoch for reply in replies]
        if len(set(epochs)) > 1:
            raise OptionsError(
                f"the ranks are at different epochs (rank 0, 1, ...: {epochs}); pass the same "
                "initial_epoch, and list BackupAndRestore before OOOBackprop"
            )
        counts = [reply.steps for reply in replies]
        if self.counts or None in counts:
            self.left = self.of_epoch = None
            return
        known = [count for count in counts if count is not None]
        self.left = self.of_epoch = least = min(known)
        if max(known) != least and not self._told:
            self._told = True
            _LOG.warning(
                "the ranks have %s batches an epoch (rank 0, 1, ...): each epoch ends after %d", counts, least
            )

    def may_run(self, available: int) -> int:
        """Return how many of the ``available`` steps all ranks run now; 0: the epoch is over."""
        if self.others_ended:
            return 0
        count = available if self.left is None else min(available, self.left)
        if self.left is None or self.asks:
            count = min((reply.steps for reply in self._exchange(MayRun(count))), default=0)
        if self.left is not None:
            self.left -= count
        return count

    def did_not_run(self, count: int) -> None:
        """Take back what :meth:`may_run` allowed, because the data had ended."""
        if self.left is not None:
            self.left += count

    def end_epoch(self, mine: EpochEnds) -> list[EpochEnds]:
        """Exchange the ranks' messages at the end of an epoch; only ``mine`` if the others have ended."""
        return self._exchange(mine) or [mine]

    def stops(self, mine: bool) -> bool:
        """Return whether a callback of any rank has stopped the training."""
        return any(reply.stop for reply in self._exchange(CallbacksRan(mine))) or mine or self.others_ended

    def end(self, weights: int = 0, trained: bool = True) -> bool:
        """Say that this rank trains no more; return whether all that end now have the same weights."""
        replies = self._exchange(TrainingEnds(weights, trained))
        self.trained = not replies or any(reply.trained for reply in replies)
        return len({reply.weights for reply in replies}) <= 1

    def _exchange(self, mine: Kind) -> list[Kind]:
        """Return the ranks' messages of this kind; none if some rank does something else, which ends this."""
        while not self.others_ended:
            replies = mine.told(self.engine)
            if all(isinstance(reply, type(mine)) for reply in replies):
                return replies
            if isinstance(mine, TrainingEnds):
                break
            ended = [str(rank) for rank, reply in enumerate(replies) if isinstance(reply, TrainingEnds)]
            if ended:
                self.others_ended = True
                _LOG.warning("rank %s ended training: this rank stops too", ", ".join(ended))
            elif not isinstance(mine, EpochEnds):
                break
            # The others are told of the end before a batch: they end the epoch and say so, too.
        return []


def ended_early(engine: Engine, missing: int) -> BackendError:
    """Return the error of a rank without data while the others train on, who would wait for ever."""
    return BackendError(
        f"rank {engine.rank}'s data ended {missing} batches before the end of the epoch that all ranks "
        "agreed on; give fit the right steps_per_epoch"
    )


def stopped_alone(engine: Engine, left: int) -> BackendError:
    """Return the error of a rank that stopped within an epoch while others may go on and wait for it."""
    return BackendError(
        f"rank {engine.rank} stopped training {left} steps before the end of the epoch, and the others do "
        "not answer; a callback that may stop some ranks only needs OOOBackprop(lockstep='auto')"
    )
