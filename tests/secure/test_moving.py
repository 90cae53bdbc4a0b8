"""A server that stands up again from its backup, on another place: studies are there, expelled hospitals stay out."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from medsilo.check.kit import check_expelled, read_kit
from medsilo.cli import main
from medsilo.consortium.lead import connected
from medsilo.core.files import load_tensors, write_json
from medsilo.federation import inprocess
from medsilo.flare.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, SERVER, Consortium, provision, wait_until

STAYS, GOES = SITES[:2]
ADMIN = "admin@consortium.org"


def with_admin(file: Path, kits: Path) -> None:
    values = yaml.safe_load(file.read_text())
    values["people"].append({"name": ADMIN, "organisation": "consortium", "role": "project_admin"})
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    provision(file, kits)


@pytest.mark.slow
def test_a_restored_server_has_its_studies_and_keeps_expelled_hospitals_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = {STAYS: "teaching-hospital", GOES: "teaching-hospital"}
    consortium = Consortium(tmp_path, policies, with_admin)
    (consortium.kit(STAYS) / "local/medsilo.yaml").write_text("device: cpu\nisolation: false\n")
    lead, server, goes = consortium.kit(LEAD), consortium.kit(SERVER), consortium.kit(GOES)
    try:
        consortium.start()
        plan = make_plan("fedavg", "training.rounds=1", sites=[STAYS])
        inprocess.run(plan, folder=tmp_path / "loop")
        write_job(tmp_path / "job", plan)
        capsys.readouterr()
        assert main(["submit", str(tmp_path / "job"), "--kit", str(lead)]) == 0
        job = capsys.readouterr().out.strip()
        assert main(["status", job, "--watch", "--kit", str(lead)]) == 0
        assert list(check_expelled(read_kit(goes))) == []
        with connected(consortium.kit(ADMIN)) as session:
            session.disable_client(GOES)
        consortium.wait_for_log(GOES, "client_quit")
        (finding,) = check_expelled(read_kit(goes))
        assert finding.severity == "stops" and "may have expelled" in finding.what
        consortium.end(consortium.processes[GOES])
        consortium.start_party(GOES)
        consortium.wait_for_log(GOES, f"'{GOES}' is disabled")
        (finding,) = check_expelled(read_kit(goes))
        assert finding.severity == "stops" and "has expelled" in finding.what
        file = tmp_path / "backup/server.zip"
        assert main(["backup", str(server), "-o", str(file)]) == 0  # while it runs
        assert f"expelled: {GOES}" in capsys.readouterr().out and file.stat().st_mode & 0o077 == 0
        consortium.kill(SERVER)
        server.rename(tmp_path / "lost")
        (tmp_path / "storage").rename(tmp_path / "lost-storage")
        moved = tmp_path / "elsewhere" / SERVER
        assert main(["restore", str(file), "--kit", str(moved)]) == 0
        before = len(consortium.log(GOES))
        consortium.start_party(SERVER, moved)
        consortium.start_party(GOES)
        consortium.wait_for_log(GOES, f"'{GOES}' is disabled", before)
        wait_until(lambda: sites_of(lead) == {STAYS}, 60, "the hospital that stays")
        assert main(["fetch", job, "--kit", str(lead), "--out", str(tmp_path / "runs")]) == 0
        folders = (*(tmp_path / "runs").iterdir(), tmp_path / "loop")
        mine, theirs = (load_tensors(folder / "global/best.safetensors")[0] for folder in folders)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    finally:
        consortium.stop()


def sites_of(lead: Path) -> set[str]:
    with connected(lead) as session:
        return {client.name for client in session.get_system_info().client_info}


def test_a_backup_is_taken_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kit, storage = tmp_path / "kit", tmp_path / "storage"
    write_json(kit / "startup/fed_server.json", {})
    manager = {"id": "job_manager", "args": {"uri_root": str(storage / "jobs")}}
    write_json(kit / "local/resources.json", {"components": [manager]})
    write_json(kit / "medsilo/study/rounds.json", 1)
    write_json(storage / "jobs/one/meta", {})
    (kit / "startup/start.sh").write_text("exit")
    (kit / "startup/start.sh").chmod(0o700)
    file, new = tmp_path / "b.zip", tmp_path / "new"
    assert main(["backup", str(kit), "-o", str(file)]) == 0

    def restored(*more: str, of: Path = file) -> tuple[int, str]:
        code = main(["restore", str(of), "--kit", str(new), *more])
        return code, capsys.readouterr().err

    assert "not empty" in restored()[1] and not new.exists()  # the jobs are there still
    storage.rename(tmp_path / "away")
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], whole.replace(b"exit", b"rm x"), b"", whole.replace(b"kit/", b"../x")):
        (tmp_path / "broken.zip").write_bytes(broken)
        code, said = restored(of=tmp_path / "broken.zip")
        assert code == 1 and said.count("\n") == 1 and not new.exists() and not storage.exists()
    with zipfile.ZipFile(file) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    facts = json.loads(inside.pop("backup.json"))
    forged = [{"kit/../x": b""}, {"/x": b""}, {"other/x": b""}, {"kit/./x": b""}, {"kit/..": b""}, {"kit/\nx": b""}]
    for more in [*forged, {"storage": "there"}, {"expelled": ["a\nb"]}, {"made": "\x1b[2J"}, {"studies": ""}]:
        members = {} if {*more} & {*facts} else more
        with zipfile.ZipFile(tmp_path / "forged.zip", "w") as archive:
            for name, content in {**inside, **members}.items():
                archive.writestr(name, content)
            told = {**facts, "files": len(archive.namelist()), **({} if members else more)}
            archive.writestr("backup.json", json.dumps(told))
        code, said = restored(of=tmp_path / "forged.zip")
        assert code == 1 and said.count("\n") == 1 and not new.exists() and not storage.exists(), more
    assert restored("--expelled", "late")[0] == 0
    assert (new / "medsilo/study/rounds.json").read_text() == "1\n" and (storage / "jobs/one/meta").exists()
    assert (new / "startup/start.sh").stat().st_mode & 0o777 == 0o700 and '"late"' in (
        new / "disabled_clients.json"
    ).read_text()
    assert main(["backup", str(tmp_path), "-o", str(tmp_path / "c.zip")]) == 1
