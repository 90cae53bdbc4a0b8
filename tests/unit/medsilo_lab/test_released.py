"""Hospitals that did not train a released model test the model, and reject an altered release."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.plan import Plan, parse_plan
from medsilo.runs.reading import read_summary
from medsilo.site.settings import ALL_MINE, make_settings
from medsilo.site.signed import fingerprint, write_signed
from medsilo.site.signing import PrivateKey, public_text
from medsilo.site.signing import own_key as key_in
from medsilo_lab.engines import inprocess
from medsilo_lab.release.release_folder import Release, write_release
from tests.commands import lead_of
from tests.conftest import SITES, make_plan
from tests.unit.medsilo_lab.test_report import Page


def own_key(path: Path) -> PrivateKey:
    return key_in(path, "a test")


LIAR = "0123-" * 7 + "0123"
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
    shutil.copytree(made / "release", tmp_path / "release")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def validated(capsys: pytest.CaptureFixture, release: str, folder: Path, *more: str) -> dict[str, Any]:
    lead = lead_of(release)
    capsys.readouterr()
    words = ["release", "test", release, "--lead", lead, "--as", folder.name, "-o", str(folder), *more]
    assert cli.main([*words, "--device", "cpu", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["told"]
    return told


def test_all_cases_of_a_hospital_that_did_not_join_are_tested(
    finished: tuple[Plan, Path], here: Path, capsys: pytest.CaptureFixture
) -> None:
    plan, run = finished
    told = validated(capsys, "release", here / "elsewhere")
    model = plan.build_networks()["model"]
    model.load_state_dict(load_tensors(run / "global" / "best.safetensors")[0])
    data = plan.task.load("elsewhere", ["elsewhere"], plan.seed, None)
    parts = [data.train, data.validation, data.test]
    with torch.no_grad():
        right = torch.cat([model.eval()(part.inputs).argmax(1) == part.targets for part in parts])
    assert told["cases"] == len(right)
    assert told["score"] == pytest.approx(float(right.double().mean()))
    assert (here / "elsewhere" / "validation.html").is_file()


@pytest.mark.slow
def test_several_kinds_of_models_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A super model, a hospital's personal model and an ensemble predict the same whether they are read from a release
    or from a run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("fedsm", "local"):
        inprocess.run(make_plan(name, *SMALL, "training.rounds=2"), folder=tmp_path / name)
    inprocess.run(make_plan("local", *SMALL, "training.rounds=2", "seed=1"), folder=tmp_path / "again")
    own = ["--site", SITES[0]]
    kinds = {"super": ["fedsm"], "own": ["local", *own], "together": ["local", "again", *own]}
    tested = set()
    for name, runs in kinds.items():
        assert cli.main(["release", "make", *runs, "-o", name]) == 0
        tested.add(validated(capsys, name, tmp_path / f"of-{name}")["release"])
        assert len(Release.open(Path(name)).manifest.models) == (2 if name == "together" else 1)
    assert len(tested) == len(kinds)


def test_a_model_of_round_0_is_not_released(finished: tuple[Plan, Path], tmp_path: Path) -> None:
    run = tmp_path / "study"
    shutil.copytree(finished[1], run)
    tensors, facts = load_tensors(run / "global" / "best.safetensors")
    assert facts["round"] > 0
    save_tensors(run / "global" / "best.safetensors", tensors, {**facts, "round": 0})
    with pytest.raises(MedsiloError, match=r"round 0.*model_selection\.keep=last"):
        write_release([run], "", tmp_path / "release", own_key(tmp_path / "lead.pem"))
    assert not (tmp_path / "release").exists()


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranked")
    study = marked(root / "study-data", 80)
    settings = make_settings({**ALL_MINE, "data": {"folder": study, "table": "cases.csv"}, "device": "cpu"}, "test")
    training = {"rounds": 20, "learning_rate": 0.3}
    plan = {**TABLE, "task": {**TABLE["task"], "standardise": "none"}, "training": training}
    plan |= {"model_selection": {"keep": "last"}}
    inprocess.run(parse_plan(plan), folder=root / "study", settings=settings)
    write_release([root / "study"], "", root / "release", own_key(root / "lead.pem"))
    return root


def marked(folder: Path, patients: int, ill: str = "1", well: str = "0", each: int = 2) -> Path:
    """For one patient in seven, the column "marker" contradicts the outcome."""
    folder.mkdir()
    sick = [number % each == 0 for number in range(patients)]
    markers = [one != (number % 7 == 0) for number, one in enumerate(sick)]
    pairs = enumerate(zip(sick, markers, strict=True))
    lines = [f"{n},0.5,{1 if marker else -1},{ill if one else well}" for n, (one, marker) in pairs]
    (folder / "cases.csv").write_text("\n".join(["patient,age,marker,outcome", *lines]) + "\n")
    text = f"data:\n  folder: {folder}\n  table: cases.csv\n  columns: {{patient: patient}}\n  outcome: [outcome]\n"
    (folder / "medsilo.yaml").write_text(text)
    return folder


def test_two_releases_are_compared_on_the_same_patients(here: Path) -> None:
    shutil.copytree(here / "release", here / "other")
    lead = ["--lead", lead_of("release")]
    assert cli.main(["release", "test", "release", *lead, "--as", "../x"]) == 1
    assert cli.main(["release", "test", "release", "other", *lead, "--as", "x", "-o", "both", "--device", "cpu"]) == 0
    page = (here / "both" / "validation.html").read_text("utf-8")
    assert "+0.0 points from release (no interval" in page and "inf to" not in page


def test_a_hospital_that_trained_the_model_is_told_that_its_patients_were_seen(
    ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The test uses all cases of a hospital, including training cases if the hospital trained the model."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local = str(marked(tmp_path / "hospital", 84))
    new = validated(capsys, str(ranked / "release"), tmp_path / "new", "--settings", local)
    old = validated(capsys, str(ranked / "release"), tmp_path / "a", "--settings", local)
    assert (new["seen"], old["seen"]) == (False, True)
    pages = {name: (tmp_path / name / "validation.html").read_text("utf-8") for name in ("new", "a")}
    assert "seen in training" not in pages["new"]
    assert "release was trained at a. Some of the tested patients trained the model" in pages["a"]
    assert re.search(r"reaches accuracy 0\.\d+ seen in training over 84 cases", pages["a"])


def page_at(ranked: Path, local: Path, capsys: pytest.CaptureFixture) -> tuple[dict[str, Any], str, Page]:
    told = validated(capsys, str(ranked / "release"), local.parent / "h", "--settings", str(local))
    text = (local.parent / "h" / "validation.html").read_text("utf-8")
    return told, text, Page(text)


def test_a_page_has_each_class_with_its_cases_and_says_where_they_are_few(
    ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of 84 patients, 7 are ill; the marker is wrong for 11 healthy patients and one ill patient, and accuracy would
    hide the ill patient.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _, text, parsed = page_at(ranked, marked(tmp_path / "hospital", 84, each=12), capsys)
    assert parsed.row("release no", "classes")[1:3] == ["0.8666 of 77, 0.76–0.92", "0.866 of 7, 0.49–0.97"]
    assert parsed.row("release yes", "classes")[1:3] == ["0.866 of 7, 0.49–0.97", "0.8666 of 77, 0.76–0.92"]
    assert "Few test cases: 7 of yes. AUROC" in text
    card = (ranked / "release" / "model-1" / "MODEL_CARD.md").read_text("utf-8")
    tested = read_summary(ranked / "study").sites["a"]
    (own,) = re.findall(r"\| a \| yes \| (\d+) \|((?: [\d.]+ \([\d.]+–[\d.]+\) \|){6})", card)
    assert int(own[0]) == sum(tested.decisions.confusion[1]) > 0
    shown = [float(one) for one in re.findall(r" ([\d.]+) \(", own[1])]
    assert shown[4:] == pytest.approx([tested.figures["auroc"], tested.figures["pr_auc_1"]], abs=0.0051)
    assert len(f"{own[1].split()[0]}") == 4  # a class of fewer than 100 cases has two digits


def test_a_model_that_does_no_better_than_guessing_is_named_before_its_score(
    ranked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A hospital that swaps the codes of the two classes gets an AUROC below one half."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _, text, _ = page_at(ranked, marked(tmp_path / "hospital", 70), capsys)
    assert "Not learned" not in text
    (tmp_path / "other").mkdir()
    _, text, _ = page_at(ranked, marked(tmp_path / "other" / "hospital", 70, ill="0", well="1"), capsys)
    assert "release reaches accuracy 0.14, and always saying the most frequent class 0.50" in text
    assert text.index("Not learned") < text.index('id="results"')
    release, local = str(ranked / "release"), str(tmp_path / "other" / "hospital")
    words = ["release", "test", release, "--lead", lead_of(release), "--as", "h", "--settings", local]
    assert cli.main([*words, "-o", str(tmp_path / "again"), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (warned,) = (line for line in lines if line.startswith("warning, which stays here: Not learned: release reaches"))
    assert lines.index(warned) < len(lines) - 1 and lines[-1].startswith("may be mailed to the lead")


def test_a_second_validation_leaves_nothing_of_the_first(here: Path, capsys: pytest.CaptureFixture) -> None:
    earlier = [here / "x" / "validation.html", here / "x" / "sites" / "x" / "pictures" / "test-best.png"]
    for path in earlier:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("earlier")
    validated(capsys, "release", here / "x")
    assert "earlier" not in earlier[0].read_text() and not earlier[1].exists()


@pytest.mark.parametrize(("lead", "words"), [([], "--lead"), (["--lead", ""], "signed by"), (["--lead", LIAR], LIAR)])
def test_a_release_from_a_key_that_nobody_told_of_is_not_tested(
    lead: list[str], words: str, here: Path, capsys: pytest.CaptureFixture
) -> None:
    """A hospital that does not yet know the signer's key rejects a release, even if the signature is valid."""
    assert cli.main(["release", "test", "release", "--as", "x", "-o", "out", "--device", "cpu", *lead]) != 0
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (here / "out").exists()


