"""An external training script runs in a room, which is a sandbox made by bubblewrap.

In a sandbox, a script can read the operating system, Python's packages, the script's code and the data that the
hospital names. The script can write to a scratch folder in memory of limited size. The script has no network, sees no
process outside the sandbox, and gets no environment variables of medsilo's process. The script talks to the site over
its standard input, which is one end of a socket pair. Processes that torchrun starts inherit this standard input.
"""

import os
import shutil
import subprocess
import sys
import threading
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socket import socket

from medsilo.airlock import inside
from medsilo.airlock.group import Group, limits_memory
from medsilo.airlock.seccomp import filter_program
from medsilo.core.errors import MedsiloError
from medsilo.site.airlock_settings import MiB, RoomSettings

PROGRAM = "bwrap"
APP, WORK, KEPT = Path("/room/app"), Path("/room/work"), Path("/room/kept")
CODE = APP / "custom"  # the script's code
OUTPUT = WORK / "medsilo"  # folder in the sandbox for the results of a study
INSIDE = "MEDSILO_AIRLOCK"  # the environment variable that passes facts about the study to the script
# user id in the sandbox; the hospital's own account must not have this id
USER = 1000 if os.getuid() != 1000 else 1001
ALONE = (  # bubblewrap's options for each sandbox, with which `ability` tests this machine
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
    *("--uid", str(USER), "--gid", str(USER), "--hostname", "room", "--cap-drop", "ALL", "--clearenv"),
)
# Readable folders of the operating system: programs, libraries, the loader's files, and facts about the processor
SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/fonts", "/sys/devices/system/cpu")
# folders below /, which are links to folders in /usr on newer Linux systems
TOP = ("bin", "sbin", "lib", "lib32", "lib64")
WRITTEN = {
    "/etc/passwd": f"script:x:{USER}:{USER}::{WORK}:/bin/sh\n".encode(),
    # lets processes in the sandbox resolve the host names localhost and room
    "/etc/hosts": b"127.0.0.1 localhost room\n",
}
# Files of the kernel below /proc that a script with root rights could use to change the machine's settings
SHUT = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "mtrr", "scsi", "pressure")  # mounted read-only
HIDDEN = (
    *("keys", "key-users", "kcore", "kmsg", "kallsyms", "timer_list", "slabinfo", "vmallocinfo", "pagetypeinfo"),
    *("kpagecount", "kpageflags", "kpagecgroup"),  # these files show the state of each memory page of the machine
)
LARGEST_LOG = 16 * MiB  # limit on the logged bytes of a script's output in one study
LEAST_LOG = MiB // 16  # bytes that each new sandbox may log even if the log is full
OPEN_FILES = 4096
REMEDY = "install it (Debian and Ubuntu: apt install bubblewrap; medsilo docs start/install)"
NO_ROOM = "let this account make user namespaces (medsilo docs start/install)"


@dataclass(frozen=True)
class Script:
    folder: Path
    file: str  # the script's file, relative to `folder`
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ("python3", "-u")  # the command that starts the script, for example torchrun

    @property
    def program(self) -> tuple[str, ...]:
        return (*self.command, str(CODE / self.file), *self.arguments)


