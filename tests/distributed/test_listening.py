"""At which addresses a worker, and a training that uses workers, can be reached."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import tf_ooo
from tests import forked, launches
from tests.distributed.clusters import addresses, lose, start_worker, workers
from tf_ooo.hosts import cluster as cluster_module
from tf_ooo.hosts import devices as listening
from tf_ooo.hosts import native, worker
from tf_ooo.hosts.cluster import connect
from tf_ooo.hosts.devices import answers, held_ports, host_port

pytestmark = pytest.mark.takes(20)


def elsewhere(address):
    """The same port at another address of this machine."""
    return address.replace("127.0.0.1", "127.0.0.2")


def reached(cluster):
    """At its own address and at another, each task: 0 is this process."""
    connect(cluster)
    return [(answers(address), answers(elsewhere(address))) for address in cluster.split(",")]


def test_servers_listen_at_their_own_address_alone():
    cluster = addresses(2)
    with workers(cluster, [1]):
        for own, other in forked.result_of(reached, cluster):
            assert own == ""
            assert "refused" in other


def test_a_port_of_the_process_own_choice():
    """Where a worker serves task 0, the training process has a port of its own."""
    cluster = addresses(2)

    def ports():
        before = listening_ports()
        connect(cluster)
        return listening_ports() - before

    with workers(cluster, [0, 1]):
        ours = forked.result_of(ports)
    assert ours
    assert all(address.endswith("0100007F") for address, _ in ours), ours


def listening_ports():
    """Addresses and ports of this network's listening sockets, as the kernel writes them."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {tuple(fields[1].split(":")) for fields in lines if fields[3] == "0A"}


def test_ports_that_are_held_are_for_the_workers():
    with held_ports(2) as ports:
        cluster = ",".join(f"127.0.0.1:{port}" for port in ports)
        with workers(cluster, [1]):
            assert forked.result_of(devices_of, cluster) == 2


def test_a_port_that_another_process_has_is_named():
    cluster = addresses(2)
    with socket.create_server(host_port(cluster.split(",")[1])):
        said = start_worker(cluster, 1).communicate(60)[0]
    (line,) = [line for line in said.splitlines() if "cannot listen" in line]
    assert f"cannot listen at {cluster.split(',')[1]} (task 1): Address already in use" in line
    assert "another process has that port (ss -ltnp names it): end it, or take another port" in line
    assert "Traceback" not in said


@pytest.mark.parametrize("address", ["192.0.2.1", "[2001:db8::1]"])
def test_other_machines_need_a_word(address):
    with pytest.raises(
        tf_ooo.errors.OptionsError, match=r"can be reached by other machines.*--insecure-network"
    ):
        worker.serve(f"127.0.0.1:2222,{address}:2222", 1)
    with pytest.raises(tf_ooo.errors.BackendError, match="cannot listen"):  # it is nobody's address
        worker.serve(f"127.0.0.1:2222,{address}:2222", 1, insecure_network=True)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.3.2.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("no.such.name.invalid:1", True),
        ("10.0.0.1:1", False),
    ],
)
def test_loopback(address, loopback):
    assert listening.is_loopback(address) == loopback


def open_port(address):
    """Open a port as a server does past our library."""
    with listening.only_at(address), socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def test_a_port_that_was_not_narrowed_is_refused():
    (port,) = launches.free_ports(1)
    with pytest.raises(tf_ooo.errors.BackendError, match="was opened at all addresses"):
        open_port(f"127.0.0.1:{port}")


def test_a_library_that_is_not_compiled_is_named(monkeypatch):
    native.load.cache_clear()
    monkeypatch.setattr(native.Path, "exists", lambda path: False)

    with pytest.raises(tf_ooo.errors.BackendError, match="is not compiled; install a C compiler"):
        open_port("127.0.0.1:2222")
    native.load.cache_clear()


def hold(cluster):
    """Another training: joins, says so, and stays until it is told to end."""
    connect(cluster)
    print("joined", flush=True)
    input()


@contextlib.contextmanager
def held(cluster):
    """The workers are in use in the block, by the process of this number."""
    process = forked.start(hold, cluster)
    try:
        while "joined" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        yield process.pid
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(120)
    finally:
        process.kill()
        process.communicate()


