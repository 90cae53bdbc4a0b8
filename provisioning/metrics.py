"""Numbers of a server or a hospital for Prometheus, probes and people: python provisioning/metrics.py KIT

/metrics has numbers in Prometheus's text form, /healthz says whether the party is up, both on 127.0.0.1 alone. With
--webhook a URL gets {"text": ...} when a study ends or fails, a hospital is away, back or refused, no round ends, a
certificate or the disk runs out, or the party is not up. It reads the kit's files, takes no part in studies, and needs
medsilo[metrics]. grafana.json is a dashboard for it, alerts.yaml has rules for Prometheus.
"""

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Full, Queue
from statistics import median
from threading import Lock, Thread
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import psutil
from cryptography import x509
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from medsilo.check.at_home import KitAtHome
from medsilo.check.kit import SOON, Kit, read_kit, trouble
from medsilo.check.spending import spent
from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_text
from medsilo.flare.leftovers import command_lines, studies_of
from medsilo.runs import event_reading, events, paths
from medsilo.runs.progress import read_now
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round, Turns
from medsilo.site.ledger import ledgers
from medsilo_page.watching import studies

T = TypeVar("T")
Sample = tuple[str, dict[str, str], float | None]
LOOK = 10.0  # seconds between two looks for trouble
FRESH = 1.0  # seconds for which what was found is handed out
PAUSE, LONGEST = 5.0, 60.0  # seconds until a webhook gets a message again that it did not take; twice as many each time
UNCLEAR = 3  # times that a message is sent at most to a webhook that does not answer, and may have taken it
AHEAD = 60.0  # seconds that a file of a study may be newer than now
MOST = 1000  # messages that wait for a webhook
TOLD = ".metrics-told"  # in the kit: the last line of its events that a webhook was told
STILL, USUAL = 600.0, 5  # seconds without a round, or so many usual rounds if they are longer, until it is trouble
DISK = 10.0  # GB that are to be free
Trouble = dict[tuple[str, str], str]  # what is wrong, with whom or what → in words
HERE = "127.0.0.1"
LATELY = 30 * 86_400.0  # seconds since a study changed, from where on it is told no more
HELP = {
    "up": "1 if the server listens, or the site is connected",
    "site_connected": "1 if a hospital is connected to the server, or the server to this hospital",
    "trouble": "1 while something needs somebody: down, certificate, disk, events, clock, standstill",
    "certificate_end_timestamp_seconds": "when the first certificate of the kit ends",
    "memory_bytes": "held by the processes of this kit",
    "disk_free_bytes": "where studies are kept",
    "studies": "changed in the last 30 days, by state: running, finished, failed, cancelled or stopped",
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


def samples(kit: Path, disk: float = DISK) -> Iterator[Sample]:
    """Yield all that can be read at the moment; what can't is counted."""
    party, unreadable = read_kit(kit), 0
    folder = studies_of(kit)
    up = trouble(party) is None  # looks at all processes, so it is asked once
    yield "up", {"party": party.name}, up
    for name, here in event_reading.connected(kit).items():
        yield "site_connected", {"site": name}, here and up
    yield "certificate_end_timestamp_seconds", {}, _end(party)
    for what, about in troubles(kit, disk):
        yield "trouble", {"what": what, "about": about}, 1
    yield "memory_bytes", {}, _memory(kit)
    if folder.is_dir():
        yield "disk_free_bytes", {}, shutil.disk_usage(folder).free
    parts: list[Callable[[], Iterator[Sample]]] = []
    if party.party == "server":
        lines, fates = command_lines(), event_reading.fates(kit)
        parts = [partial(_of_run, run, lines, fates) for run in _runs(folder)]
    else:
        parts = [partial(_of_site, kit, party.name), partial(_of_hospital, kit)]
    for part in parts:
        try:
            yield from list(part())
        except (MedsiloError, OSError, ValueError):  # it is being written, or damaged
            unreadable += 1
    yield "unreadable", {}, unreadable


def _end(party: Kit) -> float | None:
    """Return when the first of the kit's certificate and its root ends."""
    try:
        files = [(party.folder / name).read_bytes() for name in (party.certificate, party.root)]
        return min(x509.load_pem_x509_certificate(file).not_valid_after_utc for file in files).timestamp()
    except (OSError, ValueError):
        return None  # `medsilo check --kit` says what is wrong with it


def _runs(folder: Path) -> list[Path]:
    """Return the server's studies that changed lately."""
    found = sorted(path.parent for path in folder.glob(f"*/{paths.PLAN}"))
    return [run for run in found if time.time() - _changed(run) < LATELY]


def _changed(run: Path) -> float:
    """Return when a study was last heard of, also before its first round."""
    told = (run / name for name in (paths.PLAN, paths.ROUNDS, paths.NOW))
    return max(path.stat().st_mtime for path in told if path.exists())


def _state(run: Path, lines: str, fates: Mapping[str, str]) -> str:
    """Return how a study of the server is. fates: of jobs, as events.log has them.

    lines: of commands that run; that of the job's process names the job.
    """
    jobs = (run / paths.JOBS).read_text("utf-8").split() if (run / paths.JOBS).exists() else []
    if jobs and jobs[-1] in lines:
        return "running"
    status = read_summary(run).status if (run / paths.SUMMARY).exists() else "stopped"
    return "cancelled" if status == "failed" and jobs and fates.get(jobs[-1]) == "ended" else status


def troubles(kit: Path, disk: float = DISK, now: float | None = None) -> Trouble:
    """Return what needs somebody at this party. disk: GB that are to be free."""
    now, party, folder = now or time.time(), read_kit(kit), studies_of(kit)
    found: Trouble = {}
    if why := trouble(party):
        found["down", party.name] = f"{party.name} is not up: {why}"
    end = _end(party)
    if end is not None and end - now < SOON.total_seconds():
        day = datetime.fromtimestamp(end, UTC)
        found["certificate", party.name] = f"a certificate of {party.name} ends on {day:%Y-%m-%d}; renew its kit"
    for where in (folder, kit, *_temporary(kit)):
        if where.is_dir() and (told := _short(where, disk, where == folder)):
            found["disk", party.name] = f"{told} of {party.name}; see medsilo prune"
    log = kit / events.NAME
    if not os.access(log if log.exists() else kit, os.W_OK):
        found["events", party.name] = f"{log} of {party.name} can't be written: nobody is told of events"
    lines = command_lines() if party.party == "server" else ""
    for run in _runs(folder) if lines else ():
        with suppress(MedsiloError, OSError, ValueError):
            if _state(run, lines, {}) != "running":
                continue
            if (ahead := _changed(run) - now) > AHEAD:
                told = f"the clock of {party.name} was set back, for {run.name} by {ahead / 60:.0f} min; set it right"
                found["clock", party.name] = told
            elif still := standstill(run, now):
                found["standstill", run.name] = f"no round of {run.name} ended for {still / 60:.0f} min"
    return found


def standstill(run: Path, now: float) -> float | None:
    """Return for how many seconds no round has ended, where these are too many."""
    usual = [line.seconds for line in _rounds(run)[-20:] if line.seconds]
    told = (run / name for name in (paths.PLAN, paths.JOBS, paths.ROUNDS))  # a job that goes on adds itself to JOBS
    since = max(path.stat().st_mtime for path in told if path.exists())
    return now - since if now - since > max(STILL, USUAL * median(usual or [0.0])) else None


def _rounds(run: Path) -> list[Round]:
    return read_rounds(run, growing=True) if (run / paths.ROUNDS).exists() else []


def _heard(run: Path, rounds: list[Round], turns: Turns | None) -> Iterator[tuple[str, float]]:
    """Yield when each site was last heard in a study that runs: by its turn, or by the last round that it answered."""
    at = (run / paths.ROUNDS).stat().st_mtime if rounds else 0.0
    heard: dict[str, float] = {}
    for line in reversed(rounds):
        heard |= {site: at for site in line.answered if site not in heard}
        at -= line.seconds or 0.0
    for site, turn in turns.sites.items() if turns else ():
        if turn.asked is not None:  # who has not answered yet was heard before it was asked
            told = turns.at - turn.asked + (turn.answered or 0.0)
            heard[site] = told if turn.answered is not None else heard.get(site, told)
    yield from heard.items()


def _of_run(run: Path, lines: str, fates: Mapping[str, str]) -> Iterator[Sample]:
    own, rounds = {"study": run.name}, _rounds(run)
    state = _state(run, lines, fates)
    yield "studies", own | {"state": state}, 1
    yield "rounds", own, len(rounds)
    yield "round_seconds", own, rounds[-1].seconds if rounds else None
    yield "changed_timestamp_seconds", own, _changed(run)
    for site in sorted({site for line in rounds for site in line.asked}):
        given = [line.sites[site] for line in rounds if site in line.sites]
        told = own | {"site": site}
        yield "site_answered_rounds", told, len(given)
        yield "site_missed_rounds", told, sum(line.absence(site) is not None for line in rounds)
        yield "site_round", told, max((line.round for line in rounds if site in line.sites), default=0)
        yield "site_seconds", told, sum(line.seconds for line in given)
        yield "site_memory_bytes", told, max((line.memory or 0 for line in given), default=0)
        yield "site_bytes", told | {"direction": "up"}, sum(line.bytes_up for line in given)
        yield "site_bytes", told | {"direction": "down"}, sum(line.bytes_down for line in given)
    for site, at in _heard(run, rounds, read_now(Turns, run)) if state == "running" else ():
        yield "site_heard_timestamp_seconds", own | {"site": site}, at


def _of_site(kit: Path, site: str) -> Iterator[Sample]:
    jobs, lines = event_reading.jobs(kit), command_lines()
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
    for data in ledgers(home.book.folder, home.kit.folder.parent):
        found = spent(home.ledger(data), home.settings.privacy)
        known = found["allowed"] is not None and found["epsilon"] is not None
        yield "epsilon_left", {"data": data}, found["allowed"] - found["epsilon"] if known else None


def _processes(kit: Path) -> Iterator[psutil.Process]:
    """Yield the processes that were started with this kit."""
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        if process.pid != os.getpid() and any(str(kit.resolve()) in word for word in process.info["cmdline"] or ()):
            yield process


def _memory(kit: Path) -> int:
    return sum(process.info["memory_info"].rss for process in _processes(kit) if process.info["memory_info"])


def _short(where: Path, disk: float, studies: bool) -> str | None:
    """Return what is free, where that is too little: fewer GB than disk, or elsewhere a tenth, if that is less."""
    usage = shutil.disk_usage(where)
    least = disk * 1e9 if studies else min(disk * 1e9, usage.total / 10)
    return f"{usage.free / 1e9:.1f} GB are free in {where}" if usage.free < least else None


def _temporary(kit: Path) -> set[Path]:
    """Return the folders for temporary files of a kit's processes: jobs and answers on their way lie there."""
    found = set[Path]()
    for process in _processes(kit):
        with suppress(psutil.Error):  # of another account, or gone
            found.add(Path(process.environ().get("TMPDIR") or "/tmp"))
    return found


class Samples(Collector):
    """Hands the samples of a moment to prometheus-client."""

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
    """Return samples in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(Samples(found))
    return generate_latest(registry).decode()


class Fresh(Generic[T]):
    """What one look finds, for all who ask within FRESH seconds: however many ask, one looks at a time."""

    def __init__(self, look: Callable[[], T]) -> None:
        self.look, self.lock = look, Lock()
        self.found: tuple[float, T] | None = None

    def __call__(self) -> T:
        with self.lock:
            if self.found is None or time.monotonic() - self.found[0] > FRESH:
                found = self.look()
                self.found = time.monotonic(), found
            return self.found[1]


def _handler(kit: Path, disk: float) -> type[BaseHTTPRequestHandler]:
    numbers = Fresh(lambda: as_text(samples(kit, disk)))
    health = Fresh(lambda: trouble(read_kit(kit)))

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                if self.path == "/metrics":
                    self._send(200, numbers(), CONTENT_TYPE_LATEST)
                elif self.path == "/healthz":
                    wrong = health()
                    self._send(503 if wrong else 200, f"{wrong or 'ok'}\n")
                else:
                    self._send(404, "there are /metrics and /healthz\n")
            except MedsiloError as error:  # the kit is gone, or damaged
                self._send(503, f"{error}\n")

        def _send(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
            with suppress(ConnectionError):  # who asked waits no more
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: Prometheus asks every few seconds."""

    return Answer


class Troubles:
    """Says once what is wrong and once that it no longer is."""

    def __init__(self, look: Callable[[], Trouble]) -> None:
        self.look, self.known = look, Trouble()

    def news(self) -> list[str]:
        """Return what is new since the last look, in lines."""
        found = self.look()
        new = [f"medsilo: {text}" for key, text in found.items() if key not in self.known]
        gone = [f"medsilo: no longer: {text}" for key, text in self.known.items() if key not in found]
        self.known = found
        return new + gone


def _watch(kit: Path, disk: float, tell: Callable[[str], None]) -> None:
    found = Troubles(partial(troubles, kit, disk))
    while True:
        try:
            for text in found.news():
                tell(text)
        except (MedsiloError, OSError, ValueError) as error:  # a file that is being written
            print(f"medsilo: this look failed: {type(error).__name__}", file=sys.stderr, flush=True)
        time.sleep(LOOK)


def _pass_on(kit: Path, tell: Callable[[str, Callable[[], None]], None]) -> None:
    """Tell lines of the kit that somebody is to know of at once, and those of while this program did not run."""
    last = kit / TOLD
    told = last.read_text("utf-8") if last.is_file() else None
    if told is None:
        _keep(last, next(reversed(list(event_reading.read(kit))), ""))
    for line in event_reading.follow(kit, after=told):
        columns = event_reading.columns_of(line)
        if columns and (columns[1] == "WARNING" or columns[2] in ("back", *event_reading.LAST)):
            tell(f"medsilo: {event_reading.shown(line)}", partial(_keep, last, line))


def _keep(last: Path, line: str) -> None:
    """Keep the last line that was told."""
    try:
        write_text(last, line)
    except OSError as error:
        print(f"medsilo: {last.name} can't be written: {type(error).__name__}", file=sys.stderr, flush=True)


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *told: object) -> None:
        """Follow none: what was posted would be lost, and the address is the receiver's choice."""


