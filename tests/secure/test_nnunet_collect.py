"""nnunet collect over mutual TLS: one command of the lead brings what hospitals measured."""

import json
from pathlib import Path

import pytest
import yaml

from medsilo.cli import main
from medsilo.flare.inquiry_job import EXECUTOR
from medsilo_nnunet.fingerprint_message import MeasuredSite
from medsilo_nnunet.question import SegmentationQuestion
from tests.federations import write_volumes
from tests.secure.consortium import LEAD, Consortium

pytestmark = pytest.mark.long

QUESTION = SegmentationQuestion(name="Dataset007_Volumes", channels=("CT",), labels={"background": 0, "lesion": 1})
LEAST = 2


@pytest.mark.xdist_group("pair")
def test_one_command_brings_what_hospitals_measured(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
    question, measured = tmp_path / "question.yaml", tmp_path / "measured"
    question.write_text(QUESTION.in_yaml())
    command = ["nnunet", "collect", str(question), "--kit", str(pair.kit(LEAD)), "-o", str(measured)]
    files = {site: pair.kit(site) / "local/medsilo.yaml" for site in pair.hospitals}
    policy = pair.kit(pair.hospitals[1]) / "local/resources.json"
    before = {file: file.read_text() for file in (policy, *files.values())}
    try:
        for site, file in files.items():
            write_volumes(tmp_path / site, QUESTION, [f"{site}{case}" for case in range(LEAST)], 1, (1, 1, 2))
            own = {"device": "cpu", "data": str(tmp_path / site), "smallest_metric": LEAST}
            file.write_text(yaml.safe_dump(own))
        capsys.readouterr()
        assert main(command) == 1  # the strict hospital allows studies alone
        assert f"allow {EXECUTOR} (class_allow_list)?" in capsys.readouterr().err
        allowed = json.loads(policy.read_text())
        policy.write_text(json.dumps({**allowed, "class_allow_list": [*allowed["class_allow_list"], EXECUTOR]}))
        assert main(command) == 0
        told = {path.stem: MeasuredSite.read(json.loads(path.read_text())) for path in measured.glob("*.json")}
        assert set(told) == set(files)
        assert all(own.holding.cases == LEAST for own in told.values())
        plans = tmp_path / "plans.json"
        assert main(["nnunet", "plan", str(question), *map(str, measured.glob("*.json")), "-o", str(plans)]) == 0
        assert json.loads(plans.read_text())["dataset_name"] == QUESTION.name

        strict = next(iter(files))
        files[strict].write_text(yaml.safe_dump({"device": "cpu"}))
        capsys.readouterr()
        assert main(command) == 1
        assert f"plans need all hospitals: {strict} refused" in capsys.readouterr().err
    finally:
        for file, text in before.items():
            file.write_text(text)
