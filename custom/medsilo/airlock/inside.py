"""The first program in a sandbox sets limits that no program in the sandbox can raise, and then becomes the script.

If the kernel has Landlock, no program in the sandbox can open a file outside the sandbox's folder tree. This program
imports no module of medsilo, so that it starts quickly.
"""

import ctypes
import os
import resource
import struct
import sys

LIMITS = ("NPROC", "DATA", "FSIZE", "CORE", "NOFILE")
CREATE, ADD, RESTRICT = 444, 445, 446  # numbers of Landlock's system calls, the same on all processors
ASKS_VERSION, BENEATH = 1, 1
# For each version of Landlock: the file rights that no earlier version of Landlock controls
RIGHTS = {1: 0x1FFF, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE, READ, LIST, MAKE_CHARACTER, MAKE_BLOCK, TRUNCATE, CONTROL = (
    1 << own for own in (0, 1, 2, 3, 6, 11, 14, 15)
)
# Landlock 6 and later can deny access to sockets and signals of processes outside the sandbox
ABSTRACT_SOCKETS, SIGNALS = 1, 2


def main(limits: str, written: str, *command: str) -> None:
    """Limit the resources and the file access of this process, and then become the script.

    Args:
        limits: one number for each name in LIMITS, separated by commas
        written: the folders in which the script may write, separated by commas
    """
    for name, number in zip(LIMITS, map(int, limits.split(",")), strict=True):
        which = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(which)
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(which, (most, most))
    if version := landlock():
        restrict(version, written.split(","))
    os.execvp(command[0], command)


def landlock() -> int:
    """Return the kernel's version of Landlock; 0 if the kernel has no Landlock."""
    found: int = ctypes.CDLL(None).syscall(CREATE, None, 0, ASKS_VERSION)
    return max(found, 0)


def restrict(version: int, written: list[str]) -> None:
    """Allow this process and its child processes to read all files below the current root, but to write only below the
    given folders.
    """
    rights = sum(own for since, own in RIGHTS.items() if since <= version)
    scopes = ABSTRACT_SOCKETS | SIGNALS if version >= 6 else 0
    asked = struct.pack("=QQQ", rights, 0, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    call = ctypes.CDLL(None, use_errno=True).syscall
    rules = call(CREATE, asked, len(asked), 0)
    may = {"/": EXECUTE | READ | LIST, "/dev": WRITE | TRUNCATE | CONTROL, "/proc": WRITE | TRUNCATE}
    may |= dict.fromkeys(written, rights & ~(MAKE_CHARACTER | MAKE_BLOCK))
    failed = rules < 0
    for folder, allowed in may.items() if not failed else ():
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        failed |= call(ADD, rules, BENEATH, struct.pack("=Qi", allowed & rights, place), 0) < 0
        os.close(place)
    if failed or call(RESTRICT, rules, 0) < 0:
        sys.exit(f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(rules)


if __name__ == "__main__":
    main(*sys.argv[1:])
