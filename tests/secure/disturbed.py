"""The cost of each disturbance, over mutual TLS: python -m tests.secure.disturbed --folder <an empty folder>

For each answer to a missing hospital (`participation.when_missing`) and each disturbance, three hospitals begin a study
of their own, which is disturbed in the middle. A line says how many rounds the hospital missed, how long after the end
of the disturbance the next round of all three ended, and whether the study's tensors are those of the undisturbed run.
What ended is resumed, and the line says why it had ended. --only runs the disturbances with these words in their names.
Under "continue" a study is long enough for a hospital to come back, and ends when it is back, if it missed a round.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.plan import Plan
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.conftest import SITES
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import REGISTERED, SERVER, wait_until
from tests.secure.soak import Event, Soak
from tests.secure.test_mutual_tls import gathered

SITE = SITES[1]
ROUNDS, LONG, AT = 40, 240, 8
MOST = 900.0  # seconds that anything is waited for
WHEN = ("wait", "continue", "stop")
OWN = ("site frozen", "server frozen", "trainer frozen")
CASES = [
    ("trainer killed", 0),
    ("trainer frozen", 20),
    ("line cut", 3),
    ("line cut", 60),
    ("line silent", 3),
    ("line silent", 60),
    ("all lines cut", 20),
    ("site's job killed", 0),
    ("site's parent killed", 7),
    ("site rebooted", 10),
    ("site frozen", 40),
    ("server frozen", 20),
    ("server's job killed", 0),
    ("server rebooted", 10),
    ("server stopped", 10),
]


class Disturbed(Soak):
    """The soak's federation, with disturbances that it has not."""

    def disturb(self, kind: str, seconds: float) -> None:
        """Do one to the federation."""
        if kind == "site's job killed":
            self.kill(SITE, "worker_process")
        elif kind in ("site's parent killed", "site rebooted"):
            self.consortium.kill(SITE) if kind == "site rebooted" else self.consortium.processes[SITE].kill()
            time.sleep(seconds)
            before = len(self.consortium.log(SITE))
            self.consortium.start_party(SITE)
            wait_until(lambda: REGISTERED in self.consortium.log(SITE)[before:], MOST, "the hospital to register")
        elif kind in OWN:
            word = "federation.process.worker" if kind.startswith("trainer") else ""
            family = self.consortium.family(SERVER if kind.startswith("server") else SITE, word)
            for signs in (signal.SIGSTOP, signal.SIGCONT):
                for process in family:
                    process.send_signal(signs)
                time.sleep(seconds if signs == signal.SIGSTOP else 0)
        else:
            self.do(Event(0, kind, SITE, seconds))

    def measure(self, number: int, kind: str, seconds: float) -> str:
        """Return a line of the table."""
        when = self.plan.participation.when_missing
        study, long = f"{when}-{number}", when == "continue" and kind.startswith(("line", "site"))
        plan = self.plan.with_changes([f"training.rounds={LONG}"]) if long and seconds != 3 else self.plan
        write_job(self.folder / "jobs" / study, plan, study=study)
        self.job = self.patiently(lambda: lead.submit(self.folder / "jobs" / study, self.kit, lambda line: None))
        record = Record(self.consortium.kit(SERVER) / "medsilo" / study)
        wait_until(lambda: len(record.rounds()) >= AT, MOST, f"round {AT}")
        started = time.monotonic()
        self.disturb(kind, seconds)
        done, over = len(record.rounds()), time.monotonic()

        def whole() -> bool:
            return any(len(line.answered) == len(SITES) for line in record.rounds()[done:])

        reasons = self.until(whole, record, "a round of all")
        after = time.monotonic() - over
        missed = sum(len(line.lost | line.refused) for line in record.rounds())
        if missed and plan.rounds == LONG:
            lead.cancel(self.job, self.kit, print)
        else:
            reasons += self.until(lambda: is_finished(record), record, "the study's end")
        wait_until(lambda: self.status().startswith("FINISHED"), MOST, "the job's end")
        same = "–" if missed else "yes" if self.is_same(study, plan) else "NO"
        told = f"{over - started:.0f} | {done - AT} | {after:.1f} | {missed} | {same}"
        return f"| {when} | {kind} | {told} | {'; '.join(reasons)} |"

    def until(self, true: Callable[[], bool], record: Record, what: str) -> list[str]:
        """Wait for something, and resume the study as often as it ends before; returns why it did."""
        reasons: list[str] = []
        while True:
            wait_until(lambda: self.is_ended(record) or true(), MOST, what)
            if true() or is_finished(record):
                return reasons
            reasons.append(str(record.summary().reason))
            self.go_on()

    def is_ended(self, record: Record) -> bool:
        """Return whether the study has ended."""
        summary = record.summary()
        return summary is not None and (summary.finished or self.status().startswith("FINISHED"))

    def is_same(self, study: str, plan: Plan) -> bool:
        """Return whether its tensors are those of the undisturbed run."""
        undisturbed = self.folder / "undisturbed"
        if plan.rounds != self.plan.rounds:
            undisturbed = self.folder / f"{study}-undisturbed"
            inprocess.run(plan, folder=undisturbed)
        try:
            outcome = gathered(self.consortium, study, SITES, self.folder / study)
            assert_same_outcome(undisturbed, outcome)
        except (AssertionError, FileNotFoundError):
            return False
        return True


def is_finished(record: Record) -> bool:
    """Return whether all rounds are done and the outcome was tested."""
    summary = record.summary()
    return summary is not None and summary.finished


def main(arguments: Sequence[str] | None = None) -> int:
    """Zero if no study ended with other tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--when", default=",".join(WHEN))
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        "| when missing | disturbance | seconds | rounds meanwhile | a round of all after, s | missed | same | ended |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    good = True
    for when in asked.when.split(","):
        with ExitStack() as lines:
            folder = asked.folder.resolve() / when
            folder.mkdir(parents=True)
            federation = Disturbed(folder, 0, ROUNDS, 0.0, lines, when)
            for number, (kind, seconds) in enumerate(CASES):
                if asked.only and not any(word in kind for word in asked.only.split(",")):
                    continue
                line = federation.measure(number, kind, seconds)
                good &= "| NO |" not in line
                print(line, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
