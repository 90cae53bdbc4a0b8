"""Limit the memory of all processes in a sandbox together, with a control group of the kernel (cgroup).

The kernel also counts memory that belongs to no process, such as the contents of pipes. The limit exists only if this
account may create a control group: as root, or if the system delegates memory to this account.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

NAME = "medsilo-room"
KIT = "medsilo-kit"  # name of the subgroup into which the kit's processes move
# For versions 1 and 2 of control groups: the file of the limit, further settings, and the file that counts killed
# processes
FIRST = "memory.limit_in_bytes", {"memory.memsw.limit_in_bytes": "{most}"}, "memory.oom_control"
SECOND = "memory.max", {"memory.swap.max": "0", "memory.oom.group": "1"}, "memory.events"
PATIENCE = 5.0  # seconds until the kernel has ended the processes of a killed sandbox


class Group:
    """A control group with a limit on the memory of its processes."""

    def __init__(self, folder: Path, most: int) -> None:
        """Create the group. Raises OSError if this account may not create control groups.

        Args:
            folder: the group's folder in the kernel's file system of control groups
            most: the limit in bytes
        """
        self.folder = folder
        folder.mkdir()
        try:
            limit, further, self._events = SECOND if (folder / SECOND[0]).exists() else FIRST
            (folder / limit).write_text(str(most))
        except OSError:
            self.remove()
            raise
        for name, value in further.items():
            with suppress(OSError):  # on a machine without swap, the kernel has no file for the limit on swap
                (folder / name).write_text(value.format(most=most))

    @classmethod
    def of(cls, most: int) -> "Group | None":
        """Return a new control group, or None if this account may not create control groups."""
        for parent in _parents():
            _remove_old(parent)
            with suppress(OSError):
                return cls(parent / f"{NAME}-{os.getpid()}-{secrets.token_hex(4)}", most)
        return None

    def takes(self, process: int) -> bool:
        """Move a process into the group, together with all processes that it starts later.

        If this account may not move the process, remove the group and return False.
        """
        try:
            (self.folder / "cgroup.procs").write_text(str(process))
        except OSError:
            self.remove()
            return False
        return True

    def has_killed(self) -> bool:
        """Return True if the kernel killed a process of the group because of the limit."""
        with suppress(OSError):
            pairs = (line.split() for line in (self.folder / self._events).read_text().splitlines())
            return any(pair[0] == "oom_kill" and pair[1] != "0" for pair in pairs if len(pair) == 2)
        return False

    def remove(self) -> None:
        """Remove the group once its last process has ended; give up after `PATIENCE` seconds."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)


@cache
def limits_memory() -> bool:
    """Return True if this account may create control groups with a memory limit."""
    group = Group.of(1 << 30)
    if group:
        group.remove()
    return group is not None


def _parents() -> Iterator[Path]:
    """Yield the control groups in which this process can try to create a subgroup."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for _, place, kind, options, *_ in mounts:
            if controllers == "" and kind == "cgroup2":
                yield from _without_processes(Path(place) / own.lstrip("/"))
            elif "memory" in controllers.split(",") and kind == "cgroup" and "memory" in options.split(","):
                yield Path(place) / own.lstrip("/")


def _without_processes(folder: Path) -> Iterator[Path]:
    """Yield control groups (version 2) whose subgroups can have memory limits.

    The kernel allows such limits only if the parent group contains no process. If systemd started the service's
    processes directly in the service's group, move them into a subgroup first.

    Args:
        folder: the group of this process
    """
    for parent in (folder.parent, folder):
        with suppress(OSError):
            if "memory" not in (parent / "cgroup.controllers").read_text().split():
                continue
            # only the root group, which has no such file, may have both processes and limited subgroups
            if parent == folder and (folder / "cgroup.type").exists():
                (folder / KIT).mkdir(exist_ok=True)
                for _ in range(3):  # repeated, because a process may start another process in the meantime
                    for process in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            (folder / KIT / "cgroup.procs").write_text(process)
            (parent / "cgroup.subtree_control").write_text("+memory")
            yield parent


def _remove_old(parent: Path) -> None:
    """Remove the control groups of processes that have ended."""
    for folder in parent.glob(f"{NAME}-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with suppress(OSError):
                folder.rmdir()
