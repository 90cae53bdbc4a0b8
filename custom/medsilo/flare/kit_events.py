"""Write events about the process of a startup kit to the kit's events.log. study_events.py writes events of studies."""

import math
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobLauncherSpec
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from medsilo.core.errors import MedsiloError, TemporaryRefusal
from medsilo.core.files import read_bounded, write_bytes
from medsilo.core.text import plain
from medsilo.flare.certificates import TOLD, CertificateEnds, end_of, own_certificate
from medsilo.flare.leftovers import studies_of
from medsilo.flare.workspace import kit_folder, kit_of, settings_folder
from medsilo.runs import paths
from medsilo.runs.event_chain import REMEDY, EventChain
from medsilo.runs.events import SILENCE, Event, tell_counts, write
from nvflare_reliability.cleanup import LostConnections
from nvflare_reliability.kit_patches import (
    beat_when_connected,
    hear_of_expulsion,
    is_expelled,
    say_why,
    tell_with_heartbeats,
)
from nvflare_reliability.liveness import EXPELLED, REFUSES, WAITS, Silent
from nvflare_reliability.returning_sites import hear_of_processes
from nvflare_reliability.revocation import LARGEST, LIST, is_newer, list_in

LOOK = 2.0  # seconds between two checks of the parties' connections
# seconds without a connection after which a party counts as absent; most parties reconnect in less time
GRACE = 10.0
# seconds without a heartbeat after which the server calls a party; a party sends a heartbeat every ten seconds
LATE = 11.0
OFTEN = 15.0  # seconds between two events about restarts of one party, because a party could register all the time
PROCESS = "medsilo.process"  # the key under which a hospital's heartbeat contains a random name of the kit's process
LONGEST_NAME = 32
# the message that NVFlare writes to a job's error log if the job uses a class that is not allowed
NOT_ALLOWED = re.compile(r"Component '([\w.]{1,200})'[^\n]{0,300} is not in allow_list(?!; allowing)")
MOST_READ = 1 << 20  # maximum bytes of the error log that are read
# a file in a startup kit's folder, which NVFlare writes some seconds before it kills the kit's process
STOP = "shutdown.fl"
# All rejected registrations are counted together under this name, because a rejected party may claim any name.
REGISTERING = "those who register"
# seconds after the start of a kit's new process in which messages of the kit's old process may still arrive
TWICE = 30.0


@dataclass(frozen=True)
class LastContact:
    """The result of one check of a party: whether the party is connected, and the wall-clock time of the party's last
    message.
    """

    connected: bool
    last_heard: float
    token: str = ""  # the party's session token, which changes when the party registers again
    cell: str = ""  # the name of the party's cell, by which NVFlare addresses the party's process


