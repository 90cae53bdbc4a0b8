"""Serve metrics of a server or a hospital, and send messages to a webhook: python provisioning/metrics.py KIT

The program listens on 127.0.0.1 only. /metrics returns values in Prometheus's text format, and /healthz reports whether
the server or hospital is up. With --webhook FILE, or with MEDSILO_WEBHOOK in the environment, the program posts
{"text": ...} to the webhook's URL. The program posts when a study ends, fails or continues, when no round ends, and
when a hospital disconnects, reconnects or is rejected. The program posts when a certificate expires or is renewed,
a disk is almost full, or the server or hospital does not run. The program takes no part in studies, and needs
medsilo[metrics]. The file grafana.json is a dashboard for these metrics, and alerts.yaml contains alert rules for
Prometheus.
"""

import argparse
import json
import math
import os
import re
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import psutil
from cryptography import x509
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from medsilo.check.hospital_checks import KitAtHome
from medsilo.check.kit import OF_A_JOB, SOON, Kit, is_of_kit, read_kit, trouble
from medsilo.check.spending import spent
from medsilo.core.errors import MedsiloError
from medsilo.core.files import read_bounded, write_text
from medsilo.flare.leftovers import studies_of
from medsilo.runs import event_reading, events, paths
from medsilo.runs.ends import study_state
from medsilo.runs.event_reading import columns_of
from medsilo.runs.progress import read_now
from medsilo.runs.reading import read_summary
from medsilo.runs.rounds import RequestStatus, Round
from medsilo.site.ledger import ledgers
from medsilo_lab.consortium.incidents import Incidents, Message, News, news_of
from medsilo_page.watching import studies

T = TypeVar("T")
Sample = tuple[str, dict[str, str], float | None]
# seconds between two checks of the server or hospital, and seconds between two readings of events
LOOK, POLL = 5.0, 1.0
# maximum number of seconds for one check or one message; after this time, the watch is reported as stopped
STALE = 120.0
TROUBLE = "trouble "  # prefix that distinguishes the keys of problems from the keys of events
UNKNOWN = "unknown"
FRESH = 1.0  # seconds for which the results of a check are reused
# First and longest pause, in seconds, before a rejected message is sent again. Each pause is twice as long as the
# previous pause.
PAUSE, LONGEST = 5.0, 60.0
# maximum number of attempts to send a message if the webhook does not answer, because each attempt may have succeeded
UNCLEAR = 3
AHEAD = 60.0  # maximum seconds by which the time of a study's file may be ahead of the clock
MOST = 1000
# a file in the kit, with the event that was read last, the open problems, and the waiting messages
TOLD = ".metrics-told"
# A study stands still if no round ends for this many seconds, or for this many times the usual duration of a round.
STILL, USUAL = 600.0, 5
DISK = 10.0  # GB; a disk with less free space is reported
FULL = 1 << 20  # bytes; a disk with less free space stops every study
# descriptions of problems by the kind of the problem and the name of the party or study
Trouble = dict[tuple[str, str], str]
HERE = "127.0.0.1"
SERVER_TELLS = ("down", "certificate")  # kinds of a hospital's problems that the server's watch also reports
# After this many seconds without the server, a hospital's watch reports that the server is absent, because the server's
# watch may be off, too.
SERVER_OFF = 600.0
NAMES = (HERE, "localhost", "[::1]")
# maximum number of connections at the same time, and time limit of a request in seconds
MOST_AT_ONCE, PATIENCE = 16, 5.0
WEBHOOK = "MEDSILO_WEBHOOK"
GIVES_WAY = 0.5  # seconds within which a thread must end after its connection was closed
LONGEST_URL = 8192
LATELY = 30 * 86_400.0  # A study without changes for this many seconds is no longer reported.
HELP = {
    "up": "1 if the server listens, or the site is connected",
    "site_connected": "1 if a hospital is connected to the server, or the server to this hospital",
    "trouble": "1 while something needs somebody: down, certificate, disk, events, clock, standstill",
    "certificate_end_timestamp_seconds": "when the first certificate of the kit ends",
    "memory_bytes": "held by the processes of this kit",
    "disk_free_bytes": "where studies are kept",
    "studies": "changed in the last 30 days, by state: running, waits, finished, failed, cancelled or stopped",
    "rounds": "finished rounds of a study",
    "round_seconds": "of the last round of a study, at the server",
    "changed_timestamp_seconds": "when a study was last heard of",
    "site_answered_rounds": "rounds of a study that a site is part of",
    "site_missed_rounds": "rounds of a study that a site is not part of, lost or refused",
    "site_round": "the last round that a site is part of",
    "site_heard_timestamp_seconds": "when a site's last answer came, while its study runs",
    "site_seconds": "that a site worked for a study",
    "site_memory_bytes": "that a site held at most in a study",
    "site_bytes": "of tensors in a study, by direction",
    "errors": "answers of this site that failed, by kind",
    "approvals_waiting": "plans that nobody has decided on",
    "epsilon_left": "of the privacy that a data set may cost",
    "unreadable": "records that could not be read",
}


