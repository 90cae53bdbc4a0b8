"""A hospital leaves a consortium: the study over mutual TLS without it equals one in this process, and is certified."""

import shutil
from pathlib import Path

import pytest

from medsilo import cli
from medsilo.federation import inprocess
from medsilo.runs.paths import CHECKPOINTS
from medsilo.sealing.signed import read_signed
from medsilo_release.leaving import CERTIFICATE, LeavingCertificate
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, Consortium
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("relays")]


def test_leaving_over_tls_equals_the_loop(
    relayed: Consortium,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    *left, gone = SITES
    kit = str(relayed.kit(LEAD))
    shutil.copytree(whole, tmp_path / "runs/with-all")
    words = ["leave", "runs/with-all", gone, "-o", "runs/without-one"]
    capsys.readouterr()
    assert cli.main([*words, "--yes", "--kit", kit]) == 0
    job = capsys.readouterr().out.splitlines()[-2]
    assert cli.main(["status", job, "--watch", "--kit", kit]) == 0
    gathered(relayed, "without-one", left, tmp_path / "runs/without-one")
    inprocess.run(make_plan("ditto", sites=left), folder=tmp_path / "loop")
    assert_same_outcome(tmp_path / "loop", tmp_path / "runs/without-one")
    assert cli.main(words) == 0
    told, _ = read_signed(tmp_path / "runs/without-one" / CERTIFICATE, LeavingCertificate)
    assert told.begun_after == 0
    assert {"global/last.safetensors", *(f"sites/{site}/best.safetensors" for site in left)} <= told.models.keys()
    assert f"with-all/sites/{gone}/best.safetensors" in told.copies
    assert not any(CHECKPOINTS in name and name.startswith("without") for name in told.copies)
