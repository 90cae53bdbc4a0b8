"""Numbers of a server or a hospital for Prometheus, probes and people: python provisioning/metrics.py KIT

/metrics has numbers in Prometheus's text form, /healthz says whether the party is up, both on 127.0.0.1 alone. With
--webhook, at the server, a URL gets {"text": ...} when a hospital misses a round and when it is back. It reads the
kit's files, takes no part in studies, and needs this package beside it; grafana.json is a dashboard for it.
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
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import psutil

from medsilo.check.at_home import KitAtHome
from medsilo.check.kit import read_kit, trouble
from medsilo.check.spending import spent
from medsilo.core.errors import MedsiloError
from medsilo.flare.leftovers import studies_of
from medsilo.runs import paths
from medsilo.runs.reading import read_now, read_rounds, read_summary
from medsilo.runs.schema import Turns
from medsilo.runs.watching import studies
from medsilo.site.ledger import ledgers

Sample = tuple[str, dict[str, str], float | None]
LOOK = 10.0  # seconds between two looks for hospitals that fall out
HERE = "127.0.0.1"
LATELY = 30 * 86_400.0  # seconds since a study changed, from where on it is told no more
HELP = {
    "up": "1 if the server listens, or the site is connected",
    "memory_bytes": "held by the processes of this kit",
    "disk_free_bytes": "where studies are kept",
    "studies": "changed in the last 30 days, by state",
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


def samples(kit: Path) -> Iterator[Sample]:
    """Yield all that can be read at the moment; what can't is counted."""
    party, unreadable = read_kit(kit), 0
    folder = studies_of(kit)
    yield "up", {"party": party.name}, trouble(party) is None
    yield "memory_bytes", {}, _memory(str(kit.resolve()))
    if folder.is_dir():
        yield "disk_free_bytes", {}, shutil.disk_usage(folder).free
    parts: list[Callable[[], Iterator[Sample]]] = []
    if party.party == "server":
        runs = [path.parent for path in folder.glob(f"*/{paths.PLAN}") if _lately(path.parent / paths.ROUNDS)]
        parts = [partial(_of_run, run) for run in sorted(runs)]
    else:
        parts = [partial(_of_site, kit, party.name), partial(_of_hospital, kit)]
    for part in parts:
        try:
            yield from list(part())
        except (MedsiloError, OSError, ValueError):  # it is being written, or damaged
            unreadable += 1
    yield "unreadable", {}, unreadable


def _lately(path: Path) -> bool:
    return path.exists() and time.time() - path.stat().st_mtime < LATELY


def _of_run(run: Path) -> Iterator[Sample]:
    own, rounds, turns = {"study": run.name}, read_rounds(run, growing=True), read_now(Turns, run)
    ended = (run / paths.SUMMARY).exists() and turns is None
    yield "studies", own | {"state": read_summary(run).status if ended else "running"}, 1
    yield "rounds", own, len(rounds)
    yield "round_seconds", own, rounds[-1].seconds if rounds else None
    yield "changed_timestamp_seconds", own, (run / paths.ROUNDS).stat().st_mtime
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
    for site, turn in turns.sites.items() if turns else ():
        if turn.asked is not None and turn.answered is not None:
            yield "site_heard_timestamp_seconds", own | {"site": site}, turns.at - turn.asked + turn.answered


def _of_site(kit: Path, site: str) -> Iterator[Sample]:
    for study in studies(studies_of(kit), site):
        if time.time() - study.last > LATELY:
            continue
        own = {"study": study.name, "site": site}
        state = "finished" if study.ended else "stopped" if study.stopped else "running"
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


def as_text(found: Iterator[Sample]) -> str:
    """Return samples in Prometheus's text format."""
    lines: dict[str, list[str]] = {}
    for name, labels, value in found:
        if value is not None:
            told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.setdefault(name, []).append(f"medsilo_{name}{{{told}}} {float(value)}")
    heads = {name: f"# HELP medsilo_{name} {HELP[name]}\n# TYPE medsilo_{name} gauge" for name in lines}
    return "".join(f"{heads[name]}\n" + "\n".join(own) + "\n" for name, own in lines.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(kit: Path) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, as_text(samples(kit)))
            elif self.path == "/healthz":
                wrong = trouble(read_kit(kit))
                self._send(503 if wrong else 200, f"{wrong or 'ok'}\n")
            else:
                self._send(404, "there are /metrics and /healthz\n")

        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: Prometheus asks every few seconds."""

    return Answer


class Absences:
    """Return who has fallen out of which study, as far as was told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known, self.out = folder, dict[str, int](), set[tuple[str, str]]()

    def news(self) -> list[str]:
        """Return what is new since the last look, in lines; of a study that is first seen, nothing."""
        told = []
        for path in sorted(self.folder.glob(f"*/{paths.ROUNDS}")):
            study = path.parent.name
            try:
                rounds = read_rounds(path.parent, growing=True)
            except MedsiloError:
                continue
            for line in rounds[self.known.setdefault(study, len(rounds)) :]:
                for site in line.asked:
                    reason, was_out = line.absence(site), (study, site) in self.out
                    if reason and not was_out:
                        self.out.add((study, site))
                        told.append(f"medsilo: {site} fell out of {study} in round {line.round}: {reason}")
                    elif was_out and not reason:
                        self.out.remove((study, site))
                        told.append(f"medsilo: {site} is back in {study} in round {line.round}")
            self.known[study] = len(rounds)
        return told


def _watch(folder: Path, tell: Callable[[str], None]) -> None:
    absences = Absences(folder)
    while True:
        for text in absences.news():
            tell(text)
        time.sleep(LOOK)


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
    parser.add_argument("--webhook", metavar="URL", help="at the server; https, or of this machine")
    given = parser.parse_args()
    try:
        party = read_kit(given.kit)
        if given.webhook and not _is_safe(given.webhook):
            raise MedsiloError("--webhook must begin with https://: names of hospitals would leave in clear")
        if given.webhook and party.party != "server":
            raise MedsiloError("only the server knows which hospitals fall out; give --webhook there")
        server = ThreadingHTTPServer((HERE, given.port), _handler(given.kit))
    except MedsiloError as error:
        sys.exit(f"medsilo: {error}")
    except OSError as error:
        sys.exit(f"medsilo: port {given.port} can't be listened on ({type(error).__name__}); give another --port")
    if given.webhook:
        Thread(target=_watch, args=(studies_of(given.kit), partial(post, given.webhook)), daemon=True).start()
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
