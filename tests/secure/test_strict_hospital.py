"""No job can weaken a strict hospital's policies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from medsilo.flare.job_source import CONFIG
from medsilo.runs.reading import read_summary
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]
STRICT = SITES[1]
COMPONENT = "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    how(values)
    path.write_text(json.dumps(values))


def with_component(job: Path, path: str) -> None:
    entry = {"id": "more", "path": path, "args": {"events_to_convert": ["x"]}}
    change(job / CONFIG / "config_fed_client.json", lambda config: config["components"].append(entry))


def test_jobs_that_try_to_loosen_it(consortium: Consortium, tmp_path: Path) -> None:
    def job(name: str, method: str = "fedavg", sites: tuple[str, ...] = (STRICT,)) -> Path:
        write_job(tmp_path / name, make_plan(method, "training.rounds=1", sites=[*sites]), study=name)
        change(tmp_path / name / "meta.json", lambda meta: meta.update(deploy_map={"app": ["server", *sites]}))
        return tmp_path / name

    code = job("code")
    (code / "app/custom").mkdir()
    (code / "app/custom/anything.py").write_text("")
    scope = job("scope")
    change(scope / "meta.json", lambda meta: meta.update(scope="public"))
    outside = job("outside")
    with_component(outside, COMPONENT)
    odd = job("odd")
    with_component(odd, "medsilo.flare.executor.MedsiloExecutor; import os")
    gpus = job("gpus")
    wish = {STRICT: {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 1}}
    change(gpus / "meta.json", lambda meta: meta.update(resource_spec=wish))
    amplitude = job("amplitude", "harmofl", (SITES[0], STRICT))
    no_filters = {"task_result_filters": [], "task_data_filters": []}
    change(amplitude / CONFIG / "config_fed_client.json", lambda config: config.update(no_filters))

    session = consortium.session()
    try:
        ids = {path.name: session.submit_job(str(path)) for path in (code, scope, outside, odd, amplitude)}

        def over() -> bool:
            return all(str(session.get_job_status(job_id)).startswith("FINISHED") for job_id in ids.values())

        wait_until(over, 600, "five jobs to fail")
        metas = {name: session.get_job_meta(job_id) for name, job_id in ids.items()}
        assert {name: meta["status"] for name, meta in metas.items()} == {
            "code": "FINISHED:FAILED_TO_RUN",
            "scope": "FINISHED:FAILED_TO_RUN",
            "outside": "FINISHED:EXECUTION_EXCEPTION",
            "odd": "FINISHED:ABNORMAL",
            "amplitude": "FINISHED:EXECUTION_EXCEPTION",
        }
        assert f"{STRICT}: NVFLARE_ERROR: BYOC not permitted" in metas["code"]["job_deploy_detail"]
        assert f"{STRICT}: NVFLARE_ERROR: privacy scope 'public' is not allowed" in metas["scope"]["job_deploy_detail"]
        listed = {one.id: one.reasons() for one in lead.status(consortium.kit(LEAD)).jobs}
        assert f"  because: {STRICT}: NVFLARE_ERROR: BYOC not permitted" in listed[ids["code"]]
        log = (consortium.root / f"{STRICT}.log").read_text()
        assert f"Component '{COMPONENT}'" in log and "is not in allow_list" in log
        assert "must be a fully qualified dotted Python path" in log

        waiting = session.submit_job(str(gpus))
        wait_until(lambda: bool(session.get_job_meta(waiting).get("schedule_history")), 600, "the scheduler")
        assert "not enough sites have enough resources" in session.get_job_meta(waiting)["schedule_history"][0]
        session.abort_job(waiting)
        with pytest.raises(AuthorizationError):
            session.ls_target(STRICT)
    finally:
        session.close()

    summary = read_summary(consortium.kit(SERVER) / "medsilo/amplitude")
    assert summary.status == "failed"
    assert f"{STRICT} refused: a privacy filter" in summary.reason
    assert "this hospital does not send amplitude" in log
    kit = consortium.kit(STRICT)
    written = (kit / ids["amplitude"] / "audit.log").read_text()
    assert "does not send amplitude" in written
    # audit.log names the person who deployed each job, and the site's log states why each job ended
    written = (kit / "audit.log").read_text()
    assert written.count(f"[U:{LEAD}][A:train.deploy]") >= len(ids)
    assert SITES[0] in json.loads((consortium.kit(SERVER) / "medsilo/amplitude/rounds.jsonl").read_text())["answered"]