@dataclass
class Attendance:
    """Records which parties are connected and which are absent, and when each party's last message arrived."""

    direct: set[str] = field(default_factory=set)  # parties that have had a direct connection to this process
    # for each party: the last value of `last_heard`, and the time at which the value changed
    heard: dict[str, tuple[float, float]] = field(default_factory=dict)
    # for each party without a connection, the time at which the connection was lost
    lost: dict[str, float] = field(default_factory=dict)
    there: dict[str, bool] = field(default_factory=dict)
    returned: dict[str, float] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)  # names of processes, in the parties' last heartbeats
    known: dict[str, tuple[str, str]] = field(default_factory=dict)  # tokens and processes at the last events

    def look(
        self, seen: Mapping[str, LastContact], now: float, expelled: Collection[str] = (), deaf: Collection[str] = ()
    ) -> Iterator[Event]:
        """Yield events about parties that have connected or become absent since the last check.

        Args:
            now: The time of a monotonic clock, in seconds.
            deaf: The parties that do not answer calls.
        """
        for name, one in seen.items():
            if self.heard.get(name, (None,))[0] != one.last_heard:
                self.heard[name] = one.last_heard, now
        self.direct.update(name for name, one in seen.items() if one.connected)
        for name in sorted({*seen, *self.there}):
            why = EXPELLED if name in expelled else self._missing(name, seen.get(name), now, name in deaf)
            was = self.there.get(name)
            if why is None and was is not True:
                self.there[name] = True
                self.processes.pop(name, None)  # the party may have a new process, whose next heartbeat names it
                self.known.pop(name, None)
                yield Event("joined" if was is None else "back", "connected", name)
            elif why is None and self._is_restarted(name, seen[name].token, now):
                yield Event("back", "connected; its processes were started again, and nobody had missed it", name)
            elif why and was:
                self.there[name] = False
                yield Event("away", why, name, needs_somebody=True)

    def _is_restarted(self, name: str, token: str, now: float) -> bool:
        """True if a party has registered again with another process, and no such event was written lately.

        A process may register twice, and another party could send a heartbeat with a false name of a process.
        """
        if not (process := self.processes.get(name)):
            return False
        before = self.known.setdefault(name, (token, process))
        if before[0] == token or before[1] == process or now - self.returned.get(name, -math.inf) < OFTEN:
            return False
        self.returned[name], self.known[name] = now, (token, process)
        return True

    def late(self, seen: Mapping[str, LastContact], now: float) -> dict[str, str]:
        """Return the parties whose heartbeats are late, each with the name by which NVFlare addresses the party's
        process.
        """
        return {name: one.cell for name, one in seen.items() if now - self.heard.get(name, (0, now))[1] > LATE}

    def _missing(self, name: str, seen: LastContact | None, now: float, is_deaf: bool) -> str | None:
        """Return the reason why a party is absent.

        Returns None if the party is connected. Returns "" if the party may soon connect again, because it lost its
        connection only recently.
        """
        if seen is None:
            return "it signed off, or the server gave it up"
        if seen.connected or name not in self.direct:
            self.lost.pop(name, None)
            silent = now - self.heard[name][1]
            return f"it was silent for {silent:.0f} s" if silent > (LATE if is_deaf else SILENCE) else None
        since = self.lost.setdefault(name, now)
        return f"its connection is gone for {now - since:.0f} s" if now - since > GRACE else ""


class WorkingTime:
    """A clock that stops while this process is suspended, because a suspended process receives no messages."""

    def __init__(self) -> None:
        self.at, self.worked = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self.worked += min(now - self.at, 2 * LOOK)
        self.at = now
        return self.worked


