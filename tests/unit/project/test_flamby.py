"""Test FLamby's tables: the data that the protocol uses, the published facts, and the verdict on a result."""

from pathlib import Path

import pytest

from medsilo.plan import load_plan
from medsilo.site.settings import make_settings
from medsilo.tasks.own.patient_table import PatientTable
from results.flamby import (
    BRCA,
    HEART,
    TABLES,
    PublishedCell,
    Work,
    published,
    read_heart,
    write_tables,
)
from results.patients import write_patients
from tests.patients import write_hearts

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
with_data = pytest.mark.skipif(
    bool(HEART.lacking(DATA) or BRCA.lacking(DATA)), reason="needs ../shared/data/heart_uci and tcga_brca"
)


def test_five_published_seeds_stand_for_every_cell() -> None:
    told = published()
    assert {len(scores) for scores in told.values()} == {5}
    single = {"heart_uci": 4, "tcga_brca": 6}
    for benchmark in TABLES:
        methods = {*benchmark.rates, "pooled", *(f"personal {one}" for one in benchmark.personal)}
        methods |= {*(f"single {n}" for n in range(single[benchmark.folder]))}
        assert {method for own, method in told if own == benchmark.folder} == methods
    assert sum(told["tcga_brca", "fedadam"]) / 5 == pytest.approx(0.842, abs=5e-4)
    assert sum(told["heart_uci", "fedavg"]) / 5 == pytest.approx(0.748, abs=5e-4)


def test_a_cell_agrees_within_two_standard_errors() -> None:
    """If both standard deviations are 0.1, the difference of two means of four values has the standard error 0.0707."""
    theirs = (0.5 - 0.0866025, 0.5 - 0.0866025, 0.5 + 0.0866025, 0.5 + 0.0866025)
    near, far = (tuple(own + shift for own in theirs) for shift in (0.141, 0.142))
    assert PublishedCell("set", "fedavg", "all", near, theirs).error == pytest.approx(0.0707, abs=1e-4)
    assert PublishedCell("set", "fedavg", "all", near, theirs).agrees
    assert PublishedCell("set", "fedavg", "all", far, theirs).row()[-1] == "DIFFERS"
    alone = PublishedCell("set", "fedavg", "all", far[:1], theirs)
    assert not alone.judged and alone.row()[-2:] == ["–", "not judged"]


@pytest.fixture
def hearts(tmp_path: Path) -> Path:
    write_hearts(folder := tmp_path / HEART.folder)
    return folder


def test_lines_without_a_value_are_left_out_and_two_columns_become_dummies(hearts: Path) -> None:
    lines = read_heart(hearts)["va"]
    assert [list(line.values())[8:14] for line in lines[:2]] == [[0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1]]
    assert [sum(line["part"] == part for line in lines) for part in ("train", "test")] == [7, 5]
    assert len(lines[0]) == 13 + 2


@pytest.mark.parametrize("plan", ["heart", "brca"])
def test_the_plans_of_the_patients_page_read_what_it_writes(
    plan: str, hearts: Path, root: Path, tmp_path: Path
) -> None:
    own = load_plan(root / f"results/plans/{plan}.yaml")
    assert isinstance(own.task, PatientTable)
    if plan == "heart":
        written = write_patients(hearts, tmp_path / "tables")
        data = own.task.site_data("va", own.participation.sites, 0, make_settings({"data": str(written)}, "test").data)
        assert [len(part) for part in (data.train, data.validation, data.test)] == [6, 1, 5]


@with_data
@pytest.mark.slow
def test_the_data_are_those_of_the_protocol_and_a_cell_is_near(tmp_path: Path) -> None:
    lines = BRCA.read(DATA / BRCA.folder)
    parts = [tuple(sum(line["part"] == part for line in own) for part in ("train", "test")) for own in lines.values()]
    assert parts == [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
    work = Work(BRCA, write_tables(lines, tmp_path), tuple(lines), tmp_path)
    assert len(work.columns) == 39
    assert 0.8 < work.on_all("fedadam", 42) < 0.9  # the published value is 0.842, with a standard deviation of 0.017
