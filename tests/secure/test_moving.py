"""A server that is restored from a backup in another folder keeps its studies, and still excludes expelled
hospitals.
"""

import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from medsilo.check.kit import check_expelled, read_kit
from medsilo.cli import main
from medsilo.core.files import load_tensors, write_json
from medsilo.flare.leftovers import storage_of, studies_of
from medsilo.runs import event_reading
from medsilo.runs.reading import read_summary
from medsilo_lab.consortium import lead as lead_of
from medsilo_lab.consortium.lead import connected
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.conftest import TEACHING, running
from tests.secure.consortium import LEAD, SERVER, Consortium, provision, wait_until
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

STAYS, GOES = SITES[:2]
ADMIN = "admin@consortium.org"


def with_admin(file: Path, kits: Path) -> None:
    values = yaml.safe_load(file.read_text())
    values["people"].append({"name": ADMIN, "organisation": "consortium", "role": "project_admin"})
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    provision(file, kits)


@pytest.mark.long
def test_a_restored_server_has_its_studies_and_keeps_expelled_hospitals_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = dict.fromkeys((STAYS, GOES), TEACHING)
    consortium = Consortium(tmp_path, policies, with_admin)
    (consortium.kit(STAYS) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
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
        assert main(["kits", "backup", str(server), "-o", str(file)]) == 0  # the server keeps running during the backup
        assert f"expelled: {GOES}" in capsys.readouterr().out and file.stat().st_mode & 0o077 == 0
        consortium.kill(SERVER)
        server.rename(tmp_path / "lost")
        (tmp_path / "storage").rename(tmp_path / "lost-storage")
        moved = tmp_path / "elsewhere" / SERVER
        assert main(["kits", "restore", str(file), "--kit", str(moved)]) == 0
        assert (moved / "storage/jobs").is_dir() and not (tmp_path / "storage").exists()
        before = len(consortium.log(GOES))
        consortium.start_party(SERVER, moved)
        consortium.start_party(GOES)
        consortium.wait_for_log(GOES, f"'{GOES}' is disabled", before)
        wait_until(lambda: sites_of(lead) == {STAYS}, 60, "the hospital that stays")
        assert main(["download", job, "--kit", str(lead), "--out", str(tmp_path / "runs")]) == 0
        folders = (*(tmp_path / "runs").iterdir(), tmp_path / "loop")
        mine, theirs = (load_tensors(folder / "global/best.safetensors")[0] for folder in folders)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    finally:
        consortium.stop()


@pytest.mark.long
@pytest.mark.parametrize("behind", [{}, {"city": [GOES]}], ids=["its own line", "behind a relay"])
def test_a_hospital_that_is_expelled_is_out_of_the_running_study_at_once(
    behind: dict[str, list[str]], tmp_path: Path
) -> None:
    """An expelled hospital receives and sends no further messages. After the exclusion, all remaining hospitals are
    informed, and the study continues as its plan specifies.
    """
    consortium = Consortium(tmp_path, dict.fromkeys((STAYS, GOES), TEACHING), with_admin, behind)
    server, goes = consortium.kit(SERVER), consortium.kit(GOES)
    for site in (STAYS, GOES):
        (consortium.kit(site) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    changes = ["training.rounds=4000", "participation.when_missing=continue", "participation.minimum=1"]
    write_job(tmp_path / "job", make_plan("fedavg", *changes, sites=[STAYS, GOES]), study="expels")
    record = Record(server / "medsilo/expels")

    def told(party: Path, of: str = "") -> list[tuple[str, str, str]]:
        lines = [line.split("\t") for line in event_reading.read(party, of)]
        return [(columns[2], columns[3], columns[6]) for columns in lines]

    def of_its_job() -> bool:
        return bool(consortium.family(GOES, "client.worker_process"))

    try:
        consortium.start()
        job = lead_of.submit(tmp_path / "job", consortium.kit(LEAD), print)
        wait_until(lambda: len(record.rounds()) >= 3 and record.rounds()[-1].answered == [STAYS, GOES], 120, "round 3")
        with connected(consortium.kit(ADMIN)) as session:
            at = len(record.rounds())
            session.disable_client(GOES)
        wait_until(lambda: record.rounds()[-1].answered == [STAYS], 15, "a round without it")
        without = next(line for line in record.rounds()[at:] if line.answered == [STAYS])
        assert without.refused == {GOES: "the consortium expelled it"}
        wait_until(lambda: not of_its_job(), 60, "the end of its process for the job")
        wait_until(
            lambda: any("expelled" in text for what, _, text in told(goes) if what == "refused"), 60, "its event"
        )
        assert ("away", GOES, "the consortium expelled it") in told(server)
        refused = [text for what, who, text in told(server, "expels") if (what, who) == ("refused", GOES)]
        assert len(refused) == 1 and "expelled" in refused[0]
        (doing,) = [one for one in lead_of.status(consortium.kit(LEAD)).hospitals if one.name == GOES]
        assert not doing.connected and "expelled" in doing.line()
        consortium.kill(GOES)
        before = len(consortium.log(GOES))
        consortium.start_party(GOES)
        consortium.wait_for_log(GOES, f"'{GOES}' is disabled", before)
        now = len(record.rounds())
        wait_until(lambda: len(record.rounds()) > now + 3, 60, "three more rounds")
        assert all(line.answered == [STAYS] for line in record.rounds()[without.round :]) and not of_its_job()
        began = time.monotonic()
        lead_of.cancel(job, consortium.kit(LEAD), print)
        assert time.monotonic() - began < 60  # the server does not wait for the hospital's report
    finally:
        consortium.stop()


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    yield from running("losing", dict.fromkeys((STAYS, GOES), TEACHING), tmp_path_factory)


@pytest.mark.long
@pytest.mark.xdist_group("losing")
@pytest.mark.parametrize("method", ["fedbn", "fedsm", "adafed"])
def test_a_study_goes_on_in_a_server_that_was_restored_in_its_middle(
    method: str, losing: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's backup is from round 10, and the hospitals have trained later rounds. The hospitals return to round
    10, and report this return.
    """
    server, lead, rounds = losing.kit(SERVER), losing.kit(LEAD), 30
    plan = make_plan(method, "task.persons=6", f"training.rounds={rounds}", sites=losing.hospitals)
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study=method)
    record = Record(server / "medsilo" / method)
    job = lead_of.submit(tmp_path / "job", lead, print)

    def done() -> int:
        # reads only the names of the files, because the server may remove a file before its content is read
        saved = record.checkpoints.glob("round-*.safetensors")
        return max((int(path.stem.removeprefix("round-")) for path in saved), default=0)

    wait_until(lambda: done() >= 10, 240, "the tenth round", every=0.01)
    (process,) = losing.family(SERVER, "runner_process")
    process.suspend()  # all files of a nightly backup must be of one moment, so the server is suspended
    assert done() == 10 and main(["kits", "backup", str(server), "-o", str(tmp_path / "night.zip")]) == 0
    process.resume()
    wait_until(lambda: done() >= 14, 240, "some rounds more", every=0.01)
    losing.kill(SERVER)
    shutil.rmtree(server)
    shutil.rmtree(losing.root / "storage", ignore_errors=True)
    assert main(["kits", "restore", str(tmp_path / "night.zip"), "--kit", str(server)]) == 0
    assert done() == 10
    losing.start_party(SERVER)
    losing.await_hospitals()
    capsys.readouterr()
    assert main(["resume", job, "--kit", str(lead)]) == 0
    assert ended(lead, capsys.readouterr().out.strip()) == "FINISHED:COMPLETED"
    assert_same_outcome(tmp_path / "loop", gathered(losing, method, losing.hospitals, tmp_path / "secure"))
    for site in losing.hospitals:
        (words,) = read_summary(tmp_path / "secure").sites[site].warnings["11"]
        assert "went back to round 10" in words and "after round 10" in words


def sites_of(lead: Path) -> set[str]:
    with connected(lead) as session:
        return {client.name for client in session.get_system_info().client_info}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    kit, storage = tmp_path / "kit", tmp_path / "storage"
    write_json(kit / "startup/fed_server.json", {})
    manager = {"id": "job_manager", "args": {"uri_root": str(storage / "jobs")}}
    persistor = {"storage": {"args": {"root_dir": str(storage / "snapshots")}}}
    write_json(kit / "local/resources.json", {"components": [manager], "snapshot_persistor": {"args": persistor}})
    write_json(kit / "local/hospitals.json", {"hospitals": ["st-anna", "late"]})
    (kit / "medsilo.service").write_text(
        f"WorkingDirectory=/srv/medsilo/fl\nReadWritePaths=/srv/medsilo/fl {storage}\n"
    )
    write_json(kit / "medsilo/study/rounds.json", 1)
    (kit / "medsilo/study/rounds.jsonl").write_text('{"round": 1, "asked": ["in-a-study"]}\n')
    write_json(storage / "jobs/one/meta", {"deploy_map": {"app": ["server", "in-a-job"]}})
    (kit / "startup/start.sh").write_text("exit")
    (kit / "startup/start.sh").chmod(0o700)
    return kit


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_backup_is_taken_whole_or_not_at_all(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "b.zip", tmp_path / "new"
    assert main(["kits", "backup", str(server), "-o", str(file)]) == 0

    def restored(*more: str, of: Path = file) -> tuple[int, str]:
        code = main(["kits", "restore", str(of), "--kit", str(new), *more])
        return code, capsys.readouterr().err

    assert "not empty" in restored("--storage", str(tmp_path / "storage"))[1] and not new.exists()
    whole, before = file.read_bytes(), {path.name for path in tmp_path.iterdir()}
    for broken in (whole[: len(whole) // 2], whole.replace(b"exit", b"rm x"), b"", whole.replace(b"kit/", b"../x")):
        (tmp_path / "broken.zip").write_bytes(broken)
        code, said = restored(of=tmp_path / "broken.zip")
        assert code == 1 and said.count("\n") == 1 and not new.exists()
    with zipfile.ZipFile(file) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    facts = json.loads(inside.pop("backup.json"))
    forged = [{"kit/../x": b""}, {"/x": b""}, {"other/x": b""}, {"kit/./x": b""}, {"kit/..": b""}, {"kit/\nx": b""}]
    forged += [{"kit/storage/x": b""}]
    for more in [*forged, {"storage": "there"}, {"expelled": ["a\nb"]}, {"made": "\x1b[2J"}, {"studies": ""}]:
        members = {} if {*more} & {*facts} else more
        with zipfile.ZipFile(tmp_path / "forged.zip", "w") as archive:
            for name, content in {**inside, **members}.items():
                archive.writestr(name, content)
            told = {**facts, "files": len(archive.namelist()), **({} if members else more)}
            archive.writestr("backup.json", json.dumps(told))
        code, said = restored(of=tmp_path / "forged.zip")
        assert code == 1 and said.count("\n") == 1 and not new.exists(), more
    assert {path.name for path in tmp_path.iterdir()} == before | {"broken.zip", "forged.zip"}
    assert restored("--expelled", "late")[0] == 0
    assert (new / "medsilo/study/rounds.json").read_text() == "1\n"
    assert (new / "startup/start.sh").stat().st_mode & 0o777 == 0o700 and '"late"' in (
        new / "disabled_clients.json"
    ).read_text()
    assert main(["kits", "backup", str(tmp_path), "-o", str(tmp_path / "c.zip")]) == 1


@pytest.mark.parametrize("outside", [False, True])
def test_a_restored_server_lies_in_the_folders_that_were_named(outside: bool, server: Path, tmp_path: Path) -> None:
    """The backup includes job folders and studies outside of the kit."""
    (tmp_path / "elsewhere").mkdir()
    if outside:
        (server / "medsilo").rename(tmp_path / "elsewhere/studies")
        (server / "local/medsilo.yaml").write_text(f"output: {tmp_path}/elsewhere/studies\n")
    assert main(["kits", "backup", str(server), "-o", str(tmp_path / "b.zip")]) == 0
    before, there = {path.name for path in tmp_path.iterdir()}, files_below(tmp_path)
    for kit, jobs in ((tmp_path / "one", []), (tmp_path / "two", ["--storage", str(tmp_path / "jobs-of-two")])):
        assert main(["kits", "restore", str(tmp_path / "b.zip"), "--kit", str(kit), *jobs]) == 0
        storage = Path(jobs[1]) if jobs else kit / "storage"
        before |= {kit.name} | ({storage.name} if jobs else set())
        assert {path.name for path in tmp_path.iterdir()} == before
        assert storage_of(kit) == storage and (storage / "jobs/one/meta").exists()
        assert str(storage / "snapshots") in (kit / "local/resources.json").read_text()
        unit = f"WorkingDirectory={kit}\nReadWritePaths={kit} {storage}\n"
        assert (kit / "medsilo.service").read_text() == unit
        assert studies_of(kit).is_relative_to(kit) and (studies_of(kit) / "study/rounds.json").exists()
        again = tmp_path / f"again-{kit.name}"
        assert main(["kits", "backup", str(kit), "-o", str(tmp_path / f"{kit.name}.zip")]) == 0
        assert main(["kits", "restore", str(tmp_path / f"{kit.name}.zip"), "--kit", str(again)]) == 0
        assert (again / "storage/jobs/one/meta").exists() and (studies_of(again) / "study/rounds.json").exists()
        before |= {again.name, f"{kit.name}.zip"}
    assert {name: content for name, content in files_below(tmp_path).items() if name in there} == there


def test_only_hospitals_that_the_backup_knows_are_expelled(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """medsilo rejects a mistyped name, because the hospital that should be expelled would stay admitted."""
    assert main(["kits", "backup", str(server), "-o", str(tmp_path / "b.zip")]) == 0
    restored = ["kits", "restore", str(tmp_path / "b.zip"), "--kit", str(tmp_path / "new")]
    for wrong in ("st-ana", "server"):
        assert main([*restored, "--expelled", wrong]) == 1
        said = capsys.readouterr().err
        assert f"'{wrong}'" in said and "known: in-a-job, in-a-study, late, st-anna." in said
        assert "disable_client" in said
    assert not (tmp_path / "new").exists()
    assert main([*restored, *(word for name in ("st-anna", "in-a-study") for word in ("--expelled", name))]) == 0
    assert json.loads((tmp_path / "new/disabled_clients.json").read_text()) == {
        "disabled_clients": ["in-a-study", "st-anna"]
    }