class EventKeeper:
    """Logs counts of rejections, and signs a startup kit's events.log every hour and at the end of the kit's
    process.
    """

    def __init__(self, kit: Path | None, chain: EventChain | None) -> None:
        """Sign the events of a startup kit.

        Args:
            chain: Signs the log; None if the kit has no key.
        """
        self.kit, self.chain, self.has_ended = kit, chain, False

    @classmethod
    def of(cls, fl_ctx: FLContext, party: str) -> Self:
        """Return the event keeper for this process's startup kit. The event keeper also handles the signal SIGTERM of
        this process.
        """
        files = kit_of(fl_ctx, party)
        keeper = cls(kit_folder(fl_ctx), EventChain(files) if files else None)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, partial(keeper._end_by_signal, os.getpid()))
        return keeper

    def look(self) -> None:
        """Log the counts of rejected registrations and requests. Sign the log if an hour has passed since the last
        signature, or if the kit's process is about to end.
        """
        with suppress(Exception):  # an error while logging must not end the regular checks
            if self.kit:
                tell_counts(self.kit)
                stops = (self.kit / STOP).exists()
                if self.chain and not stops:
                    self._sign(self.chain.sign_in_time)
                elif stops:
                    self.end()

    def end(self) -> None:
        """Sign the log when the kit's process ends; only the first call has an effect."""
        if self.chain and not self.has_ended:
            self.has_ended = True
            with suppress(Exception):  # an error in this function must not prevent the end of the kit's process
                self._sign(self.chain.sign)

    def _sign(self, sign: Callable[[], None]) -> None:
        try:
            sign()
        except TemporaryRefusal:
            raise  # errors of the type TemporaryRefusal are temporary, for example during a renewal of the kit
        except MedsiloError as error:
            if self.kit:
                write(self.kit, Event("refused", f"{error}; {REMEDY}", needs_somebody=True, by="events.log"))

    def _end_by_signal(self, process: int, number: int, frame: object) -> None:
        if os.getpid() == process:
            self.end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class ServerEvents(FLComponent):
    """Writes an event at the server if a party connects, becomes absent, or is rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.attendance, self.keeper = Attendance(), EventKeeper(None, None)
        self.certificates: CertificateEnds | None = None  # the object is created when the server starts
        # for each hospital with two running processes: the first and the last time at which the server noticed both
        # processes
        self.twice: dict[str, tuple[float, float]] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self.keeper = EventKeeper.of(fl_ctx, "server")
            write(kit_folder(fl_ctx), Event("started", "the server, to which nobody is connected yet"))
            self.certificates = CertificateEnds(kit_folder(fl_ctx))
            tell_with_heartbeats(fl_ctx.get_engine().server, partial(revoked_in, kit_folder(fl_ctx)))
            hear_of_processes(fl_ctx.get_engine(), partial(self._process_of_job, kit_folder(fl_ctx)))
            threading.Thread(target=self._watch, args=(fl_ctx.get_engine(), kit_folder(fl_ctx)), daemon=True).start()
        elif event_type == EventType.SYSTEM_END:
            self.keeper.end()
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._registered(fl_ctx)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            peer = fl_ctx.get_peer_context()
            if peer and self.certificates:
                self.certificates.heard(name := peer.get_identity_name(), peer.get_prop(TOLD))
                process = peer.get_prop(PROCESS)
                if name in self.attendance.there and isinstance(process, str) and len(process) <= LONGEST_NAME:
                    self.attendance.processes[name] = process
            self._heard(fl_ctx)

    def _watch(self, engine: Any, kit: Path) -> None:
        silent, clock = Silent(engine.get_cell()), WorkingTime()
        silent.listen()
        while not engine.server.shutdown:
            self.keeper.look()
            with suppress(Exception):  # an error in one check of the parties must not end the series of checks
                expelled = [name for name in self.attendance.there if is_expelled(engine, name)]
                seen, now = connections(engine), clock()
                for event in self.attendance.look(seen, now, expelled, silent.deaf):
                    write(kit, event)
                silent.call(self.attendance.late(seen, now))
                for event in self.certificates.look(time.time()) if self.certificates else ():
                    write(kit, event)
            time.sleep(LOOK)

    @staticmethod
    def _process_of_job(kit: Path, job: str, hospital: str, runs: bool) -> None:
        """Log that a job's process died at a connected hospital, or that the hospital started the process again."""
        listed = studies_of(kit).glob(f"*/{paths.JOBS}")
        study = next((file.parent.name for file in listed if job in file.read_text("utf-8", "replace").split()), job)
        if runs:
            write(kit, Event("back", "its process was started again", hospital, study, job))
        else:
            told = "its process died; it is started again"
            write(kit, Event("away", told, hospital, study, job, needs_somebody=True))

    def _registered(self, fl_ctx: FLContext) -> None:
        """Write an event about a party whose registration the server has rejected."""
        self._refuse(plain(fl_ctx.get_prop(FLContextKey.UNAUTHENTICATED) or ""), REGISTERING, fl_ctx)

    def _heard(self, fl_ctx: FLContext) -> None:
        """If two processes of one startup kit run at the same time, write an event, or log the lost process out.
        NVFlare knows only the process that registered last.

        If the process that NVFlare knows is gone, the server logs this process out, so that the second process can
        register at its next heartbeat. Without logging out the lost process, NVFlare would wait ten minutes before it
        accepts a new registration.
        """
        name = (fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR) or "").rpartition(": ")[2]
        if not name:
            return
        now, engine = time.monotonic(), fl_ctx.get_engine()
        first, last = self.twice.get(name, (now, now))
        self.twice[name] = first if now - last < TWICE else now, now
        if self.attendance.there.get(name) is False:
            for gone in [client.token for client in engine.get_clients() if client.name == name]:
                engine.server.logout_client(gone)
        elif now - self.twice[name][0] > TWICE:
            told = f"two processes run with the kit of {name}; the later one has its jobs: end the other"
            self._refuse(told, name, fl_ctx)

    def _refuse(self, reason: str, by: str, fl_ctx: FLContext) -> None:
        if reason:
            write(kit_folder(fl_ctx), Event("refused", reason, needs_somebody=True, by=by))


