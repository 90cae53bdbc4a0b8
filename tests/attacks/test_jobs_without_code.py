"""Submit jobs without code to the real server; an NVFlare class in these jobs changes a hospital's files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.runs.reading import read_summary
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import SERVER, Consortium
from tests.secure.test_strict_hospital import change

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("jobs-without-code")]
SITE = SITES[0]
# an NVFlare class that writes and deletes a file; the job chooses the file's name
RELAY = "nvflare.app_common.widgets.metric_relay.MetricRelay"
SETTINGS = "device: cpu\napproval: required\n"
LAXER = "device: cpu\n"


@pytest.fixture(scope="module")
def wary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Start a hospital with the class list of site_configs/teaching-hospital. The hospital accepts no code, and runs a
    plan only after approving the plan.
    """
    wary = Consortium(tmp_path_factory.mktemp("wary"), {SITE: "teaching-hospital"})
    local = wary.kit(SITE) / "local"
    (local / "medsilo.yaml").write_text(SETTINGS)
    change(local / "authorization.json", lambda own: own["permissions"]["lead"].update(byoc="none"))
    try:
        wary.start()
        yield wary
    finally:
        wary.stop()


@pytest.fixture(scope="module")
def attacked(wary: Consortium, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("attack")
    return [wary.run(each) for each in (deleting(folder, "attack", "local/medsilo.yaml"), job(folder, "refused"))]


def job(folder: Path, name: str, *components: dict) -> Path:
    write_job(folder / name, make_plan("fedavg", "training.rounds=1", sites=[SITE]), study=name)
    change(folder / name / "meta.json", lambda meta: meta.update(deploy_map={"app": ["server", SITE]}))
    config = folder / name / "app/config/config_fed_client.json"
    change(config, lambda own: own["components"].extend(components))
    return folder / name


def deleting(folder: Path, name: str, *files: str) -> Path:
    return job(
        folder,
        name,
        *(
            {"id": f"relay-{number}", "path": RELAY, "args": {"bootstrap_file_name": f"../../../{file}"}}
            for number, file in enumerate(files)
        ),
    )


def why(consortium: Consortium, study: str) -> str:
    return read_summary(consortium.kit(SERVER) / "medsilo" / study).reason


def test_no_class_that_the_examples_list_reaches_the_hospitals_settings(wary: Consortium, attacked: list[str]) -> None:
    assert "FINISHED:COMPLETED" not in attacked
    assert (wary.kit(SITE) / "local/medsilo.yaml").read_text() == SETTINGS
    assert f"Component '{RELAY}'" in wary.log(SITE) and "is not in allow_list" in wary.log(SITE)
    assert "has not approved plan" in why(wary, "refused")


@pytest.mark.long
@pytest.mark.usefixtures("attacked")
def test_a_hospital_whose_settings_vanish_or_change_runs_nothing(wary: Consortium, tmp_path: Path) -> None:
    local = wary.kit(SITE) / "local"
    resources = local / "resources.json"
    before = resources.read_text()
    change(resources, lambda own: own["class_allow_list"].append("nvflare.app_common.widgets."))
    try:
        assert wary.run(deleting(tmp_path, "deletes", "local/medsilo.yaml")) != "FINISHED:COMPLETED"
        assert not (local / "medsilo.yaml").exists()
        assert wary.run(job(tmp_path, "without")) != "FINISHED:COMPLETED"
        assert "medsilo.yaml (missing)" in why(wary, "without")
        (local / "medsilo.yaml").write_text(LAXER)
        assert wary.run(job(tmp_path, "laxer")) != "FINISHED:COMPLETED"
        assert "changed" in why(wary, "laxer")
    finally:
        resources.write_text(before)
        (local / "medsilo.yaml").write_text(SETTINGS)
    assert wary.run(job(tmp_path, "again")) != "FINISHED:COMPLETED"
    assert "has not approved plan" in why(wary, "again")
    assert json.loads(before)["class_allow_list"]
