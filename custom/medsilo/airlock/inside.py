"""The first program in a room: it sets limits that no program inside can raise, and becomes the script.

Where the kernel has Landlock, that is a second wall: a file reached outside the room's tree can't be opened. It is
started by its path and imports no module of medsilo, so it starts at once.
"""

import ctypes
import os
import resource
import struct
import sys

LIMITS = ("NPROC", "DATA", "FSIZE", "CORE", "NOFILE")
CREATE, ADD, RESTRICT = 444, 445, 446  # Landlock's calls, on all processors
ASKS_VERSION, BENEATH = 1, 1
# The rights of files that each version of Landlock can deny in addition
RIGHTS = {1: 0x1FFF, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE, READ, LIST, MAKE_CHARACTER, MAKE_BLOCK, TRUNCATE, CONTROL = (
    1 << own for own in (0, 1, 2, 3, 6, 11, 14, 15)
)
ABSTRACT_SOCKETS, SIGNALS = 1, 2  # access to processes outside, which Landlock denies from version 6


def main(limits: str, written: str, *command: str) -> None:
    """limits: one number for each of LIMITS; written: folders in which to write; with commas between them."""
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
    """Let this process and all that it starts read below the root as it is now, and write below these folders."""
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