def post(url: str, text: str) -> None:
    """Send a line to a webhook. Raises URLError where it was not taken, and others where that is unclear."""
    asked = urllib.request.Request(url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})
    urllib.request.build_opener(_Here).open(asked, timeout=10).close()


class Messages:
    """Hands lines to a webhook in their order, each again until it is taken."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send, self.waiting = send, Queue[tuple[float, str, Callable[[], None]]](MOST)

    def add(self, text: str, then: Callable[[], None] = lambda: None) -> None:
        """Take a line; the work goes on. then: is called when it was sent."""
        try:
            self.waiting.put_nowait((time.monotonic(), text, then))
        except Full:
            print(f"medsilo: {MOST} messages wait for the webhook, so it is not told: {text}", file=sys.stderr)

    def hand_over(self) -> None:
        """Send what was added, without end."""
        while True:
            at, text, then = self.waiting.get()
            self._send(at, text)
            then()

    def _send(self, at: float, text: str) -> None:
        tries, unclear, pause = 0, 0, PAUSE
        while unclear < UNCLEAR:
            late = (time.monotonic() - at) / 60
            try:
                return self.send(f"{text} (told {late:.0f} min late)" if late >= 1 else text)
            except (OSError, HTTPException) as error:
                unclear += not isinstance(error, urllib.error.URLError)  # a receiver that hangs may have taken it
                if (tries := tries + 1) == 1:
                    why = f"{getattr(error, 'code', '')} {type(error).__name__}".strip()
                    print(f"medsilo: the webhook did not take {text!r}: {why}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kit", type=Path, help="of the server or of a hospital")
    parser.add_argument("--port", type=int, default=9464, help="on 127.0.0.1 (default: 9464)")
    parser.add_argument("--webhook", metavar="URL", help="that is told; https, or of this machine")
    parser.add_argument(
        "--disk", type=float, default=DISK, metavar="GB", help=f"that are to be free (default: {DISK:g})"
    )
    given = parser.parse_args()
    try:
        read_kit(given.kit)
        if given.webhook and not _is_safe(given.webhook):
            raise MedsiloError("--webhook must begin with https://: names of hospitals would leave in clear")
        server = ThreadingHTTPServer((HERE, given.port), _handler(given.kit, given.disk))
    except MedsiloError as error:
        sys.exit(f"medsilo: {error}")
    except OSError as error:
        sys.exit(f"medsilo: port {given.port} can't be listened on ({type(error).__name__}); give another --port")
    if given.webhook:
        messages = Messages(partial(post, given.webhook))
        Thread(target=messages.hand_over, daemon=True).start()
        Thread(target=_watch, args=(given.kit, given.disk, messages.add), daemon=True).start()
        Thread(target=_pass_on, args=(given.kit, messages.add), daemon=True).start()
    print(f"listening: http://{HERE}:{server.server_port}/metrics and /healthz; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in (HERE, "localhost"))


if __name__ == "__main__":
    main()
