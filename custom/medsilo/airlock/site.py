"""A site whose training script runs in a sandbox, called a room. The site starts the sandbox, sends requests to the
script, and passes the script's answers to the border, which checks the answers.
"""

import contextlib
import json
import logging
import os
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socketpair
from threading import Event, Thread
from typing import Any

import psutil

from medsilo.airlock.border import Border, HeldBack
from medsilo.airlock.group import Group
from medsilo.airlock.room import APP, CODE, KEPT, WORK, Room, Script, ability
from medsilo.airlock.wire import CHUNK, MAY_KEEP, End, Head
from medsilo.core import weight_cache
from medsilo.core.errors import Aborted, MedsiloError, ProcessDied, Refused, WeightsMissing
from medsilo.core.files import make_folder, replacing
from medsilo.core.parent_watch import most_held
from medsilo.federation.protection import budget_of
from medsilo.federation.site_context import SiteContext
from medsilo.learning.compute import Stop
from medsilo.learning.seeds import seed_for
from medsilo.runs import paths
from medsilo.runs.messages import Request, StudyMessage
from medsilo.site.airlock_settings import MiB

LOG = logging.getLogger(__name__)
PRINTED = "script.log"  # the file that contains a script's output in one study
LOOK = 1.0  # seconds between two measurements of a sandbox's memory and files
GRACE = 30.0  # time limit, in seconds, for a script to exit by itself after the end of the study
LACKING = "a pre-trained file that the network begins with is not here"
KILLED = 5.0  # time limit, in seconds, for the operating system to end a sandbox's processes
MOST_KEPT = 1000  # limit on the number of state files of a site
MOST_MESSAGES = 10_000  # limit on the messages that a script may send before an answer
# limit on sockets in a sandbox; a socket's buffer of 208 KiB does not count towards any process's memory
MOST_SOCKETS = 2048
MOST_OPENED = 1 << 17  # limit on open files in a sandbox, since the kernel uses up to 8 KiB for each open file
PROTOCOLS = ("tcp", "tcp6", "udp", "udp6")


class OverLimit(Refused):
    def __init__(self, limit: str) -> None:
        super().__init__(f"this hospital stopped the training: {limit}")


class Denied(Refused):
    """The hospital forbids a request, or can't fulfil it."""


