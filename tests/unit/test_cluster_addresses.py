"""Addresses of a cluster: text only."""

import socket

import pytest

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.addresses import answers, can_listen, free_port, host_port, is_cluster, outward_host, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host1:2222,host2:2222", True),
        ("10.0.0.1:80", True),
        ("[::1]:2222, localhost:9", True),
        ("CPU:0,CPU:1", False),
        ("gpu:0", False),
        ("/job:worker/task:1", False),
        ("host1", False),
        (4, False),
        (["host1:1"], False),
    ],
)
def test_told_from_devices(text, expected):
    assert is_cluster(text) is expected


def test_parse():
    assert parse(" a:1 ,b:2") == ("a:1", "b:2")
    assert parse(["[::1]:2"]) == ("[::1]:2",)
    assert host_port("[::1]:2") == ("::1", 2)


@pytest.mark.parametrize("text", ["", "a", "a:b", "a:0", "a:65536", "a:1,", "a:1,a:1"])
def test_no_cluster(text):
    with pytest.raises(OptionsError, match="cluster"):
        parse(text)


def test_who_listens():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        address = f"127.0.0.1:{one.getsockname()[1]}"
        assert answers(address) == ""
        assert can_listen(address)
        assert outward_host([address]) == "127.0.0.1"
    assert answers(address)
    assert can_listen(f"127.0.0.1:{free_port()}") == ""
    assert can_listen("192.0.2.1:80")  # an address reserved for documentation: no machine's own