def reason_of_failure(kit: Path, job: str) -> str:
    """Return the reason why a job's process failed at a hospital. Return "" for a reason that the server must not
    learn.

    A reason that may name files or patients must not be sent to the server.
    """
    end = end_of(own_certificate(kit))
    if end is not None and end <= time.time():
        return f"{WAITS} on {datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC; its studies wait for a renewed kit"
    try:
        with (kit / job / "error_log.txt").open("rb") as file:
            text = file.read(MOST_READ).decode("utf-8", "replace")
    except OSError:
        return ""
    refused = NOT_ALLOWED.search(text)
    return f"{REFUSES}: {refused[1]} is not in its class_allow_list (local/resources.json)" if refused else ""


def connections(engine: Any) -> dict[str, LastContact]:
    cell = engine.get_cell()
    return {
        client.name: LastContact(
            cell.is_cell_connected(its := client.get_fqcn()), client.last_connect_time or 0.0, client.token, its
        )
        for client in engine.get_clients()
    }


def launcher_of_code(local: Path) -> JobLauncherSpec | None:
    """Return this hospital's launcher for a job that contains code, or None if NVFlare's launcher starts the job."""
    from medsilo.airlock.room import ability
    from medsilo.flare.airlock_executor import AirlockLauncher
    from medsilo.site.settings import SiteSettings

    if (wanted := SiteSettings.read(local).airlock) == "off":
        return None
    able = ability()
    if able.works:
        return AirlockLauncher()
    told = f"this hospital runs training scripts in its airlock alone, and its machine can't: {able.lacks[0]}"
    return RefusingLauncher(plain(told)) if wanted == "required" else None


def revoked_in(kit: Path) -> str:
    """Return the text of the server's list of revoked certificates, or "" if the server has no such list."""
    with suppress(OSError, ValueError, MedsiloError):
        return read_bounded(kit / LIST, LARGEST).decode()
    return ""


def take_revoked(kit: Path, message: object) -> None:
    """Save the server's list of revoked certificates if this list is newer than the list that is already saved.

    A list of revoked certificates that the root authority has not signed is ignored.
    """
    with suppress(OSError, ValueError):
        if isinstance(message, str) and len(message) <= LARGEST and is_newer(text := message.encode(), kit):
            write_bytes(kit / LIST, text)
            write(kit, Event("certificate", f"the consortium has revoked {len(list_in(kit) or [])} certificates"))


class RefusingLauncher(JobLauncherSpec):
    """Rejects a job, and states the reason. This class is a launcher, because NVFlare reports an error only of a
    launcher, and not of an event handler.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        raise MedsiloError(self.reason)


class OnlyLauncher(list[JobLauncherSpec]):
    """A list with exactly one launcher, as NVFlare requires; launchers that NVFlare's components append are ignored."""

    def append(self, launcher: JobLauncherSpec) -> None:
        pass


