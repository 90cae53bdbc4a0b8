"""A released model: tested where nobody trained it, and against people who alter releases and receipts."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.plan import Plan, parse_plan
from medsilo.sealing.signed import fingerprint, write_signed
from medsilo.sealing.signing import PrivateKey, public_text
from medsilo.sealing.signing import own_key as key_in
from medsilo.site.owner import ALL_MINE
from medsilo.site.settings import make_settings
from medsilo_release.receipts import Receipt, merged
from medsilo_release.release_folder import Release, write_release
from tests.conftest import SITES, make_plan


def own_key(path: Path) -> PrivateKey:
    return key_in(path, "a test")


SMALL = ["task.persons=8", "task.windows=10", "task.steps=32", "training.batch_size=16"]
TABLE = {
    "algorithm": {"name": "fedavg"},
    "task": {"name": "table", "columns": ["age", "marker"]},
    "training": {"rounds": 2},
    "participation": {"sites": ["a", "b"]},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    plan, folder = make_plan("fedavg", *SMALL), tmp_path_factory.mktemp("runs") / "study"
    inprocess.run(plan, folder=folder)
    return plan, folder


@pytest.fixture(scope="module")
def made(finished: tuple[Plan, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    write_release([finished[1]], "", folder / "release", own_key(folder / "lead.pem"))
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a kit: the release alone."""
    shutil.copytree(made / "release", tmp_path / "release")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def validated(folder: Path, name: str, *more: str) -> Path:
    assert cli.main(["validate", "release", "--as", name, "-o", str(folder / name), "--device", "cpu", *more]) == 0
    [receipt] = (folder / name).glob("*.receipt")
    return receipt


def test_all_cases_of_a_hospital_that_did_not_join_are_tested(finished: tuple[Plan, Path], here: Path) -> None:
    plan, run = finished
    told = json.loads(validated(here, "elsewhere").read_text())["content"]
    model = plan.build_networks()["model"]
    model.load_state_dict(load_tensors(run / "global" / "best.safetensors")[0])
    data = plan.task.load("elsewhere", ["elsewhere"], plan.seed, None)
    parts = [data.train, data.validation, data.test]
    with torch.no_grad():
        right = torch.cat([model.eval()(part.inputs).argmax(1) == part.targets for part in parts])
    assert told["cases"] == len(right)
    assert told["score"] == pytest.approx(float(right.double().mean()))
    assert (here / "elsewhere" / "validation.html").is_file()


def test_several_kinds_of_models_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A super model, a hospital's own, and two runs that answer together: each answers in the release as in its run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("fedsm", "local"):
        inprocess.run(make_plan(name, *SMALL, "training.rounds=2"), folder=tmp_path / name)
    inprocess.run(make_plan("local", *SMALL, "training.rounds=2", "seed=1"), folder=tmp_path / "again")
    own = ["--site", SITES[0]]
    kinds = {"super": ["fedsm"], "own": ["local", *own], "together": ["local", "again", *own]}
    for name, runs in kinds.items():
        assert cli.main(["release", *runs, "-o", name]) == 0
        assert cli.main(["validate", name, "--as", "x", "-o", f"of-{name}", "--device", "cpu"]) == 0
        assert len(Release.open(Path(name)).manifest.models) == (2 if name == "together" else 1)
    scores = {name: json.loads(next(Path(f"of-{name}").glob("*.receipt")).read_text()) for name in kinds}
    assert len({told["content"]["release"] for told in scores.values()}) == len(kinds)


def test_two_releases_are_compared_on_the_same_patients(here: Path) -> None:
    shutil.copytree(here / "release", here / "other")
    assert cli.main(["validate", "release", "other", "--as", "x", "-o", "both", "--device", "cpu"]) == 0
    assert "+0.0 points" in (here / "both" / "validation.html").read_text()


def table_of(folder: Path, patients: int) -> Path:
    folder.mkdir()
    drawn = random.Random(patients)
    lines = [f"{n},{drawn.random():.3f},{drawn.random():.3f},{n % 2}" for n in range(patients)]
    (folder / "cases.csv").write_text("\n".join(["patient,age,marker,outcome", *lines]) + "\n")
    text = f"data:\n  folder: {folder}\n  table: cases.csv\n  columns: {{patient: patient}}\n"
    (folder / "medsilo.yaml").write_text(text)
    return folder


def test_a_receipt_tells_patients_scores_in_the_hospitals_own_steps_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    study = table_of(tmp_path / "study-data", 60)
    settings = make_settings({**ALL_MINE, "data": {"folder": study, "table": "cases.csv"}, "device": "cpu"}, "test")
    inprocess.run(parse_plan(TABLE), folder=tmp_path / "study", settings=settings)
    assert cli.main(["release", "study", "-o", "release"]) == 0
    told = {}
    for patients in (3, 83):
        local = table_of(tmp_path / f"hospital-{patients}", patients)
        receipt = validated(tmp_path, f"h{patients}", "--settings", str(local))
        told[patients] = json.loads(receipt.read_text())["content"]
    assert told[3]["score"] is None, "three patients' score leaves"
    assert told[83]["cases"] != 83 and abs(told[83]["cases"] - 83) <= 5
    assert (told[83]["score"] * 100) % 1 == pytest.approx(0, abs=1e-6), "finer than its steps"


