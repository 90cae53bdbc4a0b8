"""medsilo rejects a plan that exceeds medsilo's general limits or a hospital's limits."""

import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from medsilo.core.errors import DataError, NoRoom, ParticipationError, PlanError, Refused
from medsilo.core.files import free_disk
from medsilo.exchange.channel import Missing, Outgoing, Receive
from medsilo.federation import limits
from medsilo.federation.limits import check_limits, learning_per_answer
from medsilo.federation.process import isolated
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.site_context import SiteContext
from medsilo.plan import Plan, parse_plan
from medsilo.runs.rounds import Round
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.case_index import CaseIndex, Entry
from medsilo.tasks.own.reading import divided
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import parts_by_rank
from medsilo_lab.engines.inprocess import Loop, OnRound
from medsilo_server.coordinator import Coordinator
from medsilo_server.record import Record
from tests.conftest import SITES, SMALL, make_plan
from tests.hospital import NAMES, write_photos
from tests.sites import site_of
from tests.unit.federation.test_protection import STUDY
from tests.unit.trainers import deaf

FOLDER = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "nifti-folder", "size": [32, 32, 32]},
    "network": {"name": "unet", "dimensions": 3, "features": [4, 8]},
    "participation": {"sites": ["a", "b"]},
}
ABSURD = [
    ("task.size=[4096,4096,4096]", "size"),
    ("task.target_spacing=[1e-6,1e-6,1e-6]", "target_spacing"),
    ("training.rounds=100000", "rounds"),
    ("training.local_epochs=10000", "local_epochs"),
    ("participation.timeout=604800", "timeout"),
    ("participation.retry_timeout=2592000", "retry_timeout"),
    ("training.learning_rate=1e-30", "learning_rate"),
]