class HospitalEvents(LostConnections):
    """Writes an event if the hospital connects to the server, loses the connection, or rejects a job.

    If a hospital approves plans, this component starts a job with code only after the hospital has approved the job's
    plan and code. If the hospital has an airlock, the job's script runs in the airlock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attendance, self.last_heard, self.keeper = Attendance(), 0.0, EventKeeper(None, None)
        self.process = secrets.token_hex(8)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        # Start to watch the kit's certificate before the first connection, because a party with an expired certificate
        # never connects.
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            ends = CertificateEnds(kit_folder(fl_ctx))
            threading.Thread(target=self._watch_certificate, args=(ends,), daemon=True).start()
        elif event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            fl_ctx.set_prop(TOLD, own_certificate(kit_folder(fl_ctx)), private=False, sticky=False)
            fl_ctx.set_prop(PROCESS, self.process, private=False, sticky=False)
        elif event_type == EventType.AFTER_CLIENT_REGISTER:
            self.last_heard = time.monotonic()
            from medsilo.flare.code_gate import ask_when_deploying

            self.keeper = EventKeeper.of(fl_ctx, "client")
            ask_when_deploying(fl_ctx.get_engine())
            say_why(fl_ctx.get_engine(), partial(self._why, kit_folder(fl_ctx)))
            kit = kit_folder(fl_ctx)
            hear_of_expulsion(
                fl_ctx.get_engine(), partial(self._hear_of_expulsion, kit), partial(self._hear_of_server, kit)
            )
            beat_when_connected(fl_ctx.get_engine())
            threading.Thread(target=self._watch, args=(fl_ctx.get_engine(), kit_folder(fl_ctx)), daemon=True).start()
        elif event_type == EventType.BEFORE_JOB_LAUNCH:
            from medsilo.flare.code_gate import why_not_started

            meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
            launcher: JobLauncherSpec | None = None
            if meta.get(AppValidationKey.BYOC):
                reason = why_not_started(fl_ctx, meta)
                launcher = RefusingLauncher(reason) if reason else launcher_of_code(settings_folder(fl_ctx))
            if isinstance(launcher, RefusingLauncher):
                write(kit_folder(fl_ctx), Event("refused", launcher.reason, needs_somebody=True))
            if launcher:
                fl_ctx.set_prop(FLContextKey.JOB_LAUNCHER, OnlyLauncher([launcher]), private=True, sticky=False)
        elif event_type == EventType.SYSTEM_END:
            self.keeper.end()

    @staticmethod
    def _watch_certificate(ends: CertificateEnds) -> None:
        while True:
            with suppress(Exception):
                for event in ends.look(time.time()):
                    write(ends.kit, event)
            time.sleep(LOOK)

    @staticmethod
    def _why(kit: Path, job: str) -> str:
        reason = reason_of_failure(kit, job)
        if reason:
            write(kit, Event("refused", reason, job=job, needs_somebody=True))
        return reason

    def _hear_of_server(self, kit: Path, message: object) -> None:
        self.last_heard = time.monotonic()
        if message is not None:
            take_revoked(kit, message)

    @staticmethod
    def _hear_of_expulsion(kit: Path) -> None:
        told = "the consortium expelled this hospital, so its jobs were ended; ask the consortium's lead"
        write(kit, Event("refused", told, "the server", needs_somebody=True, by="the server"))

    def _watch(self, engine: Any, kit: Path) -> None:
        silent, clock, where = Silent(engine.get_cell()), WorkingTime(), FQCN.ROOT_SERVER
        silent.listen()
        while True:
            self.keeper.look()
            with suppress(Exception):
                connected = engine.get_cell().is_cell_connected(where)
                seen, now = {"the server": LastContact(connected, self.last_heard, cell=where)}, clock()
                for event in self.attendance.look(seen, now, deaf=silent.deaf):
                    write(kit, event)
                silent.call(self.attendance.late(seen, now))
            time.sleep(LOOK)
