"""Ops in a user's words: the tasks of the layers that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.analysis.layer_tasks import LayerTask
from grappler_passes.graph.training_graph import TrainingGraph

_MOST = 5
# An op is named by the last so many parts: most ops' names share those before.
_LAST = 2
# Python shows a name in a message like this.
_QUOTED = re.compile(r"'([^']+)'")
# Kinds of tasks and ops, as one says them.
KIND_WORDS = {
    "F": "forward pass",
    "dO": "output gradient",
    "dW": "weight gradient",
    "U": "update",
    "comm": "gradient exchange",
}


@dataclass(frozen=True)
class Places:
    """``weight gradient of conv2d``, by the names of ops; of those of no layer the end of their names."""

    of: Mapping[str, str]

    @classmethod
    def of_tasks(cls, graph: TrainingGraph, by_task: Mapping[LayerTask, Sequence[str]]) -> Places:
        """Make the places of a classified step whose ops are known by task."""
        return cls(
            {
                name: f"{KIND_WORDS[kind]} of {graph.layers[layer].name}"
                for (kind, layer), names in by_task.items()
                for name in names
            }
        )

    def listed(self, names: Iterable[str]) -> str:
        """Return each place once, the first few."""
        return first_of(list(dict.fromkeys(map(self._of, names))))

    def told(self, text: str, names: Iterable[str] = ()) -> str:
        """Return a message with places instead of the names in it; ``names``: what it is about."""
        about = [name for name in names if repr(name) not in text]
        text = _QUOTED.sub(lambda match: self._of(match[1]) if "/" in match[1] else match[0], text)
        return f"{text} ({self.listed(about)})" if about else text

    def _of(self, name: str) -> str:
        return self.of.get(name) or "/".join(name.split("/")[-_LAST:])


def first_of(names: Sequence[str], most: int = _MOST) -> str:
    """``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
