"""A hospital's query budget counts the answers of all the hospital's processes, even if a process dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError, Refused
from medsilo.plan import parse_plan
from medsilo.runs.schema import Summary
from medsilo.site.query_budget import ANSWERS, KEY, QueryBudget, Requester, data_set
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.sources import DataSource
from tests import inprocess
from tests.hospital import NAMES, write_photos
from tests.unit.federation.test_protection import STUDY

FIRST, SECOND = Requester("lead@a", "data", "one"), Requester("lead@a", "data", "two")
OTHER, ELSEWHERE = Requester("lead@b", "data", "three"), Requester("lead@a", "other data", "four")
FEW = SiteSettings(answers=10)
PLANNED = {"train": 5, "validation": 6, "test": 1}
pytestmark = pytest.mark.usefixtures("known_key")


@pytest.fixture
def budget(tmp_path: Path) -> QueryBudget:
    return QueryBudget(tmp_path / "book")


def run(folder: Path, data: Path, *changes: str, **settings: object) -> Summary:
    own = make_settings({"device": "cpu", "data": str(data), **settings}, "x")
    return inprocess.run(parse_plan(STUDY, changes), folder=folder, settings=own).summary


def answered(folder: Path) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in QueryBudget(folder / "_hospital/a").counts().values():
        total.update(count.answered)
    return total


def test_only_the_account_that_trains_makes_what_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query budget's files belong to the account that trains, because this account could not read another account's
    files.
    """
    budget = QueryBudget(tmp_path / "new" / "book")
    assert budget.may_begin
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert not budget.may_begin


# ---------------------------------------------------------------------------------------------------- counting
def test_a_run_is_counted_part_by_part(photos: Path, tmp_path: Path) -> None:
    run(tmp_path / "study", photos, "training.rounds=3")
    assert answered(tmp_path) == {"train": 3, "validation": 4, "test": 1}
    text = (tmp_path / "_hospital/a" / ANSWERS).read_text()
    assert str(photos) not in text and not any(name in text for name in NAMES)
    assert (tmp_path / "_hospital").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "_hospital").rglob("*"))


