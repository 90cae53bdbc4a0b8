"""One hospital sends hostile answers over mutual TLS, and the study ends as if the hostile answers had been lost."""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from medsilo import cli
from medsilo.runs.reading import read_summary
from medsilo.runs.schema import Summary
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, SERVER, Consortium
from tests.secure.test_resume import ended

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]
A, B, LIAR = SITES
GO_ON = ["participation.when_missing=continue", "participation.minimum=2", "participation.timeout=300"]
CODE = Path(__file__).parent / "dishonest"
LIES = "lies.json"


@contextmanager
def dishonest(consortium: Consortium, folder: Path, surplus: int = 400_000_000) -> Iterator[None]:
    """Run the third hospital with the hostile code, which reads the file lies.json in `folder`."""
    path = os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")]))
    with consortium.changed(LIAR, PYTHONPATH=path, MEDSILO_LIES=folder / LIES, MEDSILO_SURPLUS=surplus):
        yield


class Memory:
    def __init__(self, consortium: Consortium, record: Record) -> None:
        self.consortium, self.record = consortium, record
        self.most: dict[int, int] = {}
        self.over = False
        self.watching = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self.watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.watching.join()

    def _watch(self) -> None:
        running: list[psutil.Process] = []
        while not self.over:
            # the server's job process has not started yet, or has ended
            with suppress(psutil.Error, OSError, ValueError, StopIteration):
                (process,) = running = running or self.consortium.family(SERVER, "runner_process")
                status = Path(f"/proc/{process.pid}/status").read_text()
                line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
                self.most[len(self.record.rounds())] = int(line.split()[1]) * 1024
            time.sleep(0.05)


def study(
    consortium: Consortium, folder: Path, name: str, rounds: int, lies: Mapping[str, str]
) -> tuple[Summary, Memory, Path]:
    (folder / LIES).write_text(json.dumps(lies))
    write_job(folder / name, make_plan("fedavg", f"training.rounds={rounds}", *GO_ON), study=name)
    record = Record(consortium.kit(SERVER) / "medsilo" / name)
    kit = consortium.kit(LEAD)
    with dishonest(consortium, folder), Memory(consortium, record) as memory:
        job = lead.submit(folder / name, kit, print)
        assert ended(kit, job, 600) == "FINISHED:COMPLETED"
    assert cli.main(["download", job, "--kit", str(kit), "--out", str(folder / "runs")]) == 0
    return read_summary(record.folder), memory, folder / "runs" / name


def test_no_answer_of_one_hospital_ends_or_fills_a_study(consortium: Consortium, tmp_path: Path) -> None:
    lies = {
        "join": "no cases",
        "round 2": "surplus",
        "round 3": "garbage",
        "round 4": "long text",
        "round 5": "unsafe job",
        "round 6": "many values",
        "round 7": "command abort",
        "deliver": "accuracy 7.5",
        "test": "no test cases",
    }
    summary, memory, fetched = study(consortium, tmp_path, "lies", 8, lies)
    assert summary.status == "finished" and summary.rounds.done == 8
    assert [summary.sites[site].contributed for site in SITES] == [8, 8, 3]
    told = {
        **{str(number): text for number, text in summary.sites[LIAR].missed.items()},
        **summary.sites[LIAR].missed_ends,
    }
    for place, words in {
        "join": "cases.train: field required",
        "2": "was not taken: at most",
        "3": "can't be read",
        "4": "its message of 30.0 MB was not taken",
        "5": "the site answered UNSAFE_JOB",
        "6": "more than",
        "deliver": "validation score 7.5 is outside 0 to 1",
        "test": "cases.test: input should be a valid integer",
    }.items():
        assert told[place].startswith("refused: ") and words in told[place], (place, told)
    assert len(told) == 8
    assert all(summary.sites[site].test is not None for site in (A, B)) and summary.sites[LIAR].test is None
    page = (fetched / "report.html").read_text()
    assert LIAR in page and "was not taken: at most" in page and len(page) < 1_000_000
    assert (fetched / "global/best.safetensors").exists()
    last = min(number for number in memory.most if number >= 7)
    first = max(number for number in memory.most if number < 2)
    # the hostile answers had 400 MB, 30 MB and two million values
    assert memory.most[last] - memory.most[first] < 150e6, memory.most
