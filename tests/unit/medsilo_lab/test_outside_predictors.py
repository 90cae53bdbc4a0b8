"""Another package's predictor and dataset probe handle a kind of data that medsilo does not know."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import medsilo
from medsilo.cli import main
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import load_plan
from medsilo.site.data_set import DataSet
from tests.commands import lead_of
from tests.conftest import make_plan
from tests.outside import installed_as

FILES = Path(__file__).parents[2] / "outside"
ENTRIES = """
[medsilo.tasks]
notes = notes:Notes
[medsilo.networks]
letter-net = notes:LetterNet
[medsilo.predictors]
notes = notes:NotePredictor
[medsilo.dataset_probes]
notes = notes:look
"""
TEXTS = {"well": "Walked a mile. Ate well.", "ill": "Pain in his hip! Fits in bits. Chill."}


installed = installed_as("outside-notes", ENTRIES)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    for kind, text in TEXTS.items():
        (tmp_path / "notes" / kind).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "notes" / kind / f"{number}.txt").write_text(text)
    return tmp_path / "notes"


def test_predict_goes_through_an_outside_predictor(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    changes = ["task.name=notes", "training.rounds=3", "training.learning_rate=0.1"]
    run = medsilo.run(make_plan("fedavg", *changes), folder=tmp_path / "run", data=notes, device="cpu")
    assert run.plan.packages["outside-notes"].version == "1.0" and run.plan.network.name == "letter-net"

    (tmp_path / "new").mkdir()
    (tmp_path / "new/b.txt").write_text("Ill. Walked")
    (tmp_path / "new/a.txt").write_text("...")
    command = ["predict", str(run.folder), str(tmp_path / "new"), "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main(command) == 1
    assert "2 cases" in capsys.readouterr().out
    none, ill, well = csv.DictReader((tmp_path / "out/predictions.csv").open())
    assert none["note"] == "a.txt" and "no sentence" in none["error"]
    assert (ill["sentence"], well["sentence"]) == ("Ill", "Walked")
    assert float(ill["probability_ill"]) > float(well["probability_ill"])

    weights = load_file(run.folder / "global/best.safetensors")
    scores = weights["bias"] + weights["weight"][:, 8] + 2 * weights["weight"][:, 11]
    assert float(ill["probability_ill"]) == pytest.approx(float(scores.softmax(0)[1]), abs=1e-6)
    told = json.loads((tmp_path / "out/predictions.json").read_text())
    assert told["model"]["plan_hash"] == run.plan.hash
    assert medsilo.predict(run.folder, tmp_path / "new", tmp_path / "again", device="cpu") == told["cases"]
    assert main([*command[:2], str(run.folder), *command[3:4], str(tmp_path / "none")]) == 1
    assert "there are no notes" in capsys.readouterr().err

    released = [str(tmp_path / "release"), "--as", "elsewhere", "-o", str(tmp_path / "validation"), "--device", "cpu"]
    assert main(["release", "make", str(run.folder), "-o", released[0]]) == 0
    released += ["--lead", lead_of(released[0])]
    # a lead's plan cannot use a package that the hospital does not allow
    for allowed in ("", "packages: [outside-notes]\n"):
        (tmp_path / "medsilo.yaml").write_text(f"data: {{folder: {notes}}}\n{allowed}")
        assert main(["release", "test", *released, "--settings", str(tmp_path)]) == (0 if allowed else 1)
        assert allowed or "does not allow package outside-notes" in capsys.readouterr().err


@pytest.mark.slow
def test_init_goes_through_an_outside_looker(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for site in ("north", "south"):
        shutil.copytree(notes, tmp_path / "data" / site)
    for path in (tmp_path / "data/south").rglob("*.txt"):
        path.unlink() if int(path.stem) > 6 else None
    out = tmp_path / "study"
    each = ["--set", "patients=each case is a patient"]
    command = ["init", str(tmp_path / "data"), "-o", str(out), "--no-train", "--device", "cpu", "--json", *each]
    main(command)
    told = json.loads(capsys.readouterr().out)
    assert "error" not in told, told
    assert told["found"][0] == "34 notes, of about 2.5 sentences" and told["check"]["north"]["go"]
    plan, settings = load_plan(out / "job/app/config/plan.yaml"), load_yaml((out / "medsilo.yaml").read_text())
    assert plan.task.name == "notes" and plan.training.learning_rate == 0.1 and plan.algorithm.name == "fedavg"
    assert plan.participation.everyone == ("north", "south")
    assert settings == {"packages": ["outside-notes"], "device": "cpu"} and all(row["why"] for row in told["choices"])
    assert DataSet.read(out / "data-set/north").reading["folder"] == str(tmp_path / "data/north")
    assert main(["data", "accept", str(out / "data-set"), "--by", "A. Person"]) == 0
    options = ["--settings", str(out), "--site", "north", "--private", str(tmp_path / "private.txt")]
    assert main(["check", str(out / "job"), *options]) == 0
    capsys.readouterr()

    (notes / "ill/0.txt").write_text("...")
    assert main(["init", str(notes), "-o", str(tmp_path / "one"), "--no-train", "--json", *each]) == 1
    assert "a note has no sentence; write one" in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "one").exists(), "nothing is written of data that cannot be read"
