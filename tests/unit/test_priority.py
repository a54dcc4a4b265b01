"""An urgent main stream: what TensorFlow is told, and what users are."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tf_ooo


class Gpu:
    name = "/physical_device:GPU:0"


@pytest.fixture
def told(monkeypatch):
    """Note what a machine with one GPU is told."""
    found = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [Gpu])
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *given: found.append(given))
    return found


def test_one_logical_gpu_with_a_priority(told):
    tf_ooo.high_priority_main_stream(3 * 2**30)
    ((gpu, configurations),) = told
    assert gpu is Gpu
    (made,) = configurations
    assert (made.memory_limit, made.experimental_priority) == (3 * 1024, -5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1000,), "memory_limit_bytes must be"),
        ((2**30, 0), "priority must be"),
        ((2.0**30,), "memory_limit_bytes"),
    ],
)
def test_numbers_are_checked(told, given, said):
    with pytest.raises(tf_ooo.OptionsError, match=said):
        tf_ooo.high_priority_main_stream(*given)
    assert not told


def test_a_gpu_that_is_in_use(told, monkeypatch):
    def refuse(*given):
        raise RuntimeError("Virtual devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_logical_device_configuration", refuse)
    with pytest.raises(tf_ooo.BackendError, match="GPU:0 is in use already .*after being initialized"):
        tf_ooo.high_priority_main_stream(2**30)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(tf_ooo.BackendError, match="sees no GPU"):
        tf_ooo.high_priority_main_stream(2**30)