def table_of(folder: Path, patients: int) -> Path:
    folder.mkdir()
    drawn = random.Random(patients)
    lines = [f"{n},{drawn.random():.3f},{drawn.random():.3f},{n % 2}" for n in range(patients)]
    (folder / "cases.csv").write_text("\n".join(["patient,age,marker,outcome", *lines]) + "\n")
    text = f"data:\n  folder: {folder}\n  table: cases.csv\n  columns: {{patient: patient}}\n  outcome: [outcome]\n"
    text += "  label_map: {0: 'no', 1: 'yes'}\n"
    (folder / "medsilo.yaml").write_text(text)
    return folder


def test_what_may_be_mailed_is_in_the_hospitals_own_steps_or_has_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    study = table_of(tmp_path / "study-data", 60)
    settings = make_settings({**ALL_MINE, "data": {"folder": study, "table": "cases.csv"}, "device": "cpu"}, "test")
    inprocess.run(parse_plan(TABLE, ["model_selection.keep=last"]), folder=tmp_path / "study", settings=settings)
    assert cli.main(["release", "make", "study", "-o", "release"]) == 0
    told = {}
    for patients in (3, 83):
        local = table_of(tmp_path / f"hospital-{patients}", patients)
        told[patients] = validated(capsys, "release", tmp_path / f"h{patients}", "--settings", str(local))
    assert told[3]["score"] is None, "three patients' score leaves"
    assert told[83]["cases"] != 83 and abs(told[83]["cases"] - 83) <= 5
    assert (told[83]["score"] * 100) % 1 == pytest.approx(0, abs=1e-6), "finer than its steps"
    assert told[83]["kind"] == "range" and told[83]["low"] < told[83]["high"] and told[83]["n"] == told[83]["cases"]
    assert (
        f"{told[83]['low']:g} to {told[83]['high']:g}" in Page((tmp_path / "h83/validation.html").read_text()).rows[1]
    )


