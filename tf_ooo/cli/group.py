"""The command ``tf-ooo`` itself, and how it shows errors."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from tf_ooo.errors import OOOError
from tf_ooo.version import __version__

_TENSORFLOW = ("tensorflow", "keras")


class Refused(click.ClickException):
    """Turns an error of the library into one line and exit code 2, as for a wrong option."""

    exit_code = 2


class _OneLineErrors(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OOOError as error:
            raise Refused(str(error)) from error
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name not in _TENSORFLOW:
                raise
            raise Refused(
                f"this needs TensorFlow with Keras, and {name} is not installed here: pip install '.[cpu]' "
                "or '.[gpu]' (plan and simulate of files with costs need neither)"
            ) from error


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tf-ooo")
def main() -> None:
    """Out-of-order backprop for unmodified TensorFlow and Keras."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("tf_ooo").setLevel(logging.WARNING)
