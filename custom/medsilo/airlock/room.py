"""The room in which somebody else's training script runs: a command of bubblewrap, and this machine's ability to run
it.

Inside, a script can read the system, Python's packages, its own code and the data that the hospital names. It can write
to a limited scratch in memory. It has no network, sees no other process and gets none of this one's variables. Its
exit, one end of a socket pair, is the standard input, so that processes which torchrun starts inherit it.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socket import socket

from medsilo.airlock import inside
from medsilo.airlock.seccomp import filter_program
from medsilo.core.errors import MedsiloError
from medsilo.site.airlock_settings import MiB, RoomSettings

PROGRAM = "bwrap"
APP, WORK, KEPT = Path("/room/app"), Path("/room/work"), Path("/room/kept")
CODE = APP / "custom"  # the script's code
OUTPUT = WORK / "medsilo"  # where a room's process keeps its studies
INSIDE = "MEDSILO_AIRLOCK"  # the variable that marks a script's process as inside a room, and has its facts
USER = 1000 if os.getuid() != 1000 else 1001  # another number than the kit's account has
ALONE = ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session")
# Of the system: programs and libraries, files of the loader, and torch's source of the processor's abilities
SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/fonts", "/sys/devices/system/cpu")
TOP = ("bin", "sbin", "lib", "lib32", "lib64")  # links into /usr, or folders of older systems
WRITTEN = {  # files that are the room's own
    "/etc/passwd": f"script:x:{USER}:{USER}::{WORK}:/bin/sh\n".encode(),
    "/etc/hosts": b"127.0.0.1 localhost room\n",  # names by which processes of one room find each other
}
# Of the kernel, which checks only a user's number there: as root a script could change settings of the machine
SHUT = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "mtrr", "scsi", "pressure")  # mounted read-only
HIDDEN = (
    *("keys", "key-users", "kcore", "kmsg", "kallsyms", "timer_list", "slabinfo", "vmallocinfo", "pagetypeinfo"),
    *("kpagecount", "kpageflags", "kpagecgroup"),  # the state of each page of the machine's memory
)
LARGEST_LOG = 16 * MiB  # the most bytes that are logged of a script's output in a study
LEAST_LOG = MiB // 16  # the bytes that each further room may log when the log is full
OPEN_FILES = 4096
REMEDY = "install it (Debian and Ubuntu: apt install bubblewrap; medsilo docs start/install)"
NO_ROOM = "let this account make user namespaces (medsilo docs start/install)"


@dataclass(frozen=True)
class Script:
    """A lead's training script, as its job brought it."""

    folder: Path  # the folder with the script's code
    file: str  # the script's file, relative to `folder`
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ("python3", "-u")  # the command that starts it; also torchrun's

    @property
    def program(self) -> tuple[str, ...]:
        """The command to run inside, where the app's folder is mounted."""
        return (*self.command, str(CODE / self.file), *self.arguments)


