"""All ranks meet before Horovod begins, which ends a rank that waits for a lost one by an abort, in C++."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request

from tf_ooo.errors import BackendError

_SCOPE = "tf_ooo"
# Horovod's own variable for how long ranks wait for each other; it takes 30 s, several times over.
_LIMIT, _DEFAULT_S = "HOROVOD_GLOO_TIMEOUT_SECONDS", 45.0
_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK", "HOROVOD_SIZE")


def meet() -> None:
    """Returns when all ranks that Horovod's launcher has started are here; at once where it started none.

    They leave a word at the launcher's rendezvous server.  BackendError names the ranks that do not come.
    """
    address, port, rank, size = (os.environ.get(name, "") for name in _VARIABLES)
    if not (address and port and rank.isdecimal() and size.isdecimal()):
        return
    place = f"http://{address}:{port}/{_SCOPE}"
    limit_s = float(os.environ.get(_LIMIT) or _DEFAULT_S)
    if _ask(f"{place}/{rank}", b"here") is None:
        return  # Horovod says in its own words that the server is not there
    missing = {number for number in range(int(size)) if number != int(rank)}
    deadline_s = time.monotonic() + limit_s
    while missing and time.monotonic() < deadline_s:
        missing = {number for number in missing if _ask(f"{place}/{number}") is None}
        time.sleep(0.05 if missing else 0.0)
    if missing:
        who = ", ".join(map(str, sorted(missing)))
        raise BackendError(
            f"rank {rank} of {size}: rank {who} did not come within {limit_s:.0f} s ({_LIMIT}); it ended "
            "before training began, or is still reading data: see what it has printed, then start all again"
        )


def _ask(url: str, put: bytes | None = None) -> bytes | None:
    """What is at the address, or b"" for what was put there; None: nothing, or nobody answers."""
    request = urllib.request.Request(url, data=put, method="GET" if put is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=5.0) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None
