"""Addresses of a cluster: text only."""

import socket

import pytest

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.cluster import target_of
from tf_ooo.hosts.devices import (
    answers,
    can_listen,
    check_devices,
    cluster_of_environment,
    free_port,
    held_ports,
    host_port,
    is_cluster,
    outward_host,
    parse,
)
from tf_ooo.hosts.supervising import Job


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


@pytest.mark.parametrize("text", ["yes", "a:1;b:2", "cpu", "a:0,b:1"])
def test_devices_that_are_none(text):
    with pytest.raises(OptionsError, match=f"^devices='{text}' is not accepted; accepted: .* is no address"):
        check_devices(text)


@pytest.mark.parametrize(("text", "expected"), [("", None), (None, None), (" a:1, b:2", "a:1,b:2")])
def test_the_variable(monkeypatch, text, expected):
    monkeypatch.delenv("TF_OOO_CLUSTER", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_OOO_CLUSTER", text)
    assert cluster_of_environment() == expected


@pytest.mark.parametrize("text", ["auto", "CPU:0,CPU:1", "a:1,a:1", "2"])
def test_a_variable_that_is_no_cluster(monkeypatch, text):
    """Its letters were looked for as devices."""
    monkeypatch.setenv("TF_OOO_CLUSTER", text)
    with pytest.raises(OptionsError, match=f"^TF_OOO_CLUSTER='{text}': cluster: "):
        target_of(None)


def test_who_listens():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        address = f"127.0.0.1:{one.getsockname()[1]}"
        assert answers(address) == ""
        assert "another process has that port" in can_listen(address)
        assert outward_host([address]) == "127.0.0.1"
    assert answers(address)
    assert can_listen(f"127.0.0.1:{free_port()}") == ""
    # An address reserved for documentation: no machine's own.
    assert "is it another machine's address?" in can_listen("192.0.2.1:80")


def test_a_port_that_is_held_is_given_to_nobody_else():
    with held_ports(2) as ports, socket.socket() as other, socket.socket() as server:
        assert len(set(ports)) == 2
        with pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", ports[0]))
        # For whom it is held: a server that asks as TensorFlow's do.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        assert answers(f"127.0.0.1:{ports[0]}") == ""
        assert "refused" in answers(f"127.0.0.1:{ports[1]}")


def test_the_ports_of_a_job_are_held():
    with Job(["train.py"], workers=2).addresses() as addresses, socket.socket() as other:
        assert len(parse(addresses)) == 2
        with pytest.raises(OSError, match="already in use"):
            other.bind(host_port(parse(addresses)[1]))
    with Job(["train.py"], cluster="a:1,b:2").addresses() as addresses:
        assert addresses == "a:1,b:2"
