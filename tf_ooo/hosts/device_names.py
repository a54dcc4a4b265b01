"""What ``devices=`` may be, as far as that can be told without TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.addresses import is_cluster as are_addresses
from tf_ooo.hosts.addresses import parse

_PARTS = re.compile(r"(?:/?(?:device:)?)(CPU|GPU|TPU):(\d+)", re.IGNORECASE)
_FULL = re.compile(r"/job:[^/]+/(?:replica:\d+/)?task:\d+/(?:device:)?(?:CPU|GPU|TPU):\d+", re.IGNORECASE)


def check_devices(value: Any) -> None:
    """OptionsError unless ``value`` can be ``devices=``; whether they exist is known once TensorFlow runs."""
    if isinstance(value, bool) or (isinstance(value, int) and value < 1):
        raise OptionsError(f"devices={value!r} is not accepted; accepted: an int of at least 1, or names")
    if isinstance(value, int) or value is None or is_cluster(value):
        return
    if isinstance(value, str):
        if any(_PARTS.fullmatch(text.strip()) for text in value.split(",")):
            raise OptionsError(
                f"devices={value!r} is not accepted; write a list, {[t.strip() for t in value.split(',')]}"
            )
        parse(value)
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise OptionsError(
            f"devices={value!r:.80} is not accepted; accepted: an int, a list of device names such as "
            "['CPU:0', 'CPU:1'], or a cluster, 'host1:port,host2:port'"
        )
    for name in value:
        text = str(getattr(name, "name", name))
        if not (_PARTS.fullmatch(text) or _FULL.fullmatch(text)) and ":physical_device:" not in text:
            raise OptionsError(f"devices: {text!r} is no device name; write 'CPU:0', 'GPU:1' or a full name")


def over_hosts(value: Any) -> bool:
    """Whether ``devices=`` are those of a cluster: its addresses, or an object that has devices."""
    return are_addresses(value) or is_cluster(value)


def is_cluster(value: Any) -> bool:
    """Whether ``value`` is an object that has devices."""
    return hasattr(value, "devices") and not isinstance(value, Sequence)