@dataclass(frozen=True)
class Room:
    """The program, files and limits of a room."""

    program: tuple[str, ...]  # the program that runs inside
    files: Mapping[Path, Path]  # to read: from where, and where it lies inside
    settings: RoomSettings
    memory: int  # bytes that each process may take
    threads: int
    data: tuple[Path, ...] = ()  # folders or files that the program reads at their usual paths
    private: tuple[Path, ...] = ()  # folders that must not be seen, whatever else is: the kit, other studies
    told: str = ""  # to the process inside, in INSIDE

    def start(self, door: socket, log: Path) -> tuple[subprocess.Popen, threading.Thread]:
        """Start the program; return it, and what writes its output until its last process has ended.

        door: its end of the socket pair. log: the file of its output.
        """
        bwrap = shutil.which(PROGRAM)
        if bwrap is None:
            raise MedsiloError(f"the airlock needs bubblewrap; {REMEDY}")
        program = filter_program()
        written = {memory_file(content): place for place, content in WRITTEN.items()}
        files = [*written, *([memory_file(program)] if program else [])]
        try:
            walls = self.walls(written, files[-1] if program else None)
            files.append(memory_file("\0".join([*walls, ""]).encode()))  # on no command line that a room can read
            process = subprocess.Popen(
                [bwrap, "--args", str(files[-1]), "--", *self.command()],
                stdin=door.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=files,
                env={},
                cwd="/",
            )
        finally:
            for file in files:
                os.close(file)
        writes = threading.Thread(target=_write_log, args=(process, log), name="script's log", daemon=True)
        writes.start()
        return process, writes

    def command(self) -> list[str]:
        """Return the command to run inside the isolated process."""
        limits = self.settings.processes, self.memory, self.settings.scratch * MiB, 0, OPEN_FILES
        start = [sys.executable, "-I", "-S", inside.__file__, ",".join(map(str, limits)), f"{WORK},/dev/shm"]
        return [*start, *self.program]

    def walls(self, written: Mapping[int, str], seccomp: int | None) -> list[str]:
        """Return bubblewrap's arguments. written, seccomp: descriptors to read from; with the place of each file."""
        half = str(self.settings.scratch * MiB // 2)
        own = [*ALONE, "--uid", str(USER), "--gid", str(USER), "--hostname", "room", "--cap-drop", "ALL", "--clearenv"]
        for path in SYSTEM:
            own += ["--ro-bind-try", path, path]
        for place in (Path("/", name) for name in TOP):
            if place.is_symlink():
                own += ["--symlink", str(place.readlink()), str(place)]
            elif place.is_dir():
                own += ["--ro-bind", str(place), str(place)]
        own += ["--proc", "/proc", "--dev", "/dev", "--size", half, "--tmpfs", "/dev/shm"]
        for path in (f"/proc/{name}" for name in SHUT):
            own += ["--ro-bind-try", path, path]
        for path in (f"/proc/{name}" for name in HIDDEN):
            own += ["--ro-bind", "/dev/null", path] if Path(path).exists() else []
        own += ["--size", half, "--tmpfs", str(WORK), "--dir", str(WORK / "tmp")]
        own += ["--symlink", str(WORK / "tmp").lstrip("/"), "/tmp"]
        for file, inner in written.items():
            own += ["--ro-bind-data", str(file), inner]
        read = {path: path for path in (*environment(), *self.data, *self.settings.reads)}
        self._refuse_private([*map(Path, SYSTEM), *read])
        bound = {**read, **self.files}
        _refuse_sockets([*map(Path, SYSTEM), *bound])
        for source, there in bound.items():
            own += ["--ro-bind", str(source), str(there)]
        for device in self.settings.devices:
            own += ["--dev-bind", str(device), str(device)]
        for name, value in self.variables().items():
            own += ["--setenv", name, value]
        own += [] if seccomp is None else ["--seccomp", str(seccomp)]
        return [*own, "--chdir", str(WORK), "--remount-ro", "/dev", "--remount-ro", "/"]

    def variables(self) -> dict[str, str]:
        """Return all variables of the script's process."""
        paths = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(paths),
            "HOME": str(WORK),
            "TMPDIR": str(WORK / "tmp"),
            "LANG": "C.UTF-8",
            "USER": "script",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": str(CODE),  # as outside, also for a script in a subfolder
            "OMP_NUM_THREADS": str(self.threads),
            INSIDE: self.told,
            **self.settings.variables,
        }

    def _refuse_private(self, read: Iterable[Path]) -> None:
        """Raise MedsiloError where a folder to read contains a private file of the hospital."""
        for path in read:
            there = path.resolve()
            if odd := [own for own in self.private if own.resolve().is_relative_to(there)]:
                raise MedsiloError(
                    "the airlock would show a training script this hospital's kit or results; name narrower folders "
                    "in room.reads and data. Python's environment must lie elsewhere, too",
                    private=f"{path} has {odd[0]} in it",
                )


