"""Control groups of Linux, versions 1 and 2: where this machine has those of a controller."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class System:
    """Groups of a version, below a folder of the system."""

    version: int
    folder: Path
    controller: str

    @property
    def is_there(self) -> bool:
        """Return whether the controller is there: on a machine with both versions it is in one of them."""
        if self.version == 1:
            # A group of version 2 may be called as the controller, too: only version 1 has this file.
            return (self.folder / "tasks").exists()
        controllers = self.folder / "cgroup.controllers"
        return controllers.exists() and self.controller in controllers.read_text().split()


def systems(controller: str) -> tuple[System, ...]:
    """Return where groups of a controller may be."""
    return (
        System(1, ROOT / controller, controller),
        System(2, ROOT, controller),
        System(2, ROOT / "unified", controller),
    )


def system(controller: str) -> System:
    """Return the groups of this machine; where it has none, some that are not there."""
    return next((place for place in systems(controller) if place.is_there), systems(controller)[0])


def why_not(controller: str) -> str:
    """Say why there can be no groups of a controller; return an empty text where there may be some."""
    if os.geteuid() != 0:
        return f"needs root for {controller} groups"
    if system(controller).is_there:
        return ""
    return f"needs {controller} groups, at {' or '.join(str(of.folder) for of in systems(controller)[:2])}"