def test_a_release_that_was_touched_is_refused(here: Path) -> None:
    folder = here / "release"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = path.read_bytes()
        for changed in (kept[:-1], bytes([kept[0] ^ 1]) + kept[1:], kept + b"\n", b""):
            path.write_bytes(changed)
            if path.name == "release.json" and changed.strip() == kept.strip():
                continue
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
    assert Release.open(here / "release", [lead]).manifest.models == ("model-1",)
    told = json.loads((here / "release" / "release.json").read_text())["content"]
    manifest = type(Release.open(here / "release").manifest).model_validate(told)
    write_signed(here / "release" / "release.json", manifest, own_key(here / "liar.pem"))
    with pytest.raises(MedsiloError, match=lead):
        Release.open(here / "release", [lead])
    for lie in ({"metric": "dice"}, {"task": "table"}, {"plan_hash": "0" * 64}):
        write_signed(here / "release" / "release.json", manifest.model_copy(update=lie), own_key(here / "liar.pem"))
        with pytest.raises(MedsiloError, match="another model"):
            Release.open(here / "release").source()


def altered(kept: bytes, drawn: random.Random, number: int) -> bytes:
    changed = bytearray(kept)
    if number % 3 == 0 and kept.startswith(b"{"):
        whole = json.loads(kept)
        place: Any = whole.get("content", whole) if drawn.random() < 0.6 else whole
        while isinstance(deeper := place[key := drawn.choice(list(place))], dict) and deeper and drawn.random() < 0.6:
            place = deeper
        odd = (None, -1, 1e400, float("nan"), "x" * 10**5, [], {}, True, "\u202e", 2**70, "../../x", 0.5, "2026-01")
        place[key] = drawn.choice(odd)
        return json.dumps(whole).encode()
    start, length = drawn.randrange(len(kept)), drawn.randrange(1, 60)
    if number % 3 == 1:
        changed[start] ^= 1 << drawn.randrange(8)
    elif number % 2:
        del changed[start : start + length]
    else:
        changed[start:start] = changed[start : start + length]
    return bytes(changed)


@pytest.mark.parametrize("times", [400, pytest.param(5000, marks=pytest.mark.long)])
def test_no_altered_release_is_believed(here: Path, times: int) -> None:
    """Each altered release is rejected by an error of medsilo, and never by an unexpected exception."""
    release, drawn = Release.open(here / "release"), random.Random(0)
    files = sorted(path for path in (here / "release").rglob("*") if path.is_file())
    counts = {"refused": 0, "the same": 0}
    for number in range(times):
        path = files[number % len(files)]
        kept = path.read_bytes()
        path.write_bytes(changed := altered(kept, drawn, number))
        if changed == kept or same_json(changed, kept):
            counts["the same"] += 1
        else:
            with pytest.raises(MedsiloError):
                Release.open(here / "release")
            counts["refused"] += 1
        path.write_bytes(kept)
    assert counts["refused"] > 0.98 * times, counts
    assert Release.open(here / "release").hash == release.hash


def same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other)) and one.startswith(b"{")
    except ValueError:
        return False