class RoomSite:
    # kinds of messages that end the wait for an answer
    ends_with = {"answer", "lacks"}
    may_keep = MAY_KEEP  # names of state files that the program may store outside the sandbox
    what = "the training script"  # name of the program in error messages
    program: tuple[str, ...]

    def __init__(self, context: SiteContext, border: Border) -> None:
        self.context, self.border = context, border
        border.protection.admit()
        self.process: subprocess.Popen | None = None
        # thread that writes the script's output to a file until the sandbox's last process ends
        self.writes: Thread
        self.group: Group | None = None
        self.end: End
        self._look: Stop = lambda: None
        self._began: float | None = None  # when the wait for an answer began; None if no request is pending
        self.most = 0  # peak memory of the sandbox in bytes
        self.over: OverLimit | None = None  # the limit that the sandbox exceeded; cleared when an answer reports it

    # ------------------------------------------------------------------ a message
    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        asked, started = Request.received(message.facts), time.monotonic()
        self._look, self._began, self.most = stop, started, 0
        if self.over is None:
            self._running()
        try:
            if self.over is not None:
                raise self._taken_over()
            self.end.send("ask", message.groups, facts=message.facts)
            head = self._listen()
            if head.kind == "lacks":
                raise WeightsMissing(LACKING)
            self.border.check_forms(asked, head.tensors)
            groups = self.end.tensors(head.tensors)
            measured = {
                "seconds": time.monotonic() - started,
                "memory": float(max(self.most, most_held()) // MiB * MiB),
            }
            return self.border.answer(asked, message.groups, head.facts, groups, **measured)
        except WeightsMissing:
            # A report of missing weights also costs query budget, because a script can encode information in it and in
            # its time.
            self.border.note_failure(asked)
            raise
        except (EOFError, OSError) as error:
            self.border.note_failure(asked)
            raise self._ended() from error
        except (Aborted, Denied, HeldBack, OverLimit):
            self.border.note_failure(asked)
            self.close(0)  # the unread bytes of the failed message must not be parsed as the next message
            raise
        except Refused as error:
            self.border.note_failure(asked)
            self.close(0)
            raise HeldBack("it is no message of medsilo", f"{error} {error.private}") from error
        finally:
            self._began = None

    def _listen(self) -> Head:
        """Return the head (the JSON part) of the script's answer. Before the answer, the script may log numbers, which
        are ignored, and save files, which stay at the hospital.
        """
        for _ in range(MOST_MESSAGES):
            head = self.end.receive()
            if head.kind == "keep":
                self._keep(head)
            elif head.kind in self.ends_with:
                return head
            else:
                self._take(head)
        raise OverLimit(f"the script sent more than {MOST_MESSAGES} messages for one answer")

    def _take(self, head: Head) -> None:
        """Ignore a message with logged numbers, and raise Refused for a message of any other kind."""
        if head.kind != "log":
            raise Refused("the script sent a kind of request that only medsilo's own program may send")

    # ------------------------------------------------------------------ the room
    def _running(self) -> None:
        """Start a sandbox if none is running; raise MedsiloError if this machine can't create sandboxes."""
        if self.process and self.process.poll() is None:
            return
        # if memory ran out after the last answer, report this to the next request
        over = self.process and self._out_of_memory()
        self.close(0)
        if over:
            self.over = over
            return
        able = ability()
        if not able.works:
            raise MedsiloError(f"the airlock: {able.lacks[0]}")
        ours, theirs = socketpair()
        make_folder(self.context.folder)
        with theirs:
            self.process, self.writes, self.group = self._room().start(theirs, self.context.folder / PRINTED)
        self.end = End(ours, lambda: self._look())
        self._closed = Event()
        self._guard = Thread(target=self._watch, args=(self.process, self._closed), name="room's limits", daemon=True)
        self._guard.start()
        self._begin()

    def _room(self) -> Room:
        context, settings = self.context, self.context.settings
        files = self._files()
        for sha256, size in context.plan.network.files.items():
            # Missing weight files are skipped: the script reports them, and the server then sends them.
            with contextlib.suppress(MedsiloError):
                files[weight_cache.find(sha256, size)] = APP / "config" / sha256
        if context.folder.is_dir():
            files[context.folder] = KEPT
        source = settings.data
        data = (source.data_set, source.folder, source.exclude_patients) if source else ()
        private = [context.folder.parents[1], budget_of(settings, context.site, context.folder).folder]
        private += [Path(context.kit.key).parents[1]] if context.kit else []
        return Room(
            self.program,
            files,
            settings.room,
            settings.most_memory,
            settings.threads,
            tuple(path for path in data if path),
            tuple(private),
            json.dumps(self._told()),
        )

    def _files(self) -> dict[Path, Path]:
        """Map the path outside the sandbox to the path inside for each file that this program may read besides the
        files in the settings.
        """
        return {}

    def _told(self) -> dict[str, Any]:
        """Return the facts that an environment variable passes to the program in the sandbox."""
        return {"site": self.context.site, "study": self.context.study}

    def _begin(self) -> None:
        """Hook for subclasses: send the first message to a newly started program."""

    def _watch(self, process: subprocess.Popen, closed: Event) -> None:
        """Measure a sandbox's resources until the sandbox ends, and kill a sandbox that exceeds a limit."""
        while not closed.wait(LOOK) and process.poll() is None:
            try:
                self._measure(process.pid)
            except Exception as error:
                over = error if isinstance(error, OverLimit) else OverLimit("the use of this machine is unknown")
                LOG.warning("%s", over, exc_info=None if over is error else error)
                if not closed.is_set():
                    self.over = over
                process.kill()
                return

    def _measure(self, pid: int) -> None:
        """Raise OverLimit if a sandbox exceeds a limit of this hospital."""
        own, room, began = self.context.settings, self.context.settings.room, self._began
        most = own.most_memory + room.scratch * MiB
        inside: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            inside = psutil.Process(pid).children(recursive=True)
        taken = Taken(len(inside))
        # if there are too many processes, skip the slow measurement, because the sandbox will be killed anyway
        if taken.processes <= room.processes:
            taken = taken_by([Path("/proc", str(process.pid)) for process in inside], most)
        self.most = max(self.most, taken.memory)
        if began is not None and time.monotonic() - began > room.hours * 3600:
            raise OverLimit(f"it took longer than {room.hours:g} hours for an answer (room.hours)")
        if taken.processes > room.processes:
            raise OverLimit(f"it had more than {room.processes} processes and threads (room.processes)")
        # each file also takes about 1 KiB of kernel memory, which the memory limit does not count
        if taken.files > room.scratch * 1024:
            raise OverLimit(f"it had more than {room.scratch * 1024} files in its scratch (room.scratch)")
        if taken.sockets > MOST_SOCKETS:
            raise OverLimit(f"it had more than {MOST_SOCKETS} sockets")
        if taken.opened > MOST_OPENED:
            raise OverLimit(f"it had more than {MOST_OPENED} open files")
        if over := self._out_of_memory(taken.memory > most):
            raise over

    def _out_of_memory(self, too_much: bool = False) -> OverLimit | None:
        """Return OverLimit if the kernel killed a process for lack of memory, or if the caller measured too much memory
        (`too_much`).
        """
        if too_much or (self.group and self.group.has_killed()):
            return OverLimit(f"it took more memory than {self.context.settings.most_memory // MiB} MiB (memory_limit)")
        return None

    def _taken_over(self) -> OverLimit:
        """Return the error about the exceeded limit, and forget it, so that only one answer reports it."""
        over, self.over = self.over, None
        assert over is not None
        return over

    def _ended(self) -> MedsiloError:
        """Return the reason why the sandbox ended without an answer; the reason contains no text from the script."""
        code = None
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            code = self.process.poll()
        self.over = self.over or self._out_of_memory()
        self.close(0)
        if self.over is not None:
            return self._taken_over()
        what = f"{PRINTED}, beside that hospital's results, says why"
        if code is None or code < 0 or code >= 128:
            return ProcessDied(f"{self.what} was killed; {what}, or its memory ran out")
        return Refused(f"{self.what} ended before its answer; {what}")

    def close(self, grace: float = GRACE) -> None:
        """End the room.

        Args:
            grace: seconds that the script has to exit by itself
        """
        process, self.process = self.process, None
        if process is None:
            return
        if grace and process.poll() is None:
            with contextlib.suppress(Exception):
                self.end.look = partial(_until, time.monotonic() + grace)
                self.end.send("end")
                process.wait(timeout=grace)
        self._closed.set()
        process.kill()
        process.wait()
        if self.group:
            self.group.remove()
        self._guard.join(KILLED)
        self.writes.join(KILLED)
        self.end.pair.close()

    # ------------------------------------------------------------------ the saved state
    def _keep(self, head: Head) -> None:
        """Save a state file at the hospital. A message without a file name lists the files to keep, and all other state
        files are deleted.
        """
        if not head.name:
            self._forget(head.facts.get("names"))
            return
        file = self.context.folder / head.name
        if not self.may_keep.fullmatch(head.name):
            raise Refused("the script stores a file that is not part of a site's state", private=head.name)
        there = [own for own in self._kept() if own != head.name]
        total = sum((self.context.folder / own).stat().st_size for own in there) + head.size
        if total > self.context.settings.room.scratch * MiB or len(there) >= MOST_KEPT:
            raise OverLimit(
                f"the script's state is larger than {self.context.settings.room.scratch} MiB (room.scratch)"
            )
        make_folder(file.parent)
        with replacing(file) as place, place.open("wb") as written:
            left, memory = head.size, memoryview(bytearray(min(CHUNK, head.size)))
            while left:
                left -= written.write(self.end.read(memory[: min(left, CHUNK)]))
            written.flush()
            os.fsync(written.fileno())

    def _kept(self) -> list[str]:
        folder = self.context.folder
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return [name for name in names if self.may_keep.fullmatch(name)]

    def _forget(self, names: Any) -> None:
        if not isinstance(names, list) or len(names) > MOST_KEPT:
            raise Refused("the script's list of files must be a list of names")
        for name in self._kept():
            if name not in names:
                (self.context.folder / name).unlink(missing_ok=True)


class ScriptRoom(RoomSite):
    def __init__(self, context: SiteContext, script: Script, job: str = "") -> None:
        if context.settings.privacy is not None:
            raise Refused(
                "this hospital demands differential privacy of every study (privacy), and medsilo can't compute the "
                "privacy of a training script; run one of medsilo's own tasks"
            )
        super().__init__(context, Border(context))
        self.script, self.program, self.job = script, script.program, job

    def _files(self) -> dict[Path, Path]:
        config = self.script.folder.parent / "config"
        return {config / paths.PLAN: APP / "config" / paths.PLAN, self.script.folder: CODE}

    def _told(self) -> dict[str, Any]:
        return {**super()._told(), "job": self.job, "repeats": self._repeats_from()}

    def _repeats_from(self) -> int:
        """Return the seed of a script's random numbers, which depends on the hospital's secret if the data is real."""
        seed, settings = self.context.plan.seed, self.context.settings
        if not settings.protects(self.context.plan.task.synthetic):
            return seed
        return seed_for(budget_of(settings, self.context.site, self.context.folder).number("script"), seed)


def _until(end: float) -> None:
    if time.monotonic() > end:
        raise TimeoutError


@dataclass(frozen=True)
class Taken:
    """The resources that all processes in a sandbox use together."""

    processes: int = 0  # processes and threads
    memory: int = 0  # bytes
    files: int = 0  # in the scratch
    sockets: int = 0  # sockets that are open, or that wait in another socket's queue
    opened: int = 0  # open files


def taken_by(inside: list[Path], enough: int) -> Taken:
    """Measure the resources of all processes in a sandbox, and let the kernel kill these processes first if memory runs
    out.

    The fast measurement counts shared memory once per process. If its sum exceeds `enough`, a slower measurement counts
    shared memory only once.
    """
    number = held = files = sockets = opened = queued = 0
    for process in inside:
        told = _told(_living(process) / "status")
        number += told.get("Threads", 0)
        held += sum(told.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap", "VmPTE")) * 1024
        files = files or _files(process)
        sockets, queued = (sockets, queued) if sockets else _sockets(process)
        with contextlib.suppress(OSError):
            opened += sum(1 for _ in (process / "fd").iterdir())
            (process / "oom_score_adj").write_text("1000")
    if held > enough:
        shares = [{**_told(own / "smaps_rollup"), **_told(own / "status")} for own in map(_living, inside)]
        names = "Pss_Anon", "Pss_Shmem", "SwapPss", "VmPTE"
        held = sum(share.get(name, 0) for share in shares for name in names) * 1024
    return Taken(number, held + queued, files, sockets, opened)


def _living(process: Path) -> Path:
    """Return the process's folder in /proc, or a thread's folder if the first thread has ended, because the process's
    folder then lacks the memory use.
    """
    if "RssAnon" not in _told(process / "status"):
        with contextlib.suppress(OSError):
            return next((task for task in (process / "task").iterdir() if "RssAnon" in _told(task / "status")), process)
    return process


def _sockets(process: Path) -> tuple[int, int]:
    """Return the number of sockets in a sandbox's network, and the bytes that wait in its TCP and UDP sockets. Both are
    zero if the process has ended or has not entered the sandbox yet.
    """
    with contextlib.suppress(OSError):
        if (process / "ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
            return 0, 0
        used = (process / "net/sockstat").read_text().split(maxsplit=3)[2]
        lines = [line for name in PROTOCOLS for line in (process / "net" / name).read_text().splitlines()[1:]]
        return int(used), sum(int(half, 16) for line in lines for half in line.split()[4].split(":"))
    return 0, 0


def _told(file: Path) -> dict[str, int]:
    """Read the numbers in a file under /proc about a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        pairs = (line.split()[:2] for line in file.read_text(errors="replace").splitlines())
        return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    return {}


def _files(process: Path) -> int:
    """Return the number of files in a sandbox's scratch folder, or 0 if the process has ended or has not entered the
    sandbox.
    """
    number = 0
    for place in ("dev/shm", str(WORK).lstrip("/")):
        with contextlib.suppress(OSError):
            there = os.statvfs(process / "root" / place)
            number += there.f_files - there.f_ffree
    return number
