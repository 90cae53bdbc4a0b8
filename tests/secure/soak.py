"""Disturb a federation over mutual TLS for hours: python -m tests.secure.soak --hours 2 --seed 0.

Studies of the same plan run one after another. The program kills processes, cuts connections, restarts machines and
resumes ended studies.

Every study must end with the tensors of the undisturbed run, and the memory of no server process may grow. The same
seed gives the same events.

Two kinds of studies alternate: jobs that end and are resumed, and a job that survives all events. After the given
hours, the program lets the last study end without further events. At SIGTERM, the program prints its report and ends at
once.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import psutil

from medsilo.core.errors import MedsiloError
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
from tests.secure.relay import Relay
from tests.secure.test_mutual_tls import gathered

POLICY = "teaching-hospital"
BETWEEN = (10, 60)  # rounds between two events
CUT = (2, 45)  # seconds for which a connection is cut
STALLED = 900.0  # seconds without a round after which a job counts as stalled
EVERY = 60.0  # seconds between two measurements of the processes
WARM = 5  # number of measurements of a process before the test checks whether the process grows
LEAST = 12  # after the warm-up, a process needs at least this number of measurements for a verdict
GROWTH = 50.0  # the memory of a process may grow by at most this number of MB
LEAK = 3  # a process may gain at most this number of file handles or threads
LOST = "participation.when_missing"
GENTLE = ("trainer killed", "line cut", "line silent", "all lines cut", "site rebooted")
ROUGH = (*GENTLE, "site's job killed", "server's job killed", "server rebooted", "server stopped")


@dataclass(frozen=True)
class Event:
    after: int
    kind: str
    site: str
    seconds: float


def events(
    seed: int, lap: int, sites: Sequence[str], only: str | None = None, between: Sequence[int] = BETWEEN
) -> Iterator[Event]:
    dice = random.Random(f"{seed}/{lap}")
    kinds = (only,) if only else ROUGH if lap % 2 == 0 else GENTLE
    while True:
        yield Event(dice.randint(*between), dice.choice(kinds), dice.choice(sites), round(dice.uniform(*CUT), 1))


@dataclass(frozen=True)
class CaseFacts:
    minute: float
    lap: int
    party: str
    kind: str
    pid: int
    rss: float  # MB
    handles: int
    threads: int


@dataclass
class Curve:
    path: Path
    looks: list[CaseFacts] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def look(self, consortium: Consortium, lap: int) -> None:
        minute = round((time.monotonic() - self.started) / 60, 2)
        new = []
        for party in [SERVER, *consortium.hospitals]:
            try:
                family = consortium.family(party)
            except psutil.Error:
                continue
            for process in family:
                try:
                    with process.oneshot():
                        rss = round(process.memory_info().rss / 1e6, 1)
                        kind = kind_of(process.cmdline())
                        new.append(
                            CaseFacts(
                                minute, lap, party, kind, process.pid, rss, process.num_fds(), process.num_threads()
                            )
                        )
                except psutil.Error:
                    continue
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(CaseFacts)])
            if is_new:
                writer.writeheader()
            writer.writerows(asdict(look) for look in new)
        self.looks += new


def kind_of(command: Sequence[str]) -> str:
    kinds = {"runner_process": "job", "worker_process": "job", "process.worker": "trainer"}
    return next((kind for word, kind in kinds.items() if any(word in part for part in command)), "parent")


@dataclass(frozen=True)
class Growth:
    party: str
    kind: str
    pid: int
    minutes: float
    rss: float
    handles: float
    threads: float

    @property
    def leaks(self) -> bool:
        return self.rss > GROWTH or self.handles > LEAK or self.threads > LEAK


def growths(looks: Sequence[CaseFacts]) -> list[Growth]:
    """Return the growth of each process with enough measurements. The function leaves out the warm-up, and compares the
    first and the last quarter of the remaining measurements.

    For memory, the function compares the median of the first quarter with the median of the last quarter. For handles
    and threads, the function compares the quarters' minima, because thread pools vary with the work.
    """
    lives: dict[tuple[str, str, int], list[CaseFacts]] = {}
    for look in looks:
        lives.setdefault((look.party, look.kind, look.pid), []).append(look)
    found = []
    for (party, kind, pid), life in lives.items():
        warm = life[WARM:]
        part = len(warm) // 4
        if len(warm) < LEAST:
            continue
        gained = {
            name: of_quarter(getattr(look, name) for look in warm[-part:])
            - of_quarter(getattr(look, name) for look in warm[:part])
            for name, of_quarter in (("rss", statistics.median), ("handles", min), ("threads", min))
        }
        found.append(Growth(party, kind, pid, round(life[-1].minute - life[0].minute, 1), **gained))
    return found


class Soak:
    def __init__(
        self, folder: Path, seed: int, rounds: int, hours: float, lines: ExitStack, when_missing: str = "wait"
    ) -> None:
        self.folder, self.seed, self.seconds = folder, seed, hours * 3600
        changes = [f"training.rounds={rounds}", f"{LOST}={when_missing}", "participation.timeout=300"]
        if when_missing == "continue":
            changes.append(f"participation.minimum={len(SITES) - 1}")
        self.plan = make_plan("fedbn", *changes, sites=SITES)
        inprocess.run(self.plan, folder=folder / "undisturbed")
        self.consortium = Consortium(folder, dict.fromkeys(SITES, POLICY))
        self.relays = {site: lines.enter_context(Relay(self.consortium.port)) for site in SITES}
        for site, relay in self.relays.items():
            relay.take_in(self.consortium.kit(site) / "startup")
        lines.callback(self.consortium.stop)
        self.consortium.start()
        self.curve = Curve(folder / "curve.csv")
        self.lap = 0
        self.done: dict[str, int] = {}
        self.job = ""
        self.kit = self.consortium.kit(LEAD)

    def say(self, words: str) -> None:
        print(f"{(time.monotonic() - self.curve.started) / 60:7.1f} min  lap {self.lap}: {words}", flush=True)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.curve.started > self.seconds

    # ------------------------------------------------------------------ jobs
    def status(self) -> str:
        return self.patiently(lambda: lead.status(self.kit, self.job).jobs[0].status)

    def patiently(self, work: Callable[[], str]) -> str:
        deadline = time.monotonic() + STALLED
        while True:
            try:
                return work()
            except MedsiloError as error:
                if time.monotonic() > deadline:
                    raise
                self.say(f"again: {error}")
                time.sleep(5)

    def go_on(self) -> None:
        if not self.status().startswith("FINISHED"):
            self.patiently(lambda: lead.cancel(self.job, self.kit, lambda line: None))
        self.job = self.patiently(lambda: lead.resume(self.job, self.kit, lambda line: None))
        self.done["resumed"] = self.done.get("resumed", 0) + 1

    # ------------------------------------------------------------------ events
    def do(self, event: Event) -> None:
        self.say(f"{event.kind} ({event.site}, {event.seconds:g} s)")
        self.done[event.kind] = self.done.get(event.kind, 0) + 1
        consortium, site = self.consortium, event.site
        if event.kind == "trainer killed":
            self.kill(site, "federation.process.worker")
        elif event.kind == "line cut":
            self.cut([site], event.seconds)
        elif event.kind == "line silent":
            self.relays[site].hush()
            time.sleep(event.seconds)
            self.relays[site].speak()
        elif event.kind == "all lines cut":
            self.cut(SITES, event.seconds)
        elif event.kind == "site's job killed":
            self.kill(site, "worker_process")
        elif event.kind == "server's job killed":
            self.kill(SERVER, "runner_process")
        elif event.kind == "site rebooted":
            consortium.kill(site)
            time.sleep(event.seconds)
            before = len(consortium.log(site))
            consortium.start_party(site)
            wait_until(lambda: REGISTERED in consortium.log(site)[before:], STALLED, f"{site} to register")
        else:
            if event.kind == "server rebooted":
                consortium.kill(SERVER)
            else:
                consortium.end(consortium.processes[SERVER])
            time.sleep(event.seconds)
            consortium.start_party(SERVER)
            consortium.await_hospitals()
        if event.kind not in GENTLE:
            self.go_on()

    def kill(self, party: str, word: str) -> None:
        for process in self.consortium.family(party, word):
            if process.is_running():
                process.kill()

    def cut(self, sites: Sequence[str], seconds: float) -> None:
        for site in sites:
            self.relays[site].cut()
        time.sleep(seconds)
        for site in sites:
            self.relays[site].mend()

    # ------------------------------------------------------------------ laps
    def run_lap(self, lap: int, only: str | None, between: Sequence[int]) -> None:
        self.lap = lap
        study = f"lap-{lap}"
        write_job(self.folder / "jobs" / study, self.plan, study=study)
        self.job = self.patiently(lambda: lead.submit(self.folder / "jobs" / study, self.kit, lambda line: None))
        record = Record(self.consortium.kit(SERVER) / "medsilo" / study)
        drawn = events(self.seed, lap, SITES, only, between)
        event, at, heard = next(drawn), 0, time.monotonic()
        seen, over = 0, 0.0
        while (summary := record.summary()) is None or not summary.finished:
            rounds = len(record.rounds())
            if rounds != seen:
                seen, heard = rounds, time.monotonic()
                if over and len(record.rounds()[-1].answered) == len(SITES):
                    self.say(f"a round of all {heard - over:.1f} s later")
                    over = 0.0
            if rounds >= at + event.after and not self.is_over:
                self.do(event)
                event, at, heard = next(drawn), len(record.rounds()), time.monotonic()
                seen, over = at, heard
            elif time.monotonic() - heard > STALLED or (summary is not None and self.status().startswith("FINISHED")):
                self.say(f"stalled in round {rounds + 1}: {summary.reason if summary else 'no reason'}")
                self.done["stalled"] = self.done.get("stalled", 0) + 1
                self.go_on()
                heard = time.monotonic()
            time.sleep(1)
        wait_until(lambda: self.status().startswith("FINISHED"), STALLED, "the job's end")
        if missed := sum(len(line.lost | line.refused) for line in record.rounds()):
            return self.say(f"{self.plan.rounds} rounds, {missed} answers missed")
        outcome = gathered(self.consortium, study, SITES, self.folder / "outcome")
        assert_same_outcome(self.folder / "undisturbed", outcome)
        shutil.rmtree(outcome)
        self.say(f"{self.plan.rounds} rounds, the undisturbed run's tensors")

    def watch(self, over: threading.Event) -> None:
        while not over.wait(EVERY):
            self.curve.look(self.consortium, self.lap)

    def report(self) -> bool:
        print("\nevents:", ", ".join(f"{many} x {kind}" for kind, many in sorted(self.done.items())))
        print(f"\n{'party':12} {'process':8} {'minutes':>7} {'MB':>7} {'handles':>8} {'threads':>8}")
        grown = growths(self.curve.looks)
        for one in grown:
            told = f"{one.minutes:7.1f} {one.rss:+7.1f} {one.handles:+8.1f} {one.threads:+8.1f}"
            print(f"{one.party:12} {one.kind:8} {told}{'  LEAKS' if one.leaks else ''}")
        return not any(one.leaks for one in grown if one.party == SERVER)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=600, help="of one lap")
    parser.add_argument("--only", choices=ROUGH, help="nothing else happens")
    parser.add_argument(
        "--between", type=int, nargs=2, default=BETWEEN, help="number of rounds from one event to the next"
    )
    parser.add_argument("--when", choices=("wait", "continue", "stop"), default="wait", help=LOST)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))
    over, laps = threading.Event(), 0
    with ExitStack() as lines:
        soak = Soak(asked.folder.resolve(), asked.seed, asked.rounds, asked.hours, lines, asked.when)
        watching = threading.Thread(target=soak.watch, args=(over,), daemon=True)
        watching.start()
        try:
            while not soak.is_over:
                soak.run_lap(laps, asked.only, asked.between)
                laps += 1
        finally:
            over.set()
            watching.join()
            as_before = soak.report()
    print(f"\n{laps} laps of {asked.rounds} rounds, each with the tensors of the undisturbed run; seed {asked.seed}")
    return 0 if as_before else 1


if __name__ == "__main__":
    sys.exit(main())
