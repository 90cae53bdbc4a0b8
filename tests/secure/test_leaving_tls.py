"""A hospital leaves a consortium: the study over mutual TLS without it equals one in this process, and is certified."""

from pathlib import Path

import pytest

from medsilo import cli
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from medsilo.runs.paths import CHECKPOINTS
from medsilo.sealing.signed import read_signed
from medsilo_release.leaving import CERTIFICATE, LeavingCertificate
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, Consortium
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]


def test_leaving_over_tls_equals_the_loop(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    *left, gone = SITES
    kit, plan = str(consortium.kit(LEAD)), make_plan("fedavg", "training.rounds=2", sites=SITES)
    write_job(tmp_path / "job", plan, study="with-all")
    assert consortium.run(tmp_path / "job") == "FINISHED:COMPLETED"
    gathered(consortium, "with-all", SITES, tmp_path / "runs/with-all")
    words = ["leave", "runs/with-all", gone, "-o", "runs/without-one"]
    capsys.readouterr()
    assert cli.main([*words, "--yes", "--kit", kit]) == 0
    job = capsys.readouterr().out.splitlines()[-2]
    assert cli.main(["status", job, "--watch", "--kit", kit]) == 0
    gathered(consortium, "without-one", left, tmp_path / "runs/without-one")
    inprocess.run(make_plan("fedavg", "training.rounds=2", sites=left), folder=tmp_path / "loop")
    assert_same_outcome(tmp_path / "loop", tmp_path / "runs/without-one")
    assert cli.main(words) == 0
    told, _ = read_signed(tmp_path / "runs/without-one" / CERTIFICATE, LeavingCertificate)
    assert told.begun_after == 0 and "global/best.safetensors" in told.models
    assert f"with-all/sites/{gone}/best.safetensors" in told.copies
    assert not any(CHECKPOINTS in name and name.startswith("without") for name in told.copies)
