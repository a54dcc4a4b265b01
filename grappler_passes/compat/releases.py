"""Knows the supported TensorFlow releases; says in one line why another one is not used."""

from __future__ import annotations

import importlib.metadata
import logging
import sys

OLDEST = (2, 15)
"""First TensorFlow the plug-in was seen working with."""
TOO_NEW = (2, 22)
"""First TensorFlow that nobody has tried."""

_LOG = logging.getLogger("tf_ooo")
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu")
_said: set[str] = set()


def major_minor(version: str) -> tuple[int, int]:
    """Return ``(2, 22)`` of ``"2.22.0-rc1"``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def why_unsupported() -> str | None:
    """Say in one line why this process' TensorFlow is not used, and the way out; None if it is used.

    Imports TensorFlow.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        return f"TensorFlow cannot be imported ({error}); pip install '.[cpu]' or '.[gpu]'"
    return _why_not(tf.__version__)


def say_at_import() -> None:
    """Log :func:`why_unsupported` if it can be told without importing TensorFlow; raises nothing."""
    version = getattr(sys.modules.get("tensorflow"), "__version__", None) or _installed()
    reason = None if version is None else _why_not(version)
    if reason is not None and reason not in _said:
        _said.add(reason)
        _LOG.warning("nothing is rewritten: %s", reason)


def is_news(reason: str) -> bool:
    """Return whether to log a reason not to rewrite: :func:`why_unsupported` is logged only once."""
    known = reason in _said
    if reason == why_unsupported():
        _said.add(reason)
    return not known


def _why_not(version: str) -> str | None:
    if OLDEST <= major_minor(version) < TOO_NEW:
        return None
    oldest, too_new = (f"{major}.{minor}" for major, minor in (OLDEST, TOO_NEW))
    return f"TensorFlow {version} is not supported; pip install 'tensorflow>={oldest},<{too_new}'"


def _installed() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