@dataclass(frozen=True)
class Room:
    program: tuple[str, ...]
    files: Mapping[Path, Path]  # maps the path of each readable file outside the sandbox to its path inside
    settings: RoomSettings
    memory: int  # limit on each process's memory in bytes
    threads: int
    data: tuple[Path, ...] = ()  # read-only paths that are the same inside and outside the sandbox
    private: tuple[Path, ...] = ()  # folders that the script must never see: the kit and other studies
    told: str = ""  # value of the environment variable INSIDE in the sandbox

    def start(self, door: socket, log: Path) -> tuple[subprocess.Popen, threading.Thread, Group | None]:
        """Start the program, and return its process, the thread that logs its output, and its control group (None if
        this account can't create control groups).

        Args:
            door: the sandbox's end of the socket pair
        """
        bwrap = shutil.which(PROGRAM)
        if bwrap is None:
            raise MedsiloError(f"the airlock needs bubblewrap; {REMEDY}")
        program = filter_program()
        written = {memory_file(content): place for place, content in WRITTEN.items()}
        files = [*written, *([memory_file(program)] if program else [])]
        try:
            walls = self.walls(written, files[-1] if program else None)
            # bubblewrap's arguments name the hospital's folders, and the sandbox can read command lines, so a pipe
            # passes them
            reads, gives = os.pipe()
            arguments = os.fdopen(gives, "wb")
            files.append(reads)
            process = subprocess.Popen(
                [bwrap, "--args", str(reads), "--", *self.command()],
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
        group = Group.of(self.memory + self.settings.scratch * MiB)
        # bubblewrap starts processes only after it has read its arguments. If it joins the control group before, these
        # processes belong to the group, too.
        with suppress(BrokenPipeError), arguments:
            if group and not group.takes(process.pid):
                group = None
            arguments.write("\0".join([*walls, ""]).encode())
        writes = threading.Thread(target=_write_log, args=(process, log), name="script's log", daemon=True)
        writes.start()
        return process, writes, group

    def command(self) -> list[str]:
        limits = self.settings.processes, self.memory, self.settings.scratch * MiB, 0, OPEN_FILES
        start = [sys.executable, "-I", "-S", inside.__file__, ",".join(map(str, limits)), f"{WORK},/dev/shm"]
        return [*start, *self.program]

    def walls(self, written: Mapping[int, str], seccomp: int | None) -> list[str]:
        """Return bubblewrap's arguments.

        Args:
            written: descriptors of files that are created for the room, each with the file's path in the room
            seccomp: the descriptor of the filter of system calls
        """
        half = str(self.settings.scratch * MiB // 2)
        own = [*ALONE]
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
        paths = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(paths),
            "HOME": str(WORK),
            "TMPDIR": str(WORK / "tmp"),
            "LANG": "C.UTF-8",
            "USER": "script",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            # lets a script in a subfolder import the job's modules, as it can outside a sandbox
            "PYTHONPATH": str(CODE),
            "OMP_NUM_THREADS": str(self.threads),
            INSIDE: self.told,
            **self.settings.variables,
        }

    def _refuse_private(self, read: Iterable[Path]) -> None:
        """Raise MedsiloError if a readable folder contains a private file of the hospital."""
        for path in read:
            there = path.resolve()
            if odd := [own for own in self.private if own.resolve().is_relative_to(there)]:
                raise MedsiloError(
                    "the airlock would show a script this hospital's kit or results; name narrower folders in "
                    "room.reads and data, and keep both out of Python's environment",
                    private=f"{path} has {odd[0]} in it",
                )


def _refuse_sockets(read: Iterable[Path]) -> None:
    """Raise MedsiloError if a readable folder contains the Unix socket of a service of this machine.

    A read-only folder does not stop a process from connecting to a socket in this folder.
    """
    lines = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines())
    sockets = {Path(fields[7]) for fields in lines if len(fields) == 8 and fields[7].startswith("/")}
    there = {path.resolve() for path in sockets if _is_socket(path)}
    for path in read:
        if odd := [own for own in there if own.is_relative_to(path.resolve())]:
            raise MedsiloError(
                "a folder that a training script may read contains the Unix socket of a service of this machine; name "
                "narrower folders in room.reads and data",
                private=f"{path} has {odd[0]} in it",
            )


def _is_socket(path: Path) -> bool:
    # folders that the hospital's account can't enter are skipped, because the script can't enter them either
    with suppress(OSError):
        return path.is_socket()
    return False


def memory_file(content: bytes) -> int:
    """Return a file descriptor from which a child process can read the given bytes."""
    file = os.memfd_create("medsilo")
    os.write(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@cache
def environment() -> tuple[Path, ...]:
    """Return the folders of Python and its packages. Folders that environment variables such as PYTHONPATH or the
    user's home add are left out.
    """
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


def _write_log(process: subprocess.Popen, file: Path) -> None:
    """Write a script's output into the hospital's log file, up to a size limit and without control characters."""
    assert process.stdout
    decoder = getincrementaldecoder("utf-8")("replace")
    with suppress(OSError), file.open("ab", buffering=0) as log:
        left = max(LARGEST_LOG - log.tell(), LEAST_LOG)
        while came := os.read(process.stdout.fileno(), 65536):
            text = decoder.decode(came)
            kept = "".join(one if one in "\t\n" or one.isprintable() else "?" for one in text).encode()[:left]
            log.write(kept)
            if left and not (left := left - len(kept)):
                log.write(b"\nmedsilo: the script printed more, which is not kept\n")
    with suppress(OSError):  # the script continues even if a full disk prevents logging
        while os.read(process.stdout.fileno(), 65536):
            pass
    process.stdout.close()


@dataclass(frozen=True)
class Ability:
    works: bool
    lacks: tuple[str, ...] = ()


@cache
def ability() -> Ability:
    """Test whether this machine can create a sandbox."""
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
        yield "this kernel has no Landlock, which would protect files outside the room a second time"
    if not limits_memory():
        yield "this account may make no control group, which would also limit memory that belongs to no process"
    if os.getuid() == 0:
        yield "the system does not limit the number of a script's processes for root; run the kit as an ordinary user"
