"""A released model at work: what a hospital keeps, its charts, its months, and the lead's page of them."""

import csv
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.plan import parse_plan
from medsilo.sealing.signed import read_signed
from medsilo.sealing.signing import own_key
from medsilo.site.owner import ALL_MINE
from medsilo.site.settings import SiteSettings, make_settings
from medsilo_release.control_charts import Alarm, Charts
from medsilo_release.monitoring import Watched, receipt_of, take_outcomes, write_monitor
from medsilo_release.patient_sums import BLOCK, HOME, OUTCOME, WatchFolder
from medsilo_release.receipts import Receipt, merged
from medsilo_release.release_folder import Release
from medsilo_release.release_pages import write_merged
from tests.commands import lead_of

STUDY = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "columns": ["age", "marker"], "standardise": "none"},
    "training": {"rounds": 8, "learning_rate": 0.1},
    "participation": {"sites": ["a", "b", "c", "d"]},
    "layers": [{"name": "promise", "level": 0.8}],
}


def table(folder: Path, patients: int, seed: int, shift: float = 0.0) -> Path:
    """Write a table of patients; a sick one has a greater marker."""
    drawn, lines = random.Random(seed), ["patient,age,marker,outcome"]
    for number in range(patients):
        sick = drawn.randrange(2)
        lines.append(f"person-{seed}-{number},{drawn.gauss(shift, 1):.4f},{drawn.gauss(1.6 * sick, 1):.4f},{sick}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.csv").write_text("\n".join(lines) + "\n")
    (folder / "medsilo.yaml").write_text(f"data:\n  folder: {folder}\n  table: cases.csv\n")
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital's machine with a release, validated and watched: HOME is in it."""
    here = tmp_path_factory.mktemp("hospital")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("HOME", str(here / "home"))
        data = {"folder": str(table(here / "study-data", 400, 1)), "table": "cases.csv"}
        settings = make_settings({**ALL_MINE, "data": data, "device": "cpu"}, "a test")
        inprocess.run(parse_plan(STUDY), folder=here / "study", settings=settings)
        assert cli.main(["release", "study", "-o", "release"]) == 0
        words = ["validate", "release", "--as", "st-anna", "--settings", str(table(here / "local", 200, 2))]
        words += ["--lead", lead_of(here / "release")]
        assert cli.main([*words, "-o", "validation", "--device", "cpu", "--watch"]) == 0
    return here