@pytest.mark.parametrize(("change", "words"), ABSURD)
def test_what_is_absurd_for_anybody_is_no_plan(change: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(FOLDER, [change])


def test_a_network_of_a_billion_parameters_is_no_plan() -> None:
    with pytest.raises(PlanError, match="500000000 may be"):
        parse_plan(FOLDER, ["network.features=[1024,1024,1024,1024,1024,1024,1024]", "network.residual_units=3"])


def test_epochs_are_counted_over_all_rounds() -> None:
    parse_plan(FOLDER, ["training.rounds=1000", "training.local_epochs=100"])
    with pytest.raises(PlanError, match="passes over the data"):
        parse_plan(FOLDER, ["training.rounds=1001", "training.local_epochs=100"])


def test_parameters_are_those_of_the_networks() -> None:
    for plan in (make_plan("fedavg"), make_plan("fedsm", "algorithm.pull=0.5")):
        networks = plan.build_networks().values()
        assert plan.parameters == sum(tensor.numel() for network in networks for tensor in network.parameters())


PLAN = make_plan("fedavg", "participation.timeout=600", "training.rounds=12", "training.batch_size=32")
ASKED = [
    ("MOST_MINUTES", 10, 9, r"participation\.timeout"),
    ("MOST_DISK", 40_800, 38_600, "smaller network"),  # bytes on the disk for a network with 1000 parameters
]


@pytest.mark.parametrize(("name", "enough", "not_enough", "remedy"), ASKED)
def test_each_limit_holds_and_says_what_to_do(
    name: str, enough: float, not_enough: float, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (PLAN, SiteSettings(), 1000, 50, 2 << 30)
    monkeypatch.setattr(limits, name, enough)
    check_limits(*asked)
    monkeypatch.setattr(limits, name, not_enough)
    with pytest.raises(Refused, match=remedy):
        check_limits(*asked)


def test_a_hospital_trains_with_as_many_patients_as_a_score_covers() -> None:
    plan = parse_plan(FOLDER)
    check_limits(plan, SiteSettings(), 1000, 5, patients=5)
    check_limits(plan, SiteSettings(public_data=True), 1000, 1, patients=1)
    for own, cases, patients in (({}, 50, 4), ({}, 4, None), ({"min_patients_per_metric": 6}, 5, 5)):
        with pytest.raises(DataError, match=r"min_patients_per_metric"):
            check_limits(plan, SiteSettings(**own), 1000, cases, patients=patients)


def test_a_full_disk_is_no_fault_of_the_plan() -> None:
    check_limits(PLAN, SiteSettings(), 10_000_000, 50, 1 << 30)
    with pytest.raises(NoRoom, match="disk is full"):
        check_limits(PLAN, SiteSettings(), 10_000_000, 50, 1 << 28)
    assert free_disk(Path("/nowhere/at/all")) > 0


def test_a_hospital_refuses_the_study_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SiteSettings(device="cpu")
    monkeypatch.setattr(limits, "MOST_DISK", 1000)
    with pytest.raises(Refused, match="GiB for a study, more than it allows"):
        site_of(make_plan(), "hospital-a", SITES, settings, tmp_path)


# ---------------------------------------------------------------------------------------------------- in a run
GO_ON = ["participation.when_missing=continue", "participation.minimum=1", "participation.timeout=2"]


def study(folder: Path, on_round: OnRound, *changes: str):
    plan, settings = make_plan("fedavg", *SMALL, *GO_ON, *changes), SiteSettings(device="cpu")
    sites = {site: site_of(plan, site, SITES, settings, folder / "sites" / site) for site in SITES}
    return Coordinator(plan, SITES, Loop(sites), Record(folder), "in-process", on_round).run()


def test_a_round_that_takes_too_long_is_stopped_and_harms_nobody_else(tmp_path: Path) -> None:
    started = time.monotonic()
    plan = make_plan("fedavg", *SMALL, *GO_ON, "training.local_epochs=1000", "training.rounds=1")
    fast = make_plan("fedavg", *SMALL, *GO_ON, "training.rounds=1")
    plans = dict.fromkeys(SITES, fast) | {"hospital-a": plan}
    settings = SiteSettings(device="cpu")
    loop = Hurried({site: site_of(own, site, SITES, settings, tmp_path / site) for site, own in plans.items()})
    summary = Coordinator(plan, SITES, loop, Record(tmp_path / "run"), "in-process").run()
    assert summary.status == "finished" and summary.sites["hospital-b"].contributed == 1
    reason = "refused: this answer took longer than the 0.02 minutes that a hospital allows"
    assert summary.sites["hospital-a"].missed[1].startswith(reason)
    assert time.monotonic() - started < 120


class Hurried(Loop):
    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        for site in sites:
            if site == "hospital-a" and outgoing(site).facts["task"] == "round":
                self.clocks[site].most = 0.02
        return super().ask(sites, outgoing, receive, timeout)


@pytest.mark.slow
def test_a_trainer_that_hears_nothing_is_ended_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate training process whose batch never ends is killed at the hospital's time limit."""
    monkeypatch.setattr(isolated, "STOP_LIMIT", 0.5)
    plan = make_plan("fedavg", *SMALL, "training.rounds=1", sites=["hospital-a"])
    settings = SiteSettings(device="cpu")
    site = IsolatedParticipant(
        SiteContext(plan, "hospital-a", ["hospital-a"], settings, tmp_path / "run/sites/hospital-a"), deaf
    )
    try:
        with pytest.raises(ParticipationError, match=r"longer than the 0\.02 minutes"):
            Coordinator(
                plan, ["hospital-a"], Hurried({"hospital-a": site}), Record(tmp_path / "run"), "in-process"
            ).run()
    finally:
        site.close()


def test_a_study_that_fills_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(line: Round) -> None:
        (tmp_path / "sites/hospital-a/filler").write_bytes(b"x" * 3_000_000)

    monkeypatch.setattr(limits, "MOST_DISK", 2_000_000)
    summary = study(tmp_path, fill)
    assert "larger than a hospital allows" in summary.sites["hospital-a"].missed[2]
    assert summary.sites["hospital-b"].contributed == 2


def test_a_plan_of_too_little_learning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="learning_rate"):
        study(tmp_path, print, "training.learning_rate=1e-8")


def test_learning_counts_steps_over_all_rounds_of_scores() -> None:
    plan = make_plan("fedavg", "training.learning_rate=0.01", "training.batch_size=10", "training.local_epochs=3")
    assert learning_per_answer(plan, 40) == pytest.approx(0.12)
    idle = make_plan("adafed", "training.learning_rate=0.01", "training.batch_size=10")
    trained = sum(phase.rounds for phase in idle.course.phases if phase.trains)
    assert learning_per_answer(idle, 40) == pytest.approx(0.04 * trained / idle.rounds) and trained <= idle.rounds


def test_a_disk_cache_has_its_bound_and_all_cases_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(tmp_path / "photos", NAMES)
    plan = parse_plan(STUDY)
    size = 3 * 8 * 8 * 4
    monkeypatch.setattr("medsilo.tasks.cache.MOST", 10 * (size + 8))
    data = {"folder": str(tmp_path / "photos"), "cache_folder": str(tmp_path / "cache")}
    source = make_settings({"data": data}, "x").data
    read = plan.task.read("a", ["a"], 0, source)
    assert len(list((tmp_path / "cache").iterdir())) == 10
    whole = plan.task.read("a", ["a"], 0, make_settings({"data": str(tmp_path / "photos")}, "x").data)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(read.train, whole.train, strict=True))


