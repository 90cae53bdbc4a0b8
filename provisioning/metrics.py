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
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from urllib.parse import urlsplit

import psutil
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from medsilo.check.at_home import KitAtHome
from medsilo.check.kit import SOON, Kit, end_of, read_kit, trouble
from medsilo.check.spending import spent
from medsilo.core.errors import MedsiloError
from medsilo.flare.leftovers import command_lines, studies_of
from medsilo.runs import event_reading, paths
from medsilo.runs.progress import read_now
from medsilo.runs.reading import read_rounds, read_summary
from medsilo.runs.rounds import Round, Turns
from medsilo.site.ledger import ledgers
from medsilo_page.watching import studies

Sample = tuple[str, dict[str, str], float | None]
LOOK = 10.0  # seconds between two looks for trouble
STILL, USUAL = 600.0, 5  # seconds without a round, or so many usual rounds if they are longer, until it is trouble
DISK = 10.0  # GB that are to be free
Trouble = dict[tuple[str, str], str]  # what is wrong, with whom or what → in words
HERE = "127.0.0.1"
LATELY = 30 * 86_400.0  # seconds since a study changed, from where on it is told no more
HELP = {
    "up": "1 if the server listens, or the site is connected",
    "site_connected": "1 if a hospital is connected to the server, or the server to this hospital",
    "trouble": "1 while something needs somebody: down, certificate, disk, standstill",
    "certificate_end_timestamp_seconds": "when the first certificate of the kit ends",
    "memory_bytes": "held by the processes of this kit",
    "disk_free_bytes": "where studies are kept",
    "studies": "changed in the last 30 days, by state: running, finished, failed, or stopped without an outcome",
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
    yield "memory_bytes", {}, _memory(str(kit.resolve()))
    if folder.is_dir():
        yield "disk_free_bytes", {}, shutil.disk_usage(folder).free
    parts: list[Callable[[], Iterator[Sample]]] = []
    if party.party == "server":
        lines = command_lines()
        parts = [partial(_of_run, run, lines) for run in _runs(folder)]
    else:
        parts = [partial(_of_site, kit, party.name), partial(_of_hospital, kit)]
    for part in parts:
        try:
            yield from list(part())
        except (MedsiloError, OSError, ValueError):  # it is being written, or damaged
            unreadable += 1
    yield "unreadable", {}, unreadable


def _end(party: Kit) -> float | None:
    try:
        return end_of(party).timestamp()
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


def _state(run: Path, lines: str) -> str:
    """Return how a study of the server is. lines: of commands that run; that of the job's process names the job."""
    jobs = (run / paths.JOBS).read_text("utf-8").split() if (run / paths.JOBS).exists() else []
    if jobs and jobs[-1] in lines:
        return "running"
    return read_summary(run).status if (run / paths.SUMMARY).exists() else "stopped"


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
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < disk * 1e9:
        told = f"{free / 1e9:.1f} GB are free for studies at {party.name}, fewer than {disk:g}; see medsilo prune"
        found["disk", party.name] = told
    lines = command_lines() if party.party == "server" else ""
    for run in _runs(folder) if lines else ():
        with suppress(MedsiloError, OSError, ValueError):
            if _state(run, lines) == "running" and (still := standstill(run, now)):
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


def _of_run(run: Path, lines: str) -> Iterator[Sample]:
    own, rounds = {"study": run.name}, _rounds(run)
    state = _state(run, lines)
    yield "studies", own | {"state": state}, 1
    yield "rounds", own, len(rounds)
    yield "round_seconds", own, rounds[-1].seconds if rounds else None
    yield "changed_timestamp_seconds", own, _changed(run)
    for site in sorted({site for line in rounds for site in line.asked}):
        lines = [line.sites[site] for line in rounds if site in line.sites]
        told = own | {"site": site}
        yield "site_answered_rounds", told, len(lines)
        yield "site_missed_rounds", told, sum(line.absence(site) is not None for line in rounds)
        yield "site_round", told, max((line.round for line in rounds if site in line.sites), default=0)
        yield "site_seconds", told, sum(line.seconds for line in lines)
        yield "site_memory_bytes", told, max((line.memory or 0 for line in lines), default=0)
        yield "site_bytes", told | {"direction": "up"}, sum(line.bytes_up for line in lines)
        yield "site_bytes", told | {"direction": "down"}, sum(line.bytes_down for line in lines)
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
        yield "epsilon_left", {"data": data}, spent(home.ledger(data), home.settings.privacy).left


def _memory(kit: str) -> int:
    """Return the bytes of all processes that were started with this kit."""
    found = psutil.process_iter(["cmdline", "memory_info"])
    others = (process.info for process in found if process.pid != os.getpid())
    own = [info for info in others if any(kit in word for word in info["cmdline"] or ())]
    return sum(info["memory_info"].rss for info in own if info["memory_info"])


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


def _handler(kit: Path, disk: float) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, as_text(samples(kit, disk)), CONTENT_TYPE_LATEST)
            elif self.path == "/healthz":
                wrong = trouble(read_kit(kit))
                self._send(503 if wrong else 200, f"{wrong or 'ok'}\n")
            else:
                self._send(404, "there are /metrics and /healthz\n")

        def _send(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
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


def _pass_on(kit: Path, tell: Callable[[str], None]) -> None:
    for line in event_reading.follow(kit):
        if event_reading.is_news(line):
            tell(f"medsilo: {event_reading.shown(line)}")


def post(url: str, text: str) -> None:
    """Send a line to a webhook; what fails is a line here, and no more."""
    headers = {"Content-Type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps({"text": text}).encode(), headers), timeout=10)
    except (urllib.error.URLError, OSError) as error:
        print(f"medsilo: the webhook did not take {text!r}: {type(error).__name__}", file=sys.stderr, flush=True)


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
        tell = partial(post, given.webhook)
        Thread(target=_watch, args=(given.kit, given.disk, tell), daemon=True).start()
        Thread(target=_pass_on, args=(given.kit, tell), daemon=True).start()
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