def _refuse_sockets(read: Iterable[Path]) -> None:
    """Raise MedsiloError where a folder to read contains the Unix socket of a service of this machine.

    A read-only folder does not stop a process from connecting to a socket in it.
    """
    lines = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines())
    sockets = {Path(fields[7]) for fields in lines if len(fields) == 8 and fields[7].startswith("/")}
    there = {path.resolve() for path in sockets if _is_socket(path)}
    for path in read:
        if odd := [own for own in there if own.is_relative_to(path.resolve())]:
            raise MedsiloError(
                "the airlock would let a training script connect to a service of this machine, whose Unix socket lies "
                "in a folder that the script may read; name narrower folders in room.reads and data",
                private=f"{path} has {odd[0]} in it",
            )


def _is_socket(path: Path) -> bool:
    with suppress(OSError):  # a folder that this account may not enter is closed to the script, too
        return path.is_socket()
    return False


def memory_file(content: bytes) -> int:
    """Return a descriptor from which a program can read this once."""
    file = os.memfd_create("medsilo")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@cache
def environment() -> tuple[Path, ...]:
    """Return the folders of Python and its packages, without environment variables and the user's folder."""
    asks = "import sys; print(*sys.path, sys.prefix, sys.base_prefix, sep='\\n')"
    said = subprocess.run([sys.executable, "-I", "-c", asks], capture_output=True, text=True, check=True, env={})
    found = {Path(line) for line in said.stdout.splitlines() if line}
    found |= {Path(sys.executable).resolve().parents[1], *(path.resolve() for path in found)}
    there = sorted(path for path in found if path.exists() and path != Path("/"))
    return tuple(
        path
        for path in there
        if not path.is_relative_to("/usr") and not any(path.is_relative_to(own) for own in there if own != path)
    )


PRINTABLE = bytes(byte if byte in b"\t\n" or (byte >= 32 and byte != 127) else ord("?") for byte in range(256))


def _write_log(process: subprocess.Popen, file: Path) -> None:
    """Write a script's output into the hospital's log file, up to a limit, without control characters of terminals."""
    assert process.stdout
    with suppress(OSError), file.open("ab", buffering=0) as log:
        left = max(LARGEST_LOG - log.tell(), LEAST_LOG)
        while came := os.read(process.stdout.fileno(), 65536):
            kept = came[:left].translate(PRINTABLE)
            log.write(kept)
            if left and not (left := left - len(kept)):
                log.write(b"\nmedsilo: the script printed more, which is not kept\n")
    with suppress(OSError):  # the disk is full: the script continues
        while os.read(process.stdout.fileno(), 65536):
            pass
    process.stdout.close()


@dataclass(frozen=True)
class Ability:
    """Whether this machine can make a room, and the parts that it lacks."""

    works: bool
    lacks: tuple[str, ...] = ()  # the missing parts, as people read them


@cache
def ability() -> Ability:
    """Test this machine's ability to isolate by making an empty room."""
    bwrap = shutil.which(PROGRAM)
    if bwrap is None:
        return Ability(False, (f"bubblewrap is not installed; {REMEDY}",))
    tries = [bwrap, *ALONE, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--size", "65536"]
    tries += ["--tmpfs", "/tmp", "true"]
    said = subprocess.run(
        tries, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL
    )
    if said.returncode:
        told = (said.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
        return Ability(False, (f"bubblewrap can't make a room here ({told}); {NO_ROOM}",))
    return Ability(True, tuple(_weaker()))


def _weaker() -> Iterator[str]:
    if filter_program() is None:
        yield f"no list of forbidden system calls for this processor ({os.uname().machine})"
    if not inside.landlock():
        yield "this kernel has no Landlock, which would be a second wall around files"
    if os.getuid() == 0:
        yield "as root the system does not count a script's processes; run the kit by an ordinary account"
