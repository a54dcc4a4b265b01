"""All ranks run as many steps: none waits for a rank that has run out of data or has stopped.

Control messages are gathered from all ranks: ``epoch`` when one begins, ``batch`` before each
execution if asked for, ``logs`` when an epoch ends, ``end`` after the last.  A rank that hears another kind
than its own knows what the others are doing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.ranks.base import Engine

_LOG = logging.getLogger("tf_ooo")


class Lockstep:
    """How many steps this rank may run.

    Args:
        engine: the ranks.
        every_execution: agree before each execution, which costs a message but lets one rank alone
            stop within an epoch.  Done in any case where the number of batches is not known.
    """

    def __init__(self, engine: Engine, every_execution: bool) -> None:
        self.engine, self.every_execution = engine, every_execution
        self.left: int | None = None  # steps left in this epoch; None: agree before each execution
        self.of_epoch: int | None = None  # steps of this epoch, where all ranks know them
        self.others_ended = False
        self._told = False

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """Agrees on the number of steps of an epoch.

        Raises OptionsError if the ranks are at different epochs.
        """
        replies = self._exchange("epoch", {"epoch": epoch, "steps": steps})
        if replies is None:
            return
        epochs = [reply["epoch"] for reply in replies]
        if len(set(epochs)) > 1:
            raise OptionsError(
                f"the ranks are at different epochs (rank 0, 1, ...: {epochs}); pass the same "
                "initial_epoch, and list BackupAndRestore before OOOBackprop"
            )
        counts = [reply["steps"] for reply in replies]
        known = None if self.every_execution or None in counts else min(counts)
        if known is not None and max(counts) != known and not self._told:
            self._told = True
            _LOG.warning(
                "the ranks have %s batches an epoch (rank 0, 1, ...): each epoch ends after %d", counts, known
            )
        self.left = self.of_epoch = known

    def may_run(self, available: int, stopping: bool = False) -> int:
        """Of ``available`` steps, how many all ranks run now; 0: the epoch is over."""
        if self.others_ended:
            return 0
        if self.left is not None:
            count = min(available, self.left)
            self.left -= count
            return count
        replies = self._exchange("batch", {"steps": 0 if stopping else available})
        return 0 if replies is None else min(reply["steps"] for reply in replies)

    def did_not_run(self, count: int) -> None:
        """Takes back what :meth:`may_run` allowed: the data had ended."""
        if self.left is not None:
            self.left += count

    @property
    def counts_known(self) -> bool:
        """Whether the steps of this epoch are agreed on, so that most executions need no message."""
        return self.left is not None

    def end_epoch(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank has to say about the epoch; only ``mine`` if the others have ended."""
        replies = self._exchange("logs", mine)
        return [mine] if replies is None else replies

    def end(self) -> None:
        """Says that this rank trains no more."""
        if not self.others_ended:
            self._exchange("end", {})

    def _exchange(self, kind: str, content: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The ranks' messages of this kind; None if some do something else, so that this is over."""
        if self.others_ended:
            return None
        while True:
            replies = self.engine.gather({"kind": kind, **content})
            kinds = [reply["kind"] for reply in replies]
            if set(kinds) == {kind}:
                return replies
            if kind == "end":
                return None
            if "end" in kinds:
                self._say_ended(kinds)
                return None
            if kind != "logs":
                return None
            # The others are told "logs" before a batch: they end the epoch and say "logs" too.

    def _say_ended(self, kinds: Sequence[str]) -> None:
        self.others_ended = True
        ranks = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == "end")
        _LOG.warning("rank %s ended training: this rank stops too", ranks)