def test_a_study_over_the_budget_is_refused_before_data_are_read(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medsilo.site.settings.TESTS", 2)
    few, place = {"answers": 6}, tmp_path / "photos"
    write_photos(place, NAMES[:40])
    run(tmp_path / "first", place, "training.rounds=2", **few)
    place.rename(tmp_path / "away")
    with pytest.raises(Refused, match="needs 5 answers .* has 3 left"):
        run(tmp_path / "second", place, "training.rounds=3", **few)
    (tmp_path / "away").rename(place)
    run(tmp_path / "third", place, "training.rounds=1", **few)
    assert answered(tmp_path)["validation"] == 5


def test_how_many_answers_a_lead_may_have_over_each_part() -> None:
    """docs/trust/privacy.md states how many answers a lead may have over each part of the split."""
    told = [[SiteSettings(answers=answers).most_answers(part) for part in PLANNED] for answers in (41, 3000)]
    assert told == [[2000, 41, 3], [3000, 3000, 150]]


def test_each_lead_has_a_budget_of_its_own_for_each_data_set(budget: QueryBudget) -> None:
    budget.admit(FIRST, PLANNED, FEW)
    for _ in range(6):
        budget.note(FIRST, {"validation": 1}, FEW)
    with pytest.raises(Refused, match=r"needs 6 .* has 4 left .*\(answers in"):
        budget.admit(SECOND, PLANNED, FEW)
    budget.admit(OTHER, PLANNED, FEW)
    budget.admit(ELSEWHERE, PLANNED, FEW)
    budget.note(OTHER, {"validation": 6}, FEW)
    assert budget.used("data") == {"lead@a": {"validation": 6}, "lead@b": {"validation": 6}}


def test_a_server_that_asks_more_than_its_plan_said_gets_no_more_than_the_budget(budget: QueryBudget) -> None:
    budget.admit(FIRST, PLANNED, FEW)
    for _ in range(10):
        budget.note(FIRST, {"train": 1, "validation": 1}, FEW)
    with pytest.raises(Refused, match="has 10 left"):
        budget.note(FIRST, {"train": 1, "validation": 1}, FEW)
    assert budget.counts()[FIRST].answered == {"train": 10, "validation": 10}


def test_what_a_running_study_planned_is_spoken_for(budget: QueryBudget) -> None:
    """Without reserved answers, two studies admitted one after the other could both run out of their query budget."""
    place = budget.begin(FIRST.study, None)
    budget.admit(FIRST, PLANNED, FEW)
    with pytest.raises(Refused, match="has 4 left"):
        budget.admit(SECOND, PLANNED, FEW)
    budget.note(FIRST, {"validation": 1}, FEW)
    place.release()
    budget.admit(SECOND, PLANNED, FEW)


# ---------------------------------------------------------------------------------------------------- processes
NOTER = """
import sys
from pathlib import Path
from medsilo.core.errors import Refused
from medsilo.site.query_budget import QueryBudget, Requester
from medsilo.site.settings import SiteSettings
book, told = QueryBudget(Path(sys.argv[1])), 0
for _ in range(int(sys.argv[3])):
    try:
        book.note(Requester("lead", "data", sys.argv[2]), {"validation": 1}, SiteSettings(answers=40))
        told += 1
    except Refused:
        pass
print(told)
"""


def start(script: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_studies_at_once_share_one_budget(tmp_path: Path) -> None:
    processes = [start(NOTER, tmp_path, f"study-{number}", 20) for number in range(3)]
    told = [int(process.communicate(timeout=600)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(told) == 40  # the query budget allows 40 answers, of 60 that the three studies request
    assert sum(count.answered["validation"] for count in QueryBudget(tmp_path).counts().values()) == 40


DYING = """
import os, sys
from pathlib import Path
from medsilo_lab.engines import inprocess
from medsilo.plan import parse_plan
from medsilo.runs.messages import Trained
from medsilo.site.settings import make_settings
from tests.unit.federation.test_protection import STUDY
def message(self, groups):
    os.kill(os.getpid(), 9)  # after the note, before the answer
Trained.message = message
settings = make_settings({"device": "cpu", "data": sys.argv[2]}, "x")
inprocess.run(parse_plan(STUDY), folder=Path(sys.argv[1]), settings=settings)
"""


@pytest.mark.long
def test_a_process_killed_between_note_and_answer_has_counted_it(photos: Path, tmp_path: Path) -> None:
    process = start(DYING, tmp_path / "study", photos)
    assert process.wait(timeout=600) == -signal.SIGKILL
    assert answered(tmp_path) == {"train": 1, "validation": 1}
    run(tmp_path / "another", photos)
    assert answered(tmp_path) == {"train": 2, "validation": 3, "test": 1}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_takes_no_other_with_it_and_counts(cut: int, budget: QueryBudget) -> None:
    for _ in range(3):
        budget.note(FIRST, {"validation": 1}, FEW)
    path = budget.folder / ANSWERS
    path.write_bytes(path.read_bytes()[:-cut])
    budget.note(FIRST, {"validation": 1}, FEW)
    unknown = int(cut > 1)  # a partly written line counts as an answer over training, validation and test cases
    assert budget.counts()[FIRST].answered == Counter(validation=4, train=unknown, test=unknown)
    for line in path.read_text().splitlines()[-1:]:
        assert json.loads(line)["answered"] == {"validation": 1}


def test_records_that_cannot_be_used_let_nothing_out(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "_hospital").write_text("a file where a folder should be")
    with pytest.raises((MedsiloError, OSError)):
        run(tmp_path / "study", photos)
    book = QueryBudget(tmp_path / "own")
    book.key()
    (book.folder / KEY).write_text("no key")
    with pytest.raises(MedsiloError, match="key cannot be read"):
        book.number("split")


# ---------------------------------------------------------------------------------------------------- at once
HOLDER = """
import sys, time
from pathlib import Path
from medsilo.site.query_budget import QueryBudget
place = QueryBudget(Path(sys.argv[1])).begin(sys.argv[2], None)
print("has it", flush=True)
time.sleep(60)
"""


def test_studies_at_once_over_processes(photos: Path, tmp_path: Path) -> None:
    holders = [start(HOLDER, tmp_path / "_hospital/a", name) for name in ("one", "two")]
    try:
        for holder in holders:
            assert holder.stdout.readline() == "has it\n"
        with pytest.raises(Refused, match="works for 2.*2 at once"):
            run(tmp_path / "three", photos)
        # two studies can run, although the child of a dead process still has the first study's files open
        run(tmp_path / "two", photos)
        assert holders[1].poll() is None
        holders[0].kill()
        holders[0].wait()
        run(tmp_path / "four", photos)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


@pytest.mark.slow
def test_a_place_is_free_again_when_a_study_ends(photos: Path, tmp_path: Path) -> None:
    for number in range(4):
        run(tmp_path / f"study-{number}", photos, studies=1)


# ---------------------------------------------------------------------------------------------------- who is whom
def test_the_same_folder_is_the_same_data_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    link, folder = (data_set(DataSource(folder=place), "x") for place in (tmp_path / "link", tmp_path))
    assert link == folder == data_set(DataSource(folder=tmp_path), "y") != data_set(None, "x")


def test_numbers_that_only_this_hospital_knows(budget: QueryBudget) -> None:
    """torch accepts a hospital's secret numbers as seeds."""
    numbers = [budget.number(f"purpose {place}") for place in range(64)]
    assert all(0 <= number < 2**63 for number in numbers) and max(numbers) > 2**62 and len(set(numbers)) == 64
    assert numbers[:3] == [QueryBudget(budget.folder).number(f"purpose {place}") for place in range(3)]


def test_groups_near_each_other(budget: QueryBudget) -> None:
    names = [f"p{number}" for number in range(40)]
    first = {"train": names[:20], "validation": names[20:30], "test": names[30:]}
    assert budget.near("data", first, 5) == set() == budget.near("data", first, 5)
    assert budget.near("data", {**first, "test": names[31:]}, 5) == {"test"}
    assert budget.near("data", {**first, "test": [*names[31:], "new"]}, 5) == {"test"}
    assert budget.near("data", {**first, "test": names[35:]}, 5) == set()
    assert budget.near("data", {**first, "train": [*names[30:], "new"]}, 5) == {"train"}
    assert budget.near("data", {**first, "test": [*names[30:], names[30]]}, 5) == {"test"}
    assert budget.near("data", {"train": [], "validation": [], "test": names[31:]}, 5) == {"test"}
    assert budget.near("other", {**first, "test": names[31:]}, 5) == set()
    windows = {"test": names[30:] * 2}  # shorter windows make more cases of each patient
    assert budget.near("data", windows, 5) == set()
    assert budget.near("data", {"test": names[31:] * 3}, 5) == {"test"}
    assert not any(name in (budget.folder / "patients.jsonl").read_text() for name in names)


def test_a_book_of_many_answers_is_read_fast(budget: QueryBudget) -> None:
    budget.note(FIRST, {"validation": 1}, FEW)
    path = budget.folder / ANSWERS
    path.write_text(path.read_text() * 20_000)
    started = time.process_time()
    with pytest.raises(Refused):
        budget.note(FIRST, {"validation": 1}, FEW)
    assert time.process_time() - started < 10