def test_a_release_that_was_touched_is_refused(here: Path) -> None:
    folder = here / "release"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = path.read_bytes()
        for changed in (kept[:-1], bytes([kept[0] ^ 1]) + kept[1:], kept + b"\n", b""):
            path.write_bytes(changed)
            if path.name == "release.json" and changed.strip() == kept.strip():
                continue  # JSON knows no blank lines
            with pytest.raises(MedsiloError):
                Release.open(folder)
        path.write_bytes(kept)
    for surplus in (folder / "more.py", folder / "model-1" / "sitecustomize.py"):
        surplus.write_text("")
        with pytest.raises(MedsiloError, match=surplus.name):
            Release.open(folder)
        surplus.unlink()
    (folder / "model-1" / "link").symlink_to("/etc/passwd")
    with pytest.raises(MedsiloError, match="link"):
        Release.open(folder)


def test_a_release_of_somebody_else_is_refused_where_the_leads_key_is_known(made: Path, here: Path) -> None:
    lead = fingerprint(public_text(own_key(made / "lead.pem")))
    assert Release.open(here / "release", lead).manifest.models == ("model-1",)
    told = json.loads((here / "release" / "release.json").read_text())["content"]
    manifest = type(Release.open(here / "release").manifest).model_validate(told)
    write_signed(here / "release" / "release.json", manifest, own_key(here / "liar.pem"))
    with pytest.raises(MedsiloError, match=lead):
        Release.open(here / "release", lead)


def test_only_honest_receipts_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release, good = Release.open(here / "release"), validated(here, "st-anna")
    told = Receipt.model_validate(json.loads(good.read_text())["content"])
    liar = own_key(here / "liar.pem")
    forged = {
        "foreign": told.model_copy(update={"release": "0" * 64}),
        "other-metric": told.model_copy(update={"metric": "dice"}),
        "as-another": told.model_copy(update={"hospital": "st-berta"}),
    }
    for name, receipt in forged.items():
        write_signed(here / f"{name}.receipt", receipt, liar)
    shutil.copy(good, here / "copy.receipt")
    altered = json.loads(good.read_text())
    altered["content"]["score"] = 1.0
    (here / "altered.receipt").write_text(json.dumps(altered))
    known = {"st-anna": fingerprint(public_text(own_key(here / "home/.config/medsilo/signing.pem")))}
    found = merged(release, [good, *here.glob("*.receipt")], {**known, "st-berta": "0000-0000-0000-0000"})
    assert found.receipts == {"st-anna": told}
    assert len(found.refused) == len(forged) + 2  # of the honest one and its copy one counts
    write_signed(here / "twice.receipt", told.model_copy(update={"score": 1.0}), liar)
    both = merged(release, [good, here / "twice.receipt"])
    assert not both.receipts and set(both.refused) == {good.name, "twice.receipt"}, "a liar may not choose which counts"
    capsys.readouterr()
    assert cli.main(["receipts", "merge", str(good), "altered.receipt", "--release", "release"]) == 1
    assert "altered.receipt" in capsys.readouterr().out and (here / "receipts.html").is_file()


def test_no_altered_receipt_is_believed(here: Path) -> None:
    """Many changes of bytes and values: each is refused with a reason."""
    release, good = Release.open(here / "release"), validated(here, "st-anna")
    kept, drawn = good.read_bytes(), random.Random(0)
    whole = json.loads(kept)
    odd = (None, -1, 1e400, "x" * 10**5, [], {}, True, "\u202e", 2**70)
    for number in range(1500):
        changed = bytearray(kept)
        changed[drawn.randrange(len(kept))] ^= 1 << drawn.randrange(8)
        if number % 3 == 0:
            place = drawn.choice(["content", "key", "signature"])
            part = {**whole, place: drawn.choice(odd)}
            if place == "content" and number % 2:
                key = drawn.choice(list(whole["content"]))
                part = {**whole, "content": {**whole["content"], key: drawn.choice(odd)}}
            changed = bytearray(json.dumps(part).encode())
        try:
            same = json.loads(changed) == whole
        except ValueError:
            same = False
        good.write_bytes(changed)
        found = merged(release, [good])
        assert same or (not found.receipts and found.refused), changed
    good.write_text("[" * 100_000)
    assert not merged(release, [good]).receipts


def test_a_later_release_says_what_changed(finished: tuple[Plan, Path], made: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    inprocess.run(make_plan("fedavg", *SMALL, "training.rounds=3"), folder=later)
    key = own_key(made / "lead.pem")
    old = Release.open(made / "release")
    release = write_release([later], "", tmp_path / "release", key, old)
    told = (release.folder / "CHANGES.md").read_text()
    assert "training.rounds" in told and release.manifest.after == old.hash
    with pytest.raises(MedsiloError, match="key"):
        write_release([later], "", tmp_path / "other", own_key(tmp_path / "liar.pem"), old)
    assert not (tmp_path / "other").exists()
