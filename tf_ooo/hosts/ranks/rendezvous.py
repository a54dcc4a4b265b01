"""Has all ranks meet at rank 0 before a library starts that would hang or abort in C++ without one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import START_S, START_VARIABLE, can_listen, host_port, outward_host
from tf_ooo.hosts.ranks.line import Line
from tf_ooo.hosts.ranks.roll import Member, Roll, late, received_member, refusal

_LOG = logging.getLogger("tf_ooo")
# Horovod's own variable for how long ranks wait for each other; it takes 30 s, several times over.
_HOROVODS_LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
# Where a script has called hvd.init() itself, all ranks are there; one may read data for longer.
_BEGUN_S = 600.0
_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK", "HOROVOD_SIZE")
_REPLY_S = 5.0  # of who has connected


@dataclass(frozen=True)
class Meeting:
    """Lets rank ``rank`` of ``size`` meet the others; ``variable`` sets for how many seconds it waits.

    If it waits longer than 45 s, a warning names the ranks that are missing then.
    """

    rank: int
    size: int
    variable: str
    default_s: float = START_S

    @property
    def limit_s(self) -> float:
        return float(os.environ.get(self.variable) or self.default_s)

    def host(self, listener: socket.socket) -> Roll:
        """Return rank 0's roll once all have come. BackendError: one has not, or runs another tf_ooo."""
        begun_s, warned = time.monotonic(), self.limit_s <= START_S
        members, lines = {0: Member(0)}, dict[int, Line]()
        while len(members) < self.size and time.monotonic() < begun_s + self.limit_s:
            if not warned and time.monotonic() > begun_s + START_S:
                warned = True
                who = f"rank {self._without(members)}"
                limit = f"it is waited for up to {self.limit_s:.0f} s ({self.variable})"
                _LOG.warning("%s; %s", late(who, START_S), limit)
            until_s = begun_s + (self.limit_s if warned else START_S)
            listener.settimeout(max(0.01, until_s - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                line = Line(listener.accept()[0])
                member = received_member(line, _REPLY_S)
                if member is None or member.rank not in range(1, self.size) or member.rank in members:
                    line.close()
                    continue
                members[member.rank], lines[member.rank] = member, line
        missing = self._without(members)
        why = self._missing(missing) if missing else refusal(members)
        everyone = [member for _, member in sorted(members.items())]
        for line in lines.values():
            line.send({"refused": why} if why else {"members": list(map(asdict, everyone))})
        if why:
            raise self._error(why)
        return Roll(0, everyone, lines, self.limit_s)

    def join(self, where: Callable[[], str]) -> Roll:
        """Return another rank's roll once all have come; ``where``: rank 0's address, empty if unknown."""
        deadline_s = time.monotonic() + self.limit_s
        while (asked := self._asked(where())) is None:
            if time.monotonic() > deadline_s:
                raise self._error(self._missing("0"))
            time.sleep(0.05)
        line, reply = asked
        if "members" not in reply:
            raise self._error(reply.get("refused") or "rank 0 does not say who is there")
        members = [Member(**member) for member in reply["members"]]
        return Roll(self.rank, members, {0: line}, self.limit_s)

    def _asked(self, address: str) -> tuple[Line, dict[str, Any]] | None:
        """Return a line to rank 0, and its answer once it has heard of all; None: no answer."""
        if not address:
            return None
        try:
            line = Line(socket.create_connection(host_port(address), timeout=_REPLY_S))
        except OSError:
            return None
        line.send(asdict(Member(self.rank)))
        reply = line.receive(self.limit_s + 2 * _REPLY_S)
        return None if reply is None else (line, reply)

    def _without(self, members: Mapping[int, Member]) -> str:
        return ", ".join(str(rank) for rank in range(self.size) if rank not in members)

    def _missing(self, ranks: str) -> str:
        return (
            f"rank {ranks} did not come within {self.limit_s:.0f} s ({self.variable}); it ended before "
            "training began, trains without OOOBackprop, or is still reading data: see what it has printed, "
            "then start all again"
        )

    def _error(self, why: str) -> BackendError:
        return BackendError(f"rank {self.rank} of {self.size}: {why}")


def meet_by_horovods_server(begun: bool = False) -> Roll | None:
    """Return a roll of all ranks that Horovod's launcher has started; None if it started none.

    Rank 0 leaves its address at the launcher's rendezvous server.  ``begun``: the script has called
    ``hvd.init()``.  BackendError: as of :class:`Meeting`.
    """
    address, port, rank, size = (os.environ.get(name, "") for name in _VARIABLES)
    if not (address and port and rank.isdecimal() and size.isdecimal()):
        return None
    place = f"http://{address}:{port}/tf_ooo/roll"
    variable, default_s = (START_VARIABLE, _BEGUN_S) if begun else (_HOROVODS_LIMIT, START_S)
    meeting = Meeting(int(rank), int(size), variable, default_s)
    if meeting.rank:
        return meeting.join(lambda: (_ask(place) or b"").decode())
    host = outward_host([f"{address}:{port}"])
    with listening(host, 0) as listener:
        if _ask(place, f"{host}:{listener.getsockname()[1]}".encode()) is None:
            return None  # Horovod says in its own words that the server is not there
        return meeting.host(listener)


def meet_at(address: str, rank: int, size: int) -> Roll:
    """Return a roll of all ranks: rank 0 listens at the address until all are connected.

    BackendError: it cannot listen there, or as of :class:`Meeting`.
    """
    meeting = Meeting(rank, size, START_VARIABLE)
    if rank:
        return meeting.join(lambda: address)
    try:
        with listening(*host_port(address)) as listener:
            return meeting.host(listener)
    except OSError as error:
        raise BackendError(f"rank 0 cannot listen at {address}: {can_listen(address) or error}") from error


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket that accepts connections at that address of this machine, in the block."""
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(where[:2], family=family) as listener:
        yield listener


def _ask(url: str, put: bytes | None = None) -> bytes | None:
    """Return the content at the address, b"" after a put; None: nothing there, or no answer."""
    request = urllib.request.Request(url, data=put, method="GET" if put is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=5.0) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None