@pytest.fixture
def here(released: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(released)
    monkeypatch.setenv("HOME", str(released / "home"))
    (WatchFolder(Release.open(released / "release").hash).folder / "sums.json").unlink(missing_ok=True)
    return released


def predicted(here: Path, name: str, patients: int, shift: float = 0.0) -> Path:
    new = table(here / name, patients, len(name) + patients, shift)
    assert cli.main(["predict", "release/model-1", str(new / "cases.csv"), "-o", str(new / "found")]) == 0
    return new / "found" / "predictions.csv"


def test_validate_applies_the_promise_and_tells_it(here: Path) -> None:
    told, _ = read_signed(next((here / "validation").glob("*.receipt")), Receipt)
    plan = Release.open(here / "release").source().plan
    model = plan.build_networks()["model"]
    model.load_state_dict(load_tensors(here / "release/model-1/best.safetensors")[0])
    rows = list(csv.DictReader((here / "local/cases.csv").open()))
    inputs = torch.tensor([[float(row["age"]), float(row["marker"])] for row in rows])
    cut = json.loads((here / "release/model-1/promise.json").read_text())["cuts"]["all"]["shrunk"]
    share = np.concatenate([np.logspace(0, -4, 95), [0.0]])[cut]
    with torch.no_grad():
        sick = model.eval()(inputs).double().sigmoid()
    chances = torch.cat([1 - sick, sick], 1)
    right = torch.tensor([int(row["outcome"]) for row in rows])
    kept = ((chances[range(200), right] >= share) | (chances.argmax(1) == right)).double().mean()
    assert told.kept == pytest.approx(float(kept), abs=0.011)  # in the hospital's steps
    assert told.kept != told.score and (told.kept * 100) % 1 == pytest.approx(0, abs=1e-6)


def test_predictions_leave_sums_without_names_and_a_change_gives_an_alarm(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = Release.open(here / "release")
    folder = WatchFolder(release.hash)
    predicted(here, "one", 52)
    kept, rest = folder.kept().cases, folder.kept().cases.rest
    assert len(kept.whole) == 10 and rest and rest.patients == 2 and all(one.patients == BLOCK for one in kept.whole)
    told = " ".join(path.read_text() for path in (here / "home").rglob("*.json"))
    assert "person" not in told and "labels in the promised set" in told and "feature 0" in told and "entropy" in told
    reference = folder.reference()
    ages = np.array([float(row["age"]) for row in csv.DictReader((here / "local/cases.csv").open())])
    new = np.array([float(row["age"]) for row in csv.DictReader((here / "one/cases.csv").open())])[:BLOCK]
    at = reference.names.index("age")
    assert kept.whole[0].sums[at] == pytest.approx(((new - ages.mean()) / ages.std()).sum(), abs=1e-3)
    assert reference.means[reference.names.index(OUTCOME)] == pytest.approx(0.78, abs=0.08)
    assert cli.main(["monitor", "release"]) == 0
    assert "No alarm over 50 patients" in (here / "monitor.html").read_text()
    predicted(here, "changed", 60, shift=1.5)
    capsys.readouterr()
    assert cli.main(["monitor", "release"]) == 1
    page = (here / "monitor.html").read_text()
    assert "Without labels nobody sees" in page and "Alarm after" in page
    watched = Watched.read(release)
    first = watched.alarms[0]
    assert first.name == "age" or "feature" in first.name
    assert first.block >= 10 and abs(first.drift) > 0.5


def test_outcomes_show_what_inputs_do_not(here: Path) -> None:
    """Labels turned round at random: nothing else has changed."""
    release, found = Release.open(here / "release"), predicted(here, "turned", 100)
    rows = list(csv.DictReader(found.open()))
    truth = [row["outcome"] for row in csv.DictReader((here / "turned/cases.csv").open())]
    drawn = random.Random(0)

    def fed(name: str, wrong: float) -> None:
        names = ["no", "yes"]
        flipped = [names[int(own) ^ (drawn.random() < wrong)] for own in truth]
        told = [row | {"outcome": own} for row, own in zip(rows, flipped, strict=True)]
        with (here / name).open("w", newline="") as file:
            table = csv.DictWriter(file, told[0])
            table.writeheader()
            table.writerows(told)
        assert take_outcomes(release, here / name) == 100

    fed("known.csv", 0)
    assert not Watched.read(release).wrong
    fed("turned.csv", 0.6)
    watched = Watched.read(release)
    assert watched.wrong and watched.wrong[0].name == "surprise" and watched.wrong[0].drift > 0 and not watched.alarms
    rows = ["yes,1,0.1,0.9"] * 40 + ["no,yes,0.99,0.01"] * 40  # a class by its number, or by its name
    (here / "sick.csv").write_text("\n".join(["class,outcome,probability_no,probability_yes", *rows]) + "\n")
    assert take_outcomes(release, here / "sick.csv") == 80
    later, sums = Watched.read(release), WatchFolder(release.hash).kept().outcomes.whole
    assert {"known to be yes", "surprise"} & {alarm.name for alarm in later.wrong[len(watched.wrong) :]}
    at, reference = later.folder.reference().named(True).index("surprise"), later.folder.reference()
    for block, right in ((sums[40], 0.9), (sums[-1], 0.01)):
        told = block.sums[at] / BLOCK * reference.deviations[reference.names.index("surprise")]
        speaks = math.log(0.9 + 0.1 * (1 - right) / right)
        assert told + reference.means[reference.names.index("surprise")] == pytest.approx(speaks, abs=1e-3)
    (here / "bare.csv").write_text("class,outcome\nyes,yes\n")
    refused = {"known.csv": "counts already", "none.csv": "can't be read", "bare.csv": "probability lacks"}
    for again, why in ((here / name, why) for name, why in refused.items()):
        with pytest.raises(MedsiloError, match=why):
            take_outcomes(release, again)


def test_a_month_is_told_once_in_steps_and_the_lead_sees_months(here: Path, tmp_path: Path) -> None:
    release, key = Release.open(here / "release"), own_key(tmp_path / "key.pem", "a test")
    folder, reference = WatchFolder(release.hash), WatchFolder(release.hash).reference()
    case = dict(zip(reference.names, reference.means, strict=True))
    later = {name: case.pop(name) for name in reference.named(True)}

    def case_of(score: float) -> dict[str, float]:
        return later | {OUTCOME: score}

    drifted = case | {"age": case["age"] + 1.237 * reference.deviations[reference.names.index("age")]}
    folder.add([case] * 63, [case_of(1.0), case_of(0.0)] * 25, "0" * 64, "2026-01")
    folder.add([drifted] * 60, month="2026-02")
    settings = SiteSettings()
    watched = Watched.read(release)
    assert watched.months == ["2026-01", "2026-02"]
    told = {month: read_signed(receipt_of(watched, month, settings, key), Receipt)[0] for month in watched.months}
    assert told["2026-01"].score == pytest.approx(0.5, abs=0.05) and told["2026-01"].cases == 60
    assert told["2026-02"].score is None and told["2026-02"].alarms == ("age",)
    first = receipt_of(watched, "2026-01", settings, key)
    before = first.read_bytes()
    folder.add([drifted] * 5, month="2026-01")  # after a month was told, no difference of two tells a patient
    assert receipt_of(Watched.read(release), "2026-01", settings, key).read_bytes() == before
    answers = (folder.folder / "_hospital/st-anna/answers.jsonl").read_text().splitlines()
    assert sum("answered" in line for line in answers) == 2
    files = [*folder.folder.glob("*.receipt"), *(here / "validation").glob("*.receipt")]
    found = merged(release, files)
    assert set(found.months["st-anna"]) == {"2026-01", "2026-02"} and set(found.receipts) == {"st-anna"}
    page = write_merged(release, found, tmp_path / "page.html").read_text()
    assert "2026-02" in page and "alarm: age" in page
    assert "2026-02" in write_monitor(watched, tmp_path / "monitor.html").read_text()
    with pytest.raises(MedsiloError, match="noise"):
        noisy = make_settings({"privacy": {"epsilon": 3, "delta": 1e-5}}, "a test")
        (folder.folder / first.name).unlink()
        receipt_of(watched, "2026-01", noisy, key)


def test_a_month_tells_no_alarm_of_few_outcomes(here: Path, tmp_path: Path) -> None:
    release, key = Release.open(here / "release"), own_key(tmp_path / "key.pem", "a test")
    folder, reference = WatchFolder(release.hash), WatchFolder(release.hash).reference()
    case = dict(zip(reference.names, reference.means, strict=True))
    folder.add([case] * 30, [case] * 5, "0" * 64, "2025-12")
    watched = replace(Watched.read(release), wrong=[Alarm(0, "surprise", 1.0)])
    settings = make_settings({"smallest_metric": 10, "records": str(tmp_path / "records")}, "a test")
    path = receipt_of(watched, "2025-12", settings, key)
    told, _ = read_signed(path, Receipt)
    path.unlink()
    assert told.cases == 30 and told.score is None and told.alarms == ()


@pytest.mark.slow
def test_charts_have_the_false_alarms_that_were_chosen() -> None:
    """One a year, with as few cases as that is promised for, and where one has a long tail: it does not hide others."""
    random, years = np.random.default_rng(0), 40
    names = [*(f"number {n}" for n in range(7)), "entropy", "surprise", "known to be ill"]

    def drawn(*size: int) -> np.ndarray:
        values = random.normal(size=(*size, 10))
        values[..., -2] = random.gamma(0.2, size=size)
        return values

    for cases in (100, 300):
        alarms = []
        for _ in range(years):
            reference = drawn(cases)
            mean, apart = reference.mean(0), reference.std(0)
            charts = Charts.against((reference - mean) / apart, names, 500)
            stream = (drawn(100, BLOCK).mean(1) - mean) / apart
            assert charts.limits[-1] < charts.limits[-2]
            alarms.append(len(charts.run(stream)[1]))
        assert 0.5 < np.mean(alarms) < 1.9, (cases, np.mean(alarms))
    assert str(HOME).startswith("~")