@dataclass(frozen=True)
class Processes:
    """The processes that run on this machine at one moment. The processes are read only once, because reading
    is slow.
    """

    lines: str  # all command lines; the command line of a job's process contains the name of the job
    own: tuple[psutil.Process, ...]

    @classmethod
    def of(cls, kit: Path) -> "Processes":
        named, lines, own = str(kit.resolve()), list[str](), list[psutil.Process]()
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            lines += words
            if process.pid != os.getpid() and is_of_kit(words, named):
                own.append(process)
        return cls("\n".join(lines), tuple(own))

    def memory(self) -> int:
        found = 0
        for process in self.own:
            with suppress(psutil.Error):  # a process may end while its memory is read
                found += process.memory_info().rss
        return found

    def temporary(self) -> set[Path]:
        """Return the folders for temporary files of the kit's processes. The temporary files contain jobs and answers
        in transit.
        """
        found = set[Path]()
        for process in self.own:
            with suppress(psutil.Error):  # the process may belong to another account or may have ended
                found.add(Path(process.environ().get("TMPDIR") or "/tmp"))
        return found


class Unchanged:
    """Values that are computed from files, and that are cached until one of the files changes."""

    def __init__(self) -> None:
        self.made: dict[object, tuple[object, object]] = {}

    def __call__(self, make: Callable[[Path], T], where: Path, *files: Path, given: object = None) -> T:
        found = [path.stat() if path.exists() else None for path in files]
        stamp = given, tuple(stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
        known = self.made.get((make.__name__, where))
        if known is None or known[0] != stamp:
            known = self.made[make.__name__, where] = stamp, make(where)
        return known[1]  # type: ignore[return-value]


kept = Unchanged()
# for each study, the lines in the file of rounds, and the rounds that were parsed from these lines
known: dict[Path, tuple[list[str], list[Round]]] = {}


def _logs(kit: Path) -> list[Path]:
    return [kit / events.NAME, kit / f"{events.NAME}.1"]


def samples(kit: Path, disk: float = DISK) -> Iterator[Sample]:
    """Yield the values of all metrics that can be read at present, and the number of unreadable records."""
    party, unreadable = read_kit(kit), 0
    folder, processes = studies_of(kit), Processes.of(kit)
    up = trouble(party) is None
    yield "up", {"party": party.name}, up
    for name, here in kept(event_reading.connected, kit, *_logs(kit)).items():
        yield "site_connected", {"site": name}, here and up
    yield "certificate_end_timestamp_seconds", {}, _end(party)
    for what, about in troubles(kit, disk, processes=processes, why=None if up else "it is not up"):
        yield "trouble", {"what": what, "about": about}, 1
    yield "memory_bytes", {}, processes.memory()
    if folder.is_dir():
        yield "disk_free_bytes", {}, shutil.disk_usage(folder).free
    parts: list[Callable[[], Iterator[Sample]]] = []
    if party.party == "server":
        last = kept(event_reading.last_of_jobs, kit, *_logs(kit))
        parts = [partial(_of_run, run, processes.lines, last) for run in _runs(folder)]
    else:
        parts = [partial(_of_site, kit, party.name, processes.lines), partial(_of_hospital, kit)]
    for part in parts:
        try:
            yield from list(part())
        # the file may be damaged or incomplete, because another process may be writing the file
        except (MedsiloError, OSError, ValueError):
            unreadable += 1
    yield "unreadable", {}, unreadable


def _end(party: Kit) -> float | None:
    """Return the time at which the first certificate expires: the kit's certificate or the root certificate."""
    try:
        files = [(party.folder / name).read_bytes() for name in (party.certificate, party.root)]
        return min(x509.load_pem_x509_certificate(file).not_valid_after_utc for file in files).timestamp()
    except (OSError, ValueError):
        return None


def _runs(folder: Path) -> list[Path]:
    """Return the folders of the server's studies that changed in the last 30 days."""
    found = sorted(path.parent for path in folder.glob(f"*/{paths.PLAN}"))
    return [run for run in found if time.time() - _changed(run) < LATELY]


def _changed(run: Path) -> float:
    """Return the time at which the files of a study last changed."""
    told = (run / name for name in (paths.PLAN, paths.ROUNDS, paths.NOW))
    return max(path.stat().st_mtime for path in told if path.exists())


def _state(run: Path, lines: str, last: Mapping[str, tuple[str, bool]]) -> str:
    """Return the state of a study at the server.

    Args:
        lines: command lines of running processes; the command line of a job's process contains the name of the job
    """
    jobs = (run / paths.JOBS).read_text("utf-8").split() if (run / paths.JOBS).exists() else []
    job, summary = jobs[-1] if jobs else "", run / paths.SUMMARY
    if job and job in lines:
        return study_state(True, None, None)
    return study_state(False, last.get(job), kept(read_summary, run, summary).status if summary.exists() else None)


def troubles(
    kit: Path,
    disk: float = DISK,
    now: float | None = None,
    processes: Processes | None = None,
    why: str | None = UNKNOWN,
) -> Trouble:
    """Return the problems of this server or hospital that a person must solve.

    Args:
        disk: number of GB on the disk that should be free
        processes: the processes that run at present, and the reason why the party is not up
    """
    now, party, folder = now or time.time(), read_kit(kit), studies_of(kit)
    processes = processes or Processes.of(kit)
    found: Trouble = {}
    if why := trouble(party) if why == UNKNOWN else why:
        found["down", party.name] = f"{party.name} is not up: {why}"
    end = _end(party)
    if end is not None and end - now < SOON.total_seconds():
        day = datetime.fromtimestamp(end, UTC)
        found["certificate", party.name] = f"a certificate of {party.name} ends on {day:%Y-%m-%d}; renew its kit"
    for where in (folder, kit, *processes.temporary()):
        if where.is_dir() and (told := _short(where, disk, where == folder)):
            found["disk", party.name] = f"{told} of {party.name}; see medsilo prune"
    log = kit / events.NAME
    if not os.access(log if log.exists() else kit, os.W_OK):
        found["events", party.name] = f"{log} of {party.name} can't be written: nobody is told of events"
    for run in _runs(folder) if party.party == "server" else ():
        with suppress(MedsiloError, OSError, ValueError):
            if _state(run, processes.lines, {}) != "running":
                continue
            if (ahead := _changed(run) - now) > AHEAD:
                told = f"the clock of {party.name} was set back, for {run.name} by {ahead / 60:.0f} min; set it right"
                found["clock", party.name] = told
            elif still := standstill(run, now):
                found["standstill", run.name] = f"no round of {run.name} ended for {still / 60:.0f} min"
    return found


def standstill(run: Path, now: float) -> float | None:
    """Return the seconds since the end of the last round if the study stands still, otherwise None."""
    usual = [line.seconds for line in _rounds(run)[-20:] if line.seconds]
    told = (run / name for name in (paths.PLAN, paths.JOBS, paths.ROUNDS))
    since = max(path.stat().st_mtime for path in told if path.exists())
    return now - since if now - since > max(STILL, USUAL * median(usual or [0.0])) else None


def _rounds(run: Path) -> list[Round]:
    return kept(_read_rounds, run, run / paths.ROUNDS)


def _read_rounds(run: Path) -> list[Round]:
    """Read the rounds of a study, and parse only lines that have changed since the last call."""
    lines = (run / paths.ROUNDS).read_text("utf-8").split("\n")[:-1] if (run / paths.ROUNDS).exists() else []
    before, rounds = known.get(run, ([], []))
    same = next((at for at, (old, new) in enumerate(zip(before, lines, strict=False)) if old != new), len(before))
    same = min(same, len(lines))
    rounds = [*rounds[:same], *(Round.model_validate_json(line) for line in lines[same:])]
    known[run] = lines, rounds
    return rounds


def _heard(run: Path, rounds: list[Round], turns: RequestStatus | None) -> Iterator[tuple[str, float]]:
    """Yield each site in a running study, with the time of the site's last message."""
    at = (run / paths.ROUNDS).stat().st_mtime if rounds else 0.0
    heard: dict[str, float] = {}
    for line in reversed(rounds):
        heard |= {site: at for site in line.answered if site not in heard}
        at -= line.seconds or 0.0
    for site, turn in turns.sites.items() if turns else ():
        # if a site has not answered the current request, the site's last message came before the request
        if turn.asked is not None:
            told = turns.at - turn.asked + (turn.answered or 0.0)
            heard[site] = told if turn.answered is not None else heard.get(site, told)
    yield from heard.items()


def _of_run(run: Path, lines: str, last: Mapping[str, tuple[str, bool]]) -> Iterator[Sample]:
    own, rounds = {"study": run.name}, _rounds(run)
    state = _state(run, lines, last)
    yield "studies", own | {"state": state}, 1
    yield "changed_timestamp_seconds", own, _changed(run)
    yield from kept(_of_rounds, run, run / paths.ROUNDS)
    for site, at in _heard(run, rounds, read_now(RequestStatus, run)) if state == "running" else ():
        yield "site_heard_timestamp_seconds", own | {"site": site}, at


def _of_rounds(run: Path) -> list[Sample]:
    own, rounds = {"study": run.name}, _rounds(run)
    found: list[Sample] = [("rounds", own, len(rounds))]
    found.append(("round_seconds", own, rounds[-1].seconds if rounds else None))
    for site in sorted({site for line in rounds for site in line.asked}):
        given = [line.sites[site] for line in rounds if site in line.sites]
        told = own | {"site": site}
        found += [
            ("site_answered_rounds", told, len(given)),
            ("site_missed_rounds", told, sum(line.absence(site) is not None for line in rounds)),
            ("site_round", told, max((line.round for line in rounds if site in line.sites), default=0)),
            ("site_seconds", told, sum(line.seconds for line in given)),
            ("site_memory_bytes", told, max((line.memory or 0 for line in given), default=0)),
            ("site_bytes", told | {"direction": "up"}, sum(line.bytes_up for line in given)),
            ("site_bytes", told | {"direction": "down"}, sum(line.bytes_down for line in given)),
        ]
    return found


def _of_site(kit: Path, site: str, lines: str) -> Iterator[Sample]:
    jobs = kept(event_reading.jobs, kit, *_logs(kit))
    for study in studies(studies_of(kit), site):
        if time.time() - study.last > LATELY:
            continue
        own = {"study": study.name, "site": site}
        runs = not study.stopped and jobs.get(study.name, "\n\n") in lines
        state = "finished" if study.ended else "running" if runs else "stopped"
        yield "studies", {"study": study.name, "state": state}, 1
        yield "changed_timestamp_seconds", {"study": study.name}, study.last
        yield "site_round", own, study.round
        yield "site_seconds", own, sum(line.seconds for line in study.diary)
        yield "site_memory_bytes", own, max((line.memory for line in study.diary), default=0)
        yield "site_bytes", own | {"direction": "up"}, study.bytes
        for kind in ("refused", "died"):
            yield "errors", own | {"kind": kind}, sum(line.kind == kind for line in study.diary)


def _of_hospital(kit: Path) -> Iterator[Sample]:
    home = KitAtHome.read(kit)
    decided = {decision.plan for decision in home.approvals.decisions()}
    yield "approvals_waiting", {}, sum(asked.hash not in decided for asked in home.approvals.asked())
    for data in ledgers(home.budget.folder, home.kit.folder.parent):
        found = spent(home.ledger(data), home.settings.privacy)
        known = found["allowed"] is not None and found["epsilon"] is not None
        yield "epsilon_left", {"data": data}, found["allowed"] - found["epsilon"] if known else None


def _short(where: Path, disk: float, studies: bool) -> str | None:
    """Return a warning if less than `disk` GB are free. For a disk without studies, the limit is at most a tenth of the
    disk's size.
    """
    usage = shutil.disk_usage(where)
    least = disk * 1e9 if studies else min(disk * 1e9, usage.total / 10)
    return f"{usage.free / 1e9:.1f} GB are free in {where}" if usage.free < least else None


class Samples(Collector):
    def __init__(self, found: Iterator[Sample]) -> None:
        self.found = found

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, labels, value in self.found:
            if value is not None:
                new = GaugeMetricFamily(f"medsilo_{name}", HELP[name], labels=list(labels))
                families.setdefault(name, new).add_metric([*labels.values()], float(value))
        yield from families.values()


def as_text(found: Iterator[Sample]) -> str:
    registry = CollectorRegistry()
    registry.register(Samples(found))
    return generate_latest(registry).decode()


class Fresh(Generic[T]):
    """Caches the result of a check for FRESH seconds, for all requests that arrive in this time."""

    def __init__(self, look: Callable[[], T]) -> None:
        self.look, self.lock = look, Lock()
        self.found: tuple[float, T] | None = None

    def __call__(self) -> T:
        with self.lock:
            if self.found is None or time.monotonic() - self.found[0] > FRESH:
                found = self.look()
                self.found = time.monotonic(), found
            return self.found[1]


def _handler(kit: Path, disk: float, running: Sequence["Running"] = ()) -> type[BaseHTTPRequestHandler]:
    numbers = Fresh(lambda: as_text(samples(kit, disk)))
    health = Fresh(lambda: trouble(read_kit(kit)))

    class Answer(BaseHTTPRequestHandler):
        server: "Endpoint"
        timeout = PATIENCE

        def do_GET(self) -> None:
            self.server.silent.pop(self.connection, None)
            try:
                # the request comes from a web page of another host
                if re.sub(r":\d*$", "", self.headers.get("Host", HERE)) not in NAMES:
                    self._send(421, "ask for 127.0.0.1\n")
                elif self.path == "/metrics":
                    self._send(200, numbers(), CONTENT_TYPE_LATEST)
                elif self.path == "/healthz":
                    wrong = next(filter(None, (one.trouble() for one in running)), None) or health()
                    self._send(503 if wrong else 200, f"{wrong or 'ok'}\n")
                else:
                    self._send(404, "there are /metrics and /healthz\n")
            except MedsiloError as error:  # the kit is missing or damaged
                self._send(503, f"{error}\n")

        def _send(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
            with suppress(ConnectionError, TimeoutError):  # the client may have closed the connection
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests, because Prometheus sends a request every few seconds."""

    return Answer


class Endpoint(ThreadingHTTPServer):
    """An HTTP server on the loopback address with a limited number of connections. With too many connections, the
    server closes the connection that has been silent for the longest time.
    """

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((HERE, port), handler)
        # the start time of each connection that has sent no request
        self.silent: dict[socket.socket, float] = {}
        self.places = BoundedSemaphore(MOST_AT_ONCE)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        if not self.places.acquire(blocking=False):
            self._cut(next(iter(list(self.silent)), None))
            if not self.places.acquire(timeout=GIVES_WAY):
                self.shutdown_request(request)
                return
        self.silent[request] = time.monotonic()
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self.silent.pop(request, None)
            self.places.release()

    def service_actions(self) -> None:
        """Close the connections that have sent no request within the time limit."""
        for request, since in list(self.silent.items()):
            if time.monotonic() - since > PATIENCE:
                self._cut(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no message about a connection that broke."""

    def _cut(self, request: socket.socket | None) -> None:
        if request:
            self.silent.pop(request, None)
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class Watch:
    """Creates messages about events and problems of a server or hospital, and stores open problems in the kit."""

    def __init__(self, kit: Path, disk: float, messages: "Messages", beside_server: bool = False) -> None:
        """beside_server: True if this hospital's watch must leave out events that the server's watch reports."""
        self.kit, self.look_for, self.messages = kit, partial(troubles, kit, disk), messages
        self.beside_server = beside_server
        self.incidents = Incidents()
        self.gone: News | None = None  # a message that the server is absent, which this watch has not yet reported
        self.gone_since = time.monotonic()
        self.line: str | None = None
        self.log: object = None  # inode and size of the file of events at the time when the file was last read
        self.looked, self.was_down, self.kept, self.unkept = -math.inf, False, "", False

    def look(self) -> None:
        if self.line is None:
            self.line = self._remember()
        log = self.kit / events.NAME
        state = (log.stat().st_ino, log.stat().st_size) if log.exists() else None
        if state != self.log:
            for line in event_reading.since(self.kit, self.line):
                news = news_of(line, first=not self.line)
                if news and self._is_mine(line, news):
                    self.incidents.take(news)
                self.line = line
            self.log = state
        if self.gone and time.monotonic() - self.gone_since > SERVER_OFF:
            self.incidents.take(self.gone)
            self.gone = None
        for message in self.incidents.due():
            self.messages.add(message)
        self._keep(self.line)
        if time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            self._look_for_trouble()

    def _is_mine(self, line: str, news: News) -> bool:
        """Return True if this watch must report an event. If the server has been off for a long time, the hospital's
        watch reports even events that the server's watch usually reports.
        """
        if not self.beside_server or not server_tells(line):
            return True
        columns = columns_of(line)
        if columns is None or columns[3] != "the server":
            return False
        if news.begins and not self.gone:
            self.gone, self.gone_since = news, time.monotonic()
        elif news.ends:
            self.gone = None
        reported = self.incidents.keys()
        return news.ends in reported

    def _remember(self) -> str:
        """Restore the saved state. Return the event that was read last, or the latest event if no state is saved."""
        path, last = self.kit / TOLD, next(reversed(list(event_reading.read(self.kit))), "")
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        if columns_of(text):  # the file may be from an earlier version of medsilo
            return text
        try:
            found: dict[str, Any] = json.loads(text) if text else {"line": last, "open": [], "waiting": []}
            waiting = [Message(**one) for one in found["waiting"]]
            line, self.incidents = str(found["line"]), Incidents.of_json(found["open"])
            self.gone = News(**found["gone"]) if found.get("gone") else None
        except (ValueError, LookupError, TypeError, AttributeError):
            _say(f"{TOLD} is damaged; what happened before now is not told")
            return last
        self.messages.waiting.extend(waiting)
        return line

    def _look_for_trouble(self) -> None:
        now, wrong = time.time(), self.look_for()
        if self.beside_server:
            wrong = {
                key: text
                for key, text in wrong.items()
                if key[0] not in SERVER_TELLS and not (key[0] == "disk" and waits_for_room(self.kit))
            }
        found = {f"{TROUBLE}{' '.join(key)}": (key, text) for key, text in wrong.items()}
        down = [name for name, (key, _) in found.items() if key[0] == "down"]
        known = {key: news for one in self.incidents.open for key, news in one.wrong.items() if key.startswith(TROUBLE)}
        for name, (key, text) in found.items():
            # a party counts as down only after two checks, because a slow machine may miss one handshake
            if name not in down or self.was_down:
                self.incidents.take(News(text, now, begins=name, about=key[1]))
        for name, news in known.items():
            if name not in found:
                self.incidents.take(News(f"over: {news.text}", now, ends=name, about=news.about))
        self.was_down = bool(down)

    def _keep(self, line: str) -> None:
        """Save the event that was read last, the open problems, and the messages that wait for the webhook.

        If the disk is full, the watch continues without saving.
        """
        waiting = [asdict(message) for message in list(self.messages.waiting)]
        gone = asdict(self.gone) if self.gone else None
        text = json.dumps({"line": line, "open": self.incidents.as_json(), "waiting": waiting, "gone": gone})
        if text == self.kept:
            return
        try:
            write_text(self.kit / TOLD, text)
            self.kept, self.unkept = text, False
        except (MedsiloError, OSError) as error:
            if not self.unkept:
                _say(f"{TOLD} can't be written: {type(error).__name__}")
            self.unkept = True


class Running:
    """Repeats a function in a thread even after errors, and checks that the thread does not hang."""

    def __init__(self, what: str, work: Callable[[], None], pause: float, most: float) -> None:
        """most: Maximum number of seconds for one call of the repeated function."""
        self.what, self.work, self.pause, self.most = what, work, pause, most
        self.at, self.failed = time.monotonic(), ""
        Thread(target=self._run, name=what, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.work()
                self.at, self.failed = time.monotonic(), ""
            except Exception as error:
                if self.failed != (failed := type(error).__name__):
                    self.failed = failed
                    _say(f"the {self.what} failed, and is tried again: {failed}")
            time.sleep(self.pause)

    def trouble(self) -> str | None:
        """Return the reason why the thread counts as stopped, or None if the thread still repeats the function."""
        silent = time.monotonic() - self.at
        return f"the {self.what} does not go on for {silent:.0f} s" if silent > self.most else None


def waits_for_room(kit: Path) -> bool:
    """Return True if a study runs at this hospital while the hospital's disk is full. While a study waits for a
    hospital with a full disk, the server's watch reports the full disk.
    """
    folder = studies_of(kit)
    if not folder.is_dir() or shutil.disk_usage(folder).free > FULL:
        return False
    for process in Processes.of(kit).own:
        with suppress(psutil.Error):  # the process may have ended in the meantime
            if any(word in OF_A_JOB for word in process.cmdline()):
                return True
    return False


def server_tells(line: str) -> bool:
    columns = columns_of(line)
    return columns is None or columns[3] == "the server" or columns[4] != "-" or columns[2] == "certificate"


def _say(text: str) -> None:
    with suppress(OSError):  # the disk with the log may be full
        print(f"medsilo: {text}", file=sys.stderr, flush=True)


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *told: object) -> None:
        """Do not follow a redirect of the webhook, because the message would be lost, and the receiver would choose the
        new address.
        """


def post(url: str, text: str) -> None:
    """Send a text to a webhook. Raise URLError if the webhook rejects the text. Raise any other error if the webhook
    may have accepted the text.
    """
    asked = urllib.request.Request(url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})
    urllib.request.build_opener(_Here).open(asked, timeout=10).close()


class Messages:
    """Sends messages to a webhook in order, and repeats each message until the webhook accepts the message."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send, self.waiting = send, deque[Message](maxlen=MOST)
        self.tries, self.unclear, self.next = 0, 0, 0.0

    def add(self, message: Message) -> None:
        if len(self.waiting) == MOST:
            _say(f"{MOST} messages wait for the webhook, so it is not told: {self.waiting[0].text}")
        self.waiting.append(message)

    def hand_over(self) -> None:
        """Send the waiting messages in order, and stop at the first message that the webhook rejects."""
        while self.waiting and time.monotonic() >= self.next:
            message = self.waiting[0]
            late = (time.time() - message.at) / 60
            try:
                self.send(f"{message.text} (told {late:.0f} min late)" if late >= 1 else message.text)
            except (OSError, HTTPException) as error:
                # a receiver that does not answer may have accepted the message
                self.unclear += not isinstance(error, urllib.error.URLError)
                self.tries += 1
                if self.tries == 1:
                    why = f"{getattr(error, 'code', '')} {type(error).__name__}".strip()
                    _say(f"the webhook did not take {message.text!r}: {why}")
                self.next = time.monotonic() + min(PAUSE * 2 ** min(self.tries - 1, 10), LONGEST)
                if self.unclear < UNCLEAR:
                    return
            self.tries, self.unclear = 0, 0
            with suppress(IndexError):
                if self.waiting[0] is message:
                    self.waiting.popleft()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kit", type=Path, help="the kit of the server or of a hospital")
    parser.add_argument("--port", type=int, default=9464, help="on 127.0.0.1 (default: 9464)")
    told = f"with the URL that is told; https, or of this machine (default: the URL in {WEBHOOK})"
    parser.add_argument("--webhook", metavar="FILE", type=Path, help=told)
    parser.add_argument(
        "--disk", type=float, default=DISK, metavar="GB", help=f"report a disk with less free space (default: {DISK:g})"
    )
    parser.add_argument(
        "--beside-server",
        action="store_true",
        help="at a hospital: report only events that the server's own --webhook does not report",
    )
    given = parser.parse_args()
    try:
        if read_kit(given.kit).party == "server" and given.beside_server:
            raise MedsiloError("--beside-server is for a hospital's kit; this is the server's")
        given.webhook = _url(given.webhook)
        running = list[Running]()
        server = Endpoint(given.port, _handler(given.kit, given.disk, running))
    except MedsiloError as error:
        sys.exit(f"medsilo: {error}")
    except OSError as error:
        sys.exit(f"medsilo: port {given.port} can't be listened on ({type(error).__name__}); give another --port")
    if given.webhook:
        messages = Messages(partial(post, given.webhook))
        running.append(Running("watch", Watch(given.kit, given.disk, messages, given.beside_server).look, POLL, STALE))
        running.append(Running("webhook", messages.hand_over, POLL, STALE))
    print(f"listening: http://{HERE}:{server.server_port}/metrics and /healthz; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")


def _url(file: Path | None) -> str:
    """Return the URL of the webhook from a file or from the environment. The URL may contain a secret, so the URL is no
    command line argument, which every account of the machine could read.
    """
    if file and str(file).startswith(("http:", "https:")):
        raise MedsiloError(f"--webhook names a file with the URL, as arguments are seen by all; or set {WEBHOOK}")
    try:
        url = (read_bounded(file, LONGEST_URL).decode() if file else os.environ.get(WEBHOOK, "")).strip()
    except (OSError, ValueError) as error:
        raise MedsiloError(f"--webhook: no file with a URL can be read there ({type(error).__name__})") from error
    if url and not _is_safe(url):
        raise MedsiloError("the webhook's URL must begin with https://: names of hospitals would leave in clear")
    return url


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in (HERE, "localhost"))


if __name__ == "__main__":
    main()
