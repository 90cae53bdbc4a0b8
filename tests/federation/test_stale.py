"""A site with another version of medsilo than the server's is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import medsilo
from medsilo.flare.jobs import CUSTOM, write_job
from tests.conftest import make_plan


@pytest.mark.long
@pytest.mark.slow
def test_a_stale_package_at_a_site_is_refused(tmp_path: Path) -> None:
    """The site has another version of the package before the one that is installed, as a stale kit would."""
    plan, job = make_plan("fedavg"), tmp_path / "job"
    write_job(job, plan)
    package = tmp_path / "stale" / "medsilo"
    shutil.copytree(Path(medsilo.__file__).parent, package)
    (package / "__init__.py").write_text('"""An old release."""\n\n__version__ = "0.0.9"\n')
    (job / CUSTOM).mkdir()
    (job / CUSTOM / "stale_site.py").write_text(STALE.format(path=str(package.parent)))
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
