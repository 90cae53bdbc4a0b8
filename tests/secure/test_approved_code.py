"""A hospital that approves plans runs a lead's training script over mutual TLS, from the job to the model."""

import json
from pathlib import Path

import pytest

from medsilo import cli
from medsilo.airlock.room import ability
from medsilo.airlock.site import PRINTED
from tests.secure.consortium import CODE, LEAD, Consortium
from tests.secure.test_scripts_tls import exported

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("approved-code")]
ONE = "hospital-1"


@pytest.mark.parametrize("airlock", ["off", "required"])
def test_a_script_runs_over_tls_once_its_code_is_approved(
    airlock: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hospital rejects the submitted script, runs the script after `approve`, and rejects the script again after a
    change of one byte.
    """
    if airlock == "required" and not ability().works:
        pytest.skip("no bubblewrap, or no user namespaces")
    (tmp_path / "wary").mkdir()
    consortium = Consortium(tmp_path / "wary", {ONE: CODE})
    kit, lead = str(consortium.kit(ONE)), str(consortium.kit(LEAD))
    own = f"device: cpu\napproval: except-canary\nairlock: {airlock}\n"
    (consortium.kit(ONE) / "local/medsilo.yaml").write_text(own)
    job = exported(root, tmp_path / "work", "FedAvg", 1, [ONE])

    def told_of_last() -> str:
        capsys.readouterr()
        assert cli.main(["status", "--kit", lead, "--json"]) == 0
        newest = json.loads(capsys.readouterr().out)["jobs"][0]
        assert cli.main(["status", newest["id"], "--kit", lead]) == 0
        return capsys.readouterr().out

    try:
        consortium.start()
        assert consortium.run(job) != "FINISHED:COMPLETED"
        assert "has not approved plan" in told_of_last()
        assert cli.main(["approve", "--kit", kit, "--json"]) == 0
        [asked] = json.loads(capsys.readouterr().out)["asked"]
        assert asked["lead"] == LEAD and asked["job_code"]
        assert cli.main(["approve", asked["hash"][:12], "--kit", kit, "--yes"]) == 0
        assert consortium.run(job) == "FINISHED:COMPLETED"
        [study] = (consortium.kit(ONE) / "medsilo").glob("*/sites")
        assert (study / ONE / "last.safetensors").is_file()
        assert (study / ONE / PRINTED).is_file() == (airlock == "required")

        script = job / "app/custom/client.py"
        script.write_text(script.read_text() + "\n")
        assert consortium.run(job) != "FINISHED:COMPLETED"
        assert "with other code" in told_of_last()

        assert cli.main(["canary", "--kit", lead, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hospitals"][ONE]["code"] == "approved"
    finally:
        consortium.stop()