def test_workers_in_use_are_named_and_free_afterwards():
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        with (
            held(cluster) as pid,
            pytest.raises(
                tf_ooo.errors.BackendError, match=rf"\(task [01]\) is in use by another.*process {pid} at"
            ),
        ):
            forked.result_of(connect, cluster)
        assert forked.result_of(devices_of, cluster) == 2


def test_workers_in_use_whose_list_is_in_another_order_are_told_that_first():
    """A worker that is asked by number in another list is somebody else: nobody can be named as in use."""
    cluster = addresses(3)
    first, second, third = cluster.split(",")
    with (
        workers(cluster, [0, 1, 2]),
        held(cluster),
        pytest.raises(tf_ooo.errors.BackendError, match=rf"{third} \(task 1\) was started as task 2 of"),
    ):
        forked.result_of(connect, f"{first},{third},{second}")


@contextlib.contextmanager
def greeting(said):
    """The port of a server that says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as peer:
                        peer.sendall(said)
                        peer.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.alone  # the others start processes
def test_who_waits_is_told_for_whom_before_the_time_is_up(monkeypatch, caplog):
    monkeypatch.setattr(cluster_module, "_PATIENCE_S", 0.0)
    with pytest.raises(tf_ooo.errors.BackendError, match=r"\(task 1\) is not there"):
        connect(cluster := addresses(2), wait_s=1.0)
    last = cluster.split(",")[1]
    waiting = f"waiting for worker {last} (task 1), which is not there yet: Connection refused"
    assert caplog.messages == [waiting]


@pytest.mark.alone  # the others start processes
def test_who_is_no_worker_is_told_in_one_line():
    with greeting(b"SSH-2.0-OpenSSH_9.6\r\n") as port, pytest.raises(tf_ooo.errors.BackendError) as caught:
        connect(f"127.0.0.1:{launches.free_ports(1)[0]},127.0.0.1:{port}", wait_s=1.0)
    said = str(caught.value)
    assert f"127.0.0.1:{port} (task 1) is not there: something listens there, but no tf-ooo worker: " in said
    assert len(said.splitlines()) == 1
    assert "Graph execution" not in said


def devices_of(cluster):
    return len(connect(cluster).devices)


def test_a_worker_that_is_ended_as_soon_as_it_is_ready_says_so():
    cluster = addresses(2)
    started = [start_worker(cluster, task) for task in (0, 1)]
    for process in started:
        while "is ready" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        process.terminate()
    for process in started:
        said = process.communicate(30)[0]
        assert process.returncode == 0, said
        assert "ended by SIGTERM" in said


def serve_to_nobody(cluster):
    """A worker whose last word nobody reads."""

    def say(text):
        print(text, flush=True)
        if "ended" in text:
            time.sleep(600)

    worker.serve(cluster, 1, say=say)


@pytest.mark.parametrize("reader", ["is gone", "does not read"])
def test_a_worker_ends_although_nobody_reads_what_it_says(reader):
    cluster = addresses(2)
    process = start_worker(cluster, 1) if reader == "is gone" else forked.start(serve_to_nobody, cluster)
    try:
        while "is ready" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        if reader == "is gone":
            process.stdout.close()
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()


def test_a_worker_that_was_stopped_ends_as_soon_as_it_goes_on():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        lose(started[1], signal.SIGSTOP)
        started[1].terminate()
        started[1].send_signal(signal.SIGCONT)
        assert started[1].wait(120) == 0


def test_addresses_in_another_order_are_named():
    cluster = addresses(2)
    swapped = ",".join(reversed(cluster.split(",")))
    with workers(swapped, [0, 1]), pytest.raises(tf_ooo.errors.BackendError) as caught:
        forked.result_of(connect, cluster)
    first, last = cluster.split(",")
    first_told, last_told = (
        f"worker {first} (task 0) was started as task 1",
        f"worker {last} (task 1) was started as task 0",
    )
    assert str(caught.value).partition(" of ")[0] in (first_told, last_told)
    assert f" of {swapped}; start it with tf-ooo worker --cluster {cluster}" in str(caught.value)
