"""The self-contained form of a job runs in NVFlare's own simulator without medsilo installed, with equal numbers."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from medsilo.federation import inprocess
from medsilo.flare.jobs import pack, write_job
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome


@pytest.fixture(scope="module")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A Python with every dependency and without medsilo."""
    place = tmp_path_factory.mktemp("foreign")
    venv.create(place, with_pip=False, symlinks=True)
    # Folders on PYTHONPATH don't have their .pth files read, so an editable install of medsilo stays invisible.
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    python = str(place / "bin" / "python")
    done = subprocess.run(
        [python, "-c", "import medsilo"], env=environment, capture_output=True, cwd=place, check=False
    )
    assert done.returncode != 0
    return python, environment


@pytest.mark.slow
def test_bare_simulator_runs_a_packed_job(foreign_python: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    python, environment = foreign_python
    plan = make_plan("fedbn")
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "plain", plan)
    job = pack(tmp_path / "plain", tmp_path / "packed", with_code=True)
    workspace = tmp_path / "workspace"
    command = [
        python,
        "-m",
        "nvflare.cli",
        "simulator",
        str(job),
        "-w",
        str(workspace),
        "-c",
        ",".join(SITES),
        "-t",
        "3",
    ]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    (study,) = (workspace / "server" / "medsilo").iterdir()
    for site in SITES:  # each party kept its own; gather them as `medsilo run` would have
        shutil.copytree(workspace / site / "medsilo" / study.name / "sites" / site, study / "sites" / site)
    assert_same_outcome(tmp_path / "loop", study)


@pytest.mark.long
@pytest.mark.slow
def test_a_stale_package_at_a_site_is_refused(tmp_path: Path) -> None:
    """The job carries another version of the package than the one that is installed and wins."""
    plan = make_plan("fedavg")
    write_job(tmp_path / "plain", plan)
    job = pack(tmp_path / "plain", tmp_path / "packed", with_code=True)
    package = tmp_path / "stale" / "medsilo"
    shutil.copytree(job / "app" / "custom" / "medsilo", package)
    (package / "__init__.py").write_text('"""An old release."""\n\n__version__ = "0.0.9"\n')
    # site-level code comes before the job's, as a stale install in a hospital's kit would
    (job / "app" / "custom" / "stale_site.py").write_text(STALE.format(path=str(package.parent)))
    config = job / "app" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("medsilo.flare.executor.MedsiloExecutor", "stale_site.Stale"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "custom")}
    command = [sys.executable, "-m", "medsilo.cli", "run", str(job), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "runs medsilo 0.0.9" in done.stderr and "hospital-a" in done.stderr


STALE = """
import sys

if "hospital" in " ".join(sys.argv) and "--client" in sys.argv:
    for name in [name for name in sys.modules if name.startswith("medsilo")]:
        del sys.modules[name]
    sys.path.insert(0, "{path}")

from medsilo.flare.executor import MedsiloExecutor


class Stale(MedsiloExecutor):
    pass
"""
