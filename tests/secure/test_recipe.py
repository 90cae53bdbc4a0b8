"""A recipe between real processes: over mutual TLS with a lead's kit, and in NVFlare's proof of concept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from nvflare.lighter.provision import gen_default_project_config
from nvflare.recipe import ProdEnv

from medsilo.federation import inprocess
from medsilo.flare.recipe import MedsiloRecipe
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, free_port
from tests.secure.test_mutual_tls import gathered

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("second-consortium")]
PAIR = SITES[:2]
IN_POC = """
import sys
from nvflare.recipe import PocEnv
from medsilo.flare.recipe import MedsiloRecipe

recipe = MedsiloRecipe(sys.argv[1], with_code=True)
environment = PocEnv(num_clients=2, clients=recipe.sites, project_conf_path=sys.argv[2])
try:
    environment_run = recipe.execute(environment)
    print("result", environment_run.get_result(timeout=200, clean_up=False))
finally:
    environment.stop()
"""


def test_in_production(consortium: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedbn", sites=PAIR)
    inprocess.run(plan, folder=tmp_path / "loop")
    environment = ProdEnv(startup_kit_location=str(consortium.kit(LEAD)), username=LEAD)
    run = MedsiloRecipe(plan).execute(environment)
    (fetched,) = Path(run.get_result(timeout=200), "workspace/medsilo").iterdir()
    assert run.get_status() == "FINISHED:COMPLETED"
    assert_same_outcome(tmp_path / "loop", gathered(consortium, fetched.name, PAIR, tmp_path / "secure"))


def local_project(path: Path) -> None:
    """NVFlare's own project for a proof of concept, with our hospitals, listening on the loopback address only.

    Without a project of ours its server is called "server", and listens on port 8002 of every address.
    """
    gen_default_project_config("dummy_project.yml", str(path))
    project = yaml.safe_load(path.read_text())
    others = [party for party in project["participants"] if party["type"] == "admin"]
    server = {"name": SERVER, "type": "server", "org": "nvidia", "fed_learn_port": free_port()}
    hospitals = [{"name": site, "type": "client", "org": "nvidia"} for site in PAIR]
    path.write_text(yaml.safe_dump({**project, "participants": [server, *hospitals, *others]}))


@pytest.mark.long
def test_in_the_proof_of_concept(tmp_path: Path) -> None:
    plan = make_plan("fedbn", sites=PAIR)
    inprocess.run(plan, folder=tmp_path / "loop")
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    (tmp_path / "in_poc.py").write_text(IN_POC)
    local_project(tmp_path / "project.yml")
    (tmp_path / "home").mkdir()
    workspace = tmp_path / "poc"
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "NVFLARE_POC_WORKSPACE": str(workspace)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its scripts start python3
    command = [sys.executable, "in_poc.py", "plan.yaml", "project.yml"]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    finally:
        end_what_runs_in(workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    (kits,) = workspace.glob("*/prod_00")
    (study,) = (kits / SERVER / "medsilo").iterdir()
    for site in PAIR:
        shutil.copytree(kits / site / "medsilo" / study.name / "sites" / site, study / "sites" / site)
    assert_same_outcome(tmp_path / "loop", study)


def end_what_runs_in(workspace: Path) -> None:
    """End processes of the proof of concept that did not stop: their command lines name its workspace."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(workspace) in part for part in process.info["cmdline"] or []):
            process.kill()