def test_the_memory_has_a_limit_by_default() -> None:
    machine = psutil.virtual_memory().total
    # by default, two studies can run on the machine at the same time
    assert SiteSettings().most_memory == pytest.approx(0.4 * machine, rel=0.01)
    assert SiteSettings(studies=1).most_memory == pytest.approx(0.8 * machine, rel=0.01)
    assert SiteSettings(memory_limit=1024).most_memory == 2**30


def test_wrong_shares_are_refused_by_name() -> None:
    for shares in ([0.5, 0.5, 0.5], [1, 0, 0], [0.5, 0.5]):
        with pytest.raises(Exception, match=r"data\.shares"):
            make_settings({"data": {"folder": "/x", "shares": shares}}, "settings")


def test_lists_of_a_data_section_are_read() -> None:
    data = {"folder": "/x", "shares": [0.5, 0.25, 0.25], "images": ["a*", "b*"], "columns": {"image": ["a", "b"]}}
    read = make_settings({"data": data}, "settings").data
    assert read.shares == (0.5, 0.25, 0.25) and read.images == ("a*", "b*") and read.columns["image"] == ("a", "b")


def test_a_split_that_the_hospital_fixed_no_plan_moves(tmp_path: Path) -> None:
    plans = [
        parse_plan(FOLDER, [f"task.shares={shares}", f"task.split={split}"])
        for shares, split in (("[0.6,0.2,0.2]", 0), ("[0.4,0.3,0.3]", 0), ("[0.6,0.2,0.2]", 7))
    ]
    listing = CaseIndex([Entry(f"{number}", (), Path("x"), f"p{number}") for number in range(40)])
    own = DataSource(folder=tmp_path, shares=(0.5, 0.25, 0.25)).drawn_by(3)

    def split(plan: Plan, source: DataSource) -> dict[str, list[str]]:
        parts = divided(listing, source, plan.task.shares, plan.task.split)
        return {part: [entry.name for entry in entries] for part, entries in parts.items()}

    parts = [split(plan, own) for plan in plans]
    assert parts[0] == parts[1] == parts[2]
    expected = parts_by_rank({f"p{number}": "" for number in range(40)}, (0.5, 0.25, 0.25), 3)
    assert {f"p{name}" for name in parts[0]["test"]} == {name for name, part in expected.items() if part == "test"}
    theirs = [split(plan, DataSource(folder=tmp_path)) for plan in plans]
    assert theirs[0] != theirs[1] and theirs[0] != theirs[2]
