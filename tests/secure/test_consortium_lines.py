"""Eight hospitals over lines as a real consortium has, four of them behind a relay: cuts cost their own time only."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest
import yaml

from medsilo.flare.jobs import write_job
from medsilo.plan import Plan, parse_plan
from medsilo.runs.record import Record
from medsilo_lab.consortium import lead
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.relay import Line, Relay
from tests.secure.test_resume import ended

NAMES = [f"site-{number}" for number in range(8)]
BEHIND = NAMES[4:]
LINE = Line(rate=0.9e6, delay=0.1)
PLAIN = 4  # rounds over this machine's own line, which say what a round takes beside its bytes
ROUNDS = PLAIN + 20
VIT = {
    "name": "vit",
    "size": 32,
    "patch": 8,
    "width": 264,
    "depth": 2,
    "heads": 4,
}  # 6.9 MB: a hundredth of one that hung
CUTS = (
    (PLAIN + 3, 0, 6.0, True),
    (PLAIN + 6, 5, 20.0, False),
    (PLAIN + 10, 2, 60.0, True),
    (PLAIN + 15, 7, 10.0, True),
)  # round, site, seconds, closed
HANG = 60.0  # seconds in which nothing moves on any line, that a cut does not tell
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.xdist_group("eight")]


@pytest.fixture
def eight(tmp_path: Path) -> Iterator[Consortium]:
    """Their kits, and nobody started."""
    (tmp_path / "eight").mkdir()
    eight = Consortium(tmp_path / "eight", dict.fromkeys(NAMES, "teaching-hospital"), relays={"north": BEHIND})
    for name in NAMES:
        (eight.kit(name) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    try:
        yield eight
    finally:
        eight.stop()


def plan_of(rounds: int) -> Plan:
    """A study of these hospitals; a round waits for each."""
    return parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "synthetic-histology", "patients": 6, "patches": 2, "size": 32},
            "network": VIT,
            "training": {"rounds": rounds, "batch_size": 16, "learning_rate": 0.01},
            "participation": {"sites": NAMES, "when_missing": "wait", "retry_timeout": 1800},
        }
    )


def line_of(eight: Consortium, name: str) -> Relay:
    """A line between a hospital and what its kit says it connects to."""
    kit = eight.kit(name)
    if name not in BEHIND:
        line = Relay(eight.port)
        line.take_in(kit / "startup")
        return line
    port = yaml.safe_load((eight.root / "consortium.yaml").read_text())["relays"][0]["port"]
    line = Relay(port)
    path = kit / "local/relay__resources.json"
    path.write_text(path.read_text().replace(str(port), str(line.port)))
    return line


class Watch:
    """The longest time in which nothing moved on any line, and no line was cut."""

    def __init__(self, lines: list[Relay]) -> None:
        self.lines, self.longest, self.since, self.passed = lines, 0.0, time.monotonic(), 0
        self.is_cut = threading.Event()
        self.ended = threading.Event()

    def look(self) -> None:
        while not self.ended.wait(1.0):
            passed = sum(way.passed for line in self.lines for way in (line.up, line.down))
            if passed > self.passed + 100_000 or self.is_cut.is_set():  # more than the words that NVFlare sends
                self.passed, self.since = passed, time.monotonic()
            self.longest = max(self.longest, time.monotonic() - self.since)


def test_eight_hospitals_over_lines_as_they_are(eight: Consortium, tmp_path: Path) -> None:
    plan = plan_of(ROUNDS)
    with ExitStack() as stack:
        lines = [stack.enter_context(line_of(eight, name)) for name in NAMES]
        eight.start(600)
        write_job(tmp_path / "job", plan, study="lines")
        record = Record(eight.kit(SERVER) / "medsilo" / "lines")
        job = lead.submit(tmp_path / "job", eight.kit(LEAD), print)
        watch = Watch(lines)
        wait_until(lambda: len(record.rounds()) >= PLAIN, 900, "the plain rounds")
        for line in lines:
            line.up.line = line.down.line = LINE
        wait_until(lambda: len(record.rounds()) > PLAIN, 900, "the first on such lines")
        watch.since = began = time.monotonic()
        before = [(line.up.passed, line.down.passed) for line in lines]
        threading.Thread(target=watch.look, daemon=True).start()
        for number, site, seconds, closes in CUTS:
            wait_until(lambda number=number: len(record.rounds()) >= number, 900, f"round {number}")
            time.sleep(3.0)  # in the middle of a model
            watch.is_cut.set()
            lines[site].cut() if closes else lines[site].hush()
            time.sleep(seconds)
            lines[site].mend() if closes else lines[site].speak()
            watch.is_cut.clear()
        wait_until(lambda: len(record.rounds()) >= ROUNDS, 900, "the last round")
        took = time.monotonic() - began
        watch.ended.set()
        moved = [line.up.passed + line.down.passed - sum(then) for line, then in zip(lines, before, strict=True)]
        assert ended(eight.kit(LEAD), job, 900) == "FINISHED:COMPLETED"
        summary, rounds = record.summary(), record.rounds()
    assert summary and all(own.missed == {} for own in summary.sites.values())
    assert [line.round for line in rounds] == [*range(1, ROUNDS + 1)]
    own = summary.sites[NAMES[0]]
    a_round = (own.bytes_up + own.bytes_down) / ROUNDS
    plain = median(line.seconds for line in rounds[1:PLAIN])
    many, undisturbed = ROUNDS - PLAIN - 1, median(line.seconds for line in rounds[PLAIN + 1 :])
    cut = sum(seconds for _, _, seconds, _ in CUTS)
    alone = undisturbed * LINE.rate / a_round
    all_rounds = (took - cut) / (undisturbed * many)
    print(
        f"{took:.0f} s for {many} rounds, {cut:.0f} of them cut; undisturbed, a round takes {undisturbed:.1f} s, "
        f"{alone:.3f} of bytes/bandwidth, and {plain:.1f} s without such lines; all rounds {all_rounds:.2f} of "
        f"undisturbed ones and the cuts, and {max(moved) / (a_round * many):.3f} of the bytes; nothing moved for "
        f"{watch.longest:.0f} s at most"
    )
    assert watch.longest < HANG
    assert alone < 1.15  # on an idle machine: a round's own seconds stand beside 15 of its bytes
    assert all_rounds < 1.15 and max(moved) < 1.06 * a_round * many
