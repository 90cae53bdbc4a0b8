"""With only the commands of a lead and of hospitals, a study over mutual TLS goes from the submitted job to the fetched
results.
"""

import json
from pathlib import Path

import pytest

from medsilo.cli import main
from medsilo.site.accepted_settings import REMEMBERED
from tests.conftest import SITES
from tests.secure.consortium import LEAD, Consortium

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
HOSPITALS = SITES[:2]
SMALL = ["training.rounds=2", "task.name=synthetic-activity", "task.persons=8", "task.windows=10"]


def test_hospitals_check_and_approve_what_a_lead_submits_and_fetches(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def medsilo(*words: object) -> str:
        code = main([str(word) for word in words])
        told = capsys.readouterr()
        assert code == 0, f"{words}\n{told.out}{told.err}"
        return told.out

    job, lead = tmp_path / "job", pair.kit(LEAD)
    changes = [f"participation.sites=[{','.join(HOSPITALS)}]", *SMALL]
    medsilo("submit", "jobs/fedavg", *(part for own in changes for part in ("--set", own)), "-o", job)
    settings = {pair.kit(site) / "local/medsilo.yaml": "" for site in HOSPITALS}
    for path in settings:
        settings[path] = path.read_text()
        path.write_text(settings[path] + "approval: required\n")
    try:
        assert main(["submit", str(job), "--kit", str(lead)]) == 1
        assert "not approved" in capsys.readouterr().err
        strict = pair.kit(HOSPITALS[1])
        medsilo("check", job, "--kit", strict, "--private", tmp_path / "private.txt")
        for site in HOSPITALS:
            medsilo("approve", job, "--kit", pair.kit(site), "--expires", "30d", "--yes")
        study = json.loads(medsilo("submit", job, "--kit", lead, "--json"))["job"]
        medsilo("status", study, "--watch", "--kit", lead)
        medsilo("download", study, "--kit", lead, "-o", tmp_path / "runs")
    finally:
        for path, own in settings.items():
            path.write_text(own)
            # removes the file of accepted settings, because the settings have changed back
            (path.parents[1] / REMEMBERED).unlink(missing_ok=True)
    [run] = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["rounds"]["done"] == 2 and set(summary["sites"]) == set(HOSPITALS)
    assert (run / "report.html").is_file()
