"""medsilo statistics over mutual TLS: one command of the lead asks three hospitals, which seal, approve and count."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from medsilo.cli import main
from medsilo.flare.inquiry_job import SEALED_EXECUTOR
from medsilo_statistics.course_of_question import SEALED
from medsilo_statistics.found import StatisticsFound
from tests.secure.consortium import LEAD, Consortium
from tests.tables import VARIABLES, asked, drawn, settings_of

pytestmark = pytest.mark.long


@pytest.mark.xdist_group("consortium")
def test_one_command_asks_three_hospitals(
    consortium: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = dict(zip(consortium.hospitals, drawn(3, 60).values(), strict=True))
    question = {
        "variables": VARIABLES,
        "sites": list(frames),
        "table": ["age", "stage"],
        "models": [{"kind": "cox", "time": "time", "event": "dead", "covariates": ["age", "stage"]}],
    }
    file, out = tmp_path / "question.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(question))
    command = ["statistics", str(file), "--kit", str(consortium.kit(LEAD)), "-o", str(out)]
    settings = {site: consortium.kit(site) / "local/medsilo.yaml" for site in frames}
    policy, groups = (
        consortium.kit(consortium.hospitals[1]) / f"local/{name}.json" for name in ("resources", "privacy")
    )
    before = {path: path.read_text() for path in (policy, groups, *settings.values())}
    allowed = json.loads(before[policy])
    wanted = asked(
        settings_of(frames, tmp_path, public_data=True), tmp_path, **{k: question[k] for k in ("table", "models")}
    )
    asker = consortium.hospitals[0]
    try:
        groups.write_text(before[groups].replace('"model"', f'"model", "{SEALED}"'))
        policy.write_text(json.dumps({**allowed, "class_allow_list": [*allowed["class_allow_list"], SEALED_EXECUTOR]}))
        for site, path in settings.items():
            own = {"device": "cpu", "data": str(tmp_path / "data" / site), "smallest_metric": 3}
            path.write_text(yaml.safe_dump(own | ({"approval": "required"} if site == asker else {})))
        capsys.readouterr()
        assert main(command) == 1
        told = capsys.readouterr().err
        hash = next(word for word in told.split() if len(word.rstrip(";")) == 64).rstrip(";")
        assert f"{asker} refused: this hospital has not approved question {hash}" in told
        assert main(["approve", hash, "--kit", str(consortium.kit(asker)), "--by", "engineer"]) == 0
        assert main(command) == 0
        found = StatisticsFound.received(json.loads((out / "answers.json").read_text()))
        assert found.sealed and found.floor == 3 and found.hash == hash
        np.testing.assert_allclose(found.fits[0].coefficients, wanted.fits[0].coefficients, rtol=1e-7)
        assert found.columns[-1].cells["stage"] == wanted.columns[-1].cells["stage"]
        nested = [*command[:1], str(_nested(file, question)), *command[2:]]
        assert main(nested) == 1
        told = capsys.readouterr().err
        hash = next(word for word in told.split() if len(word.rstrip(";")) == 64).rstrip(";")
        assert main(["approve", hash, "--kit", str(consortium.kit(asker)), "--by", "engineer"]) == 0
        assert main(nested) == 1
        assert "fewer than 3 patients" in capsys.readouterr().err
    finally:
        for path, text in before.items():
            path.write_text(text)


def _nested(file: Path, question: dict[str, object]) -> Path:
    """Write a question that leaves out one patient or two of each hospital."""
    nested = file.with_name("nested.yaml")
    nested.write_text(yaml.safe_dump({**question, "models": [], "where": "age > 41.5 or missing(age)"}))
    return nested
