"""Before a job starts, 'submit' reports hospitals that lack medsilo or have a different version of medsilo."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.core.package import ENGINE, ROOT, facts_of
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, Consortium

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]
OTHER, WITHOUT = SITES[0], SITES[2]


@pytest.fixture
def changed(consortium: Consortium, tmp_path: Path) -> Path:
    shutil.copytree(ROOT, tmp_path / "other/medsilo", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other/medsilo/__init__.py").write_text('__version__ = "0.0.9"\n')
    (tmp_path / "without/medsilo").mkdir(parents=True)
    (tmp_path / "without/medsilo/__init__.py").write_text("")
    return tmp_path


@pytest.mark.long
def test_another_version_or_none_is_refused_before_anything_starts(
    consortium: Consortium, changed: Path, tmp_path: Path
) -> None:
    def why_not(site: str) -> str:
        job = tmp_path / f"job-{site}"
        write_job(job, make_plan("fedavg", sites=[site]), study=job.name)
        with pytest.raises(MedsiloError) as refused:
            lead.submit(job, consortium.kit(LEAD), print)
        return str(refused.value)

    with (
        consortium.changed(OTHER, PYTHONPATH=changed / "other"),
        consortium.changed(WITHOUT, PYTHONPATH=changed / "without"),
        ThreadPoolExecutor() as pool,
    ):
        other, without = pool.map(why_not, (OTHER, WITHOUT))
    ours = facts_of(ENGINE)
    assert f"{OTHER} refused: runs medsilo 0.0.9 (" in other
    assert f"the server runs {ours['version']} ({ours['hash'][:12]})" in other
    assert not (consortium.kit(OTHER) / "medsilo" / f"job-{OTHER}").exists()
    assert WITHOUT in without and "(ModuleNotFoundError)" in without
    assert other.startswith("not started: ") and without.startswith("not started: ") and "\n" not in other + without
