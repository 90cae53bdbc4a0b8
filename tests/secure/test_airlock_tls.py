"""Over mutual TLS, a lead's script runs in the airlock of hospitals that demand an airlock, and runs in no other
process.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from medsilo.airlock.border import LEFT
from medsilo.airlock.room import ability
from medsilo.airlock.site import PRINTED
from medsilo.core.files import load_tensors
from medsilo.runs import paths
from medsilo.runs.reading import read_summary
from tests.attacks.hostile_scripts import CASES
from tests.attacks.hostile_scripts import HERE as HOSTILE
from tests.secure.consortium import SERVER, Consortium
from tests.secure.test_mutual_tls import run_both_ways
from tests.secure.test_scripts_tls import exported, studies

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("airlock over TLS"),
    pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces"),
]
HOSPITALS = ["hospital-1", "hospital-2"]
TRIED = (
    *("tcp", "unix", "proc_of_others", "kit", "environment", "nan", "wrong_names", "names_in_metrics", "pickles"),
    *("nvflare_send", "get_engine", "low_bits"),
)
EXPORTS = """
import torch
from torch import nn
from medsilo.recipes import FedAvgRecipe
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
FedAvgRecipe(name="hostile", model=model, min_clients=1, num_rounds=1, train_script="client.py").export("jobs")
"""
MARK = "open({mark!r}, 'a').write(open('/proc/self/cmdline').read())"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Start two hospitals that run a lead's code only in the airlock."""
    consortium = Consortium(tmp_path_factory.mktemp("airlock"), dict.fromkeys(HOSPITALS, "teaching-hospital"))
    for site in HOSPITALS:
        own = {"device": "cpu", "airlock": "required", "memory_limit": 4096, "public_data": True}
        own["room"] = {"studies": True}
        (consortium.kit(site) / "local" / "medsilo.yaml").write_text(json.dumps(own))
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def folder_of(consortium: Consortium, site: str, study: str) -> Path:
    return consortium.kit(site) / "medsilo" / study / "sites" / site


def test_a_stock_job_runs_in_rooms_and_nothing_of_it_elsewhere(guarded: Consortium, root: Path, tmp_path: Path) -> None:
    """The test adds a file to the job's folder; NVFlare's own process would run the code in this file."""
    before = studies(guarded)
    job = exported(root, tmp_path / "work", "FedBN", 2, HOSPITALS)
    mark = tmp_path / "ran"
    for app in (path for path in job.iterdir() if (path / "custom/client.py").is_file()):
        (app / "custom/sitecustomize.py").write_text(MARK.format(mark=str(mark)))
        config = json.loads((app / "config/config_fed_client.json").read_text())
        config["components"].append({"id": "mine", "path": "mine.Component", "args": {}})
        (app / "custom/mine.py").write_text(MARK.format(mark=str(mark)))
        (app / "config/config_fed_client.json").write_text(json.dumps(config))
    assert guarded.run(job) == "FINISHED:COMPLETED"
    (study,) = studies(guarded) - before
    ran = mark.read_text()
    assert "app.server.runner_process" in ran and "app.client" not in ran, ran
    for site in HOSPITALS:
        folder = folder_of(guarded, site, study)
        assert "round 2 of 2" in (folder / PRINTED).read_text()
        left = [json.loads(line) for line in (folder / LEFT).read_text().splitlines()]
        assert [line["task"] for line in left] == ["join", "round", "round", "deliver", "test"]
        tensors, _ = load_tensors(folder / paths.LAST)
        assert all(torch.isfinite(own).all() for own in tensors.values())


def test_a_study_of_medsilos_own_trains_in_rooms(guarded: Consortium, tmp_path: Path) -> None:
    run_both_ways(guarded, ["fedbn"], HOSPITALS, tmp_path)
    for site in HOSPITALS:
        left = folder_of(guarded, site, "secure-fedbn") / LEFT
        told = [json.loads(line)["task"] for line in left.read_text().splitlines()]
        assert told == ["join", "round", "round", "deliver", "test"]


@pytest.mark.long
@pytest.mark.parametrize("name", TRIED)
def test_a_hostile_script_over_tls(name: str, guarded: Consortium, tmp_path: Path) -> None:
    before, case, site, kit = studies(guarded), CASES[name], HOSPITALS[0], guarded.kit(HOSPITALS[0])
    shutil.copy(HOSTILE / f"{name}.py", tmp_path / "client.py")
    subprocess.run([sys.executable, "-c", EXPORTS], cwd=tmp_path, check=True, timeout=600)
    job = tmp_path / "jobs/hostile"
    (custom,) = (path.parent for path in job.glob("*/custom/client.py"))
    shutil.copy(HOSTILE / "lead.py", custom)
    pid = guarded.processes[site].pid
    mark, other = tmp_path / "mark", str(guarded.kit(HOSPITALS[1]))
    knows = {"KIT": str(kit), "OTHER": other, "PORT": guarded.port, "PID": pid, "MARK": str(mark)}
    knows["SOCKET"] = str(kit / "site.sock")
    (custom / "knows.py").write_text("".join(f"{word} = {value!r}\n" for word, value in knows.items()))
    meta = json.loads((job / "meta.json").read_text())
    app = custom.parent.name
    (job / "meta.json").write_text(json.dumps({**meta, "deploy_map": {app: ["server", site]}}))
    ended = guarded.run(job)
    (study,) = studies(guarded) - before
    summary = read_summary(guarded.kit(SERVER) / "medsilo" / study)
    printed = (folder_of(guarded, site, study) / PRINTED).read_text()
    assert not mark.exists() and not [line for line in printed.splitlines() if line.startswith("GOT")]
    if case.reason:
        assert ended != "FINISHED:COMPLETED" and case.reason in summary.reason
    else:
        assert ended == "FINISHED:COMPLETED", summary.reason
        left = [json.loads(line) for line in (folder_of(guarded, site, study) / LEFT).read_text().splitlines()]
        assert [line["task"] for line in left] == ["join", "round", "deliver", "test"]
    at_server = (path for path in (guarded.kit(SERVER) / "medsilo" / study).rglob("*") if path.is_file())
    assert name == "low_bits" or not [path for path in at_server if b"Miller" in path.read_bytes()]
