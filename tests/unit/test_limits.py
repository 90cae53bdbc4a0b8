"""What a plan may ask for: bounds that hold for everybody, and those of a hospital."""

import math
from pathlib import Path

import pytest

from medsilo.core.errors import PlanError, Refused
from medsilo.federation.limits import check_limits, free_disk
from medsilo.federation.participant import Participant
from medsilo.plan import parse_plan
from medsilo.site.settings import SiteSettings, make_settings
from medsilo.tasks.listing import Entry, Listing
from medsilo.tasks.sources import DataSource
from medsilo.tasks.splits import parts_by_hash
from tests.conftest import SITES, make_plan

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
    ("participation.patience=2592000", "patience"),
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
VALUES = 32 * math.prod(PLAN.task.shape or ())
ASKED = [
    ("round_minutes", 10, 9),
    ("parameters", 1000, 999),
    ("batch_values", VALUES, VALUES - 1),
    ("disk", 3.8e-5, 3.6e-5),  # GiB, of 1000 parameters
    ("least_learning", 0.1, 0.101),  # 50 cases are two steps of 0.05
    ("least_cases", 50, 51),
]


@pytest.mark.parametrize(("key", "enough", "not_enough"), ASKED)
def test_each_limit_holds_and_says_which(key: str, enough: float, not_enough: float) -> None:
    asked = (1000, 50, 2 << 30)
    check_limits(PLAN, SiteSettings(limits={key: enough}), *asked)
    with pytest.raises(Refused, match=rf"limits\.{key} in its medsilo\.yaml"):
        check_limits(PLAN, SiteSettings(limits={key: not_enough}), *asked)


def test_the_disk_keeps_what_must_stay_free() -> None:
    check_limits(PLAN, SiteSettings(limits={"disk_free": 1}), 10_000_000, 50, 3 << 30)
    with pytest.raises(Refused, match="disk_free"):
        check_limits(PLAN, SiteSettings(limits={"disk_free": 1}), 10_000_000, 50, 1 << 30)
    assert free_disk(Path("/nowhere/at/all")) > 0


def test_a_hospital_refuses_the_study_itself(tmp_path: Path) -> None:
    settings = SiteSettings(device="cpu", limits={"parameters": 10})
    with pytest.raises(Refused, match="parameters, more than it allows"):
        Participant(make_plan(), "hospital-a", SITES, settings, tmp_path)


def test_the_memory_has_a_limit_by_default() -> None:
    assert 2**28 < SiteSettings().most_memory < 2**45
    assert SiteSettings(memory_limit=1024).most_memory == 2**30


def test_scores_leave_rounded_where_the_hospital_says_so() -> None:
    assert SiteSettings(score_digits=2).rounded(0.98765) == 0.99
    assert SiteSettings().rounded(0.98765) == 0.98765
    assert SiteSettings(score_digits=2).rounded(None) is None


def test_wrong_shares_are_refused_by_name() -> None:
    for shares in ([0.5, 0.5, 0.5], [1, 0, 0], [0.5, 0.5]):
        with pytest.raises(Exception, match=r"data\.shares"):
            make_settings({"data": {"folder": "/x", "shares": shares}}, "settings")


def test_lists_of_a_data_section_are_read() -> None:
    data = {"folder": "/x", "shares": [0.5, 0.25, 0.25], "images": ["a*", "b*"], "columns": {"image": ["a", "b"]}}
    read = make_settings({"data": data}, "settings").data
    assert read.shares == (0.5, 0.25, 0.25) and read.images == ("a*", "b*") and read.columns.image == ("a", "b")


def test_a_split_that_the_hospital_fixed_no_plan_moves(tmp_path: Path) -> None:
    plans = [
        parse_plan(FOLDER, [f"task.shares={shares}", f"task.split={split}"])
        for shares, split in (("[0.6,0.2,0.2]", 0), ("[0.4,0.3,0.3]", 0), ("[0.6,0.2,0.2]", 7))
    ]
    listing = Listing([Entry(f"{number}", (), Path("x"), f"p{number}") for number in range(40)])
    own = DataSource(folder=tmp_path, shares=(0.5, 0.25, 0.25), split=3)
    parts = [
        {part: [entry.name for entry in entries] for part, entries in plan.task._split(listing, own).items()}
        for plan in plans
    ]
    assert parts[0] == parts[1] == parts[2]
    expected = parts_by_hash({f"p{number}" for number in range(40)}, (0.5, 0.25, 0.25), 3)
    assert {f"p{name}" for name in parts[0]["test"]} == {name for name, part in expected.items() if part == "test"}
    theirs = [plan.task._split(listing, DataSource(folder=tmp_path)) for plan in plans]
    assert theirs[0] != theirs[1] and theirs[0] != theirs[2]
