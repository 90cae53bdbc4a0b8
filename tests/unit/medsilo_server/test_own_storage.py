"""A server does not start on a folder of stored jobs that belongs to another server, and its backup is complete."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.private.event import fire_event
from nvflare.private.fed.app.utils import component_security_check

from medsilo.runs import event_reading
from medsilo_lab.consortium.backup import back_up, put_back
from medsilo_server.flare.own_storage import OWNER, OwnStorage
from tests.unit.medsilo_lab.test_provision import kits_of


def server(folder: Path, storage: Path, *, renew: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    kits_of(folder, lambda values: values["server"].update(storage=str(storage)), renew=renew)
    return folder / "kits/localhost"


def start(kit: Path) -> None:
    """Prepare the server as NVFlare's ServerDeployer does before jobs run."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), "server", "startup"), private=True, sticky=False)
    fire_event(EventType.SYSTEM_BOOTSTRAP, [OwnStorage()], fl_ctx)
    component_security_check(fl_ctx)


def test_a_second_server_does_not_start_on_the_first_ones_jobs(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    first, second = server(tmp_path / "first", storage), server(tmp_path / "second", storage)
    start(first)
    start(first)
    with pytest.raises(RuntimeError, match=r"belong to another server, 'localhost'.*server\.storage"):
        start(second)
    (line,) = (line.split("\t") for line in event_reading.read(second))
    assert line[1:3] == ["WARNING", "failed"] and str(storage) not in line[6]
    start(first)
    (storage / OWNER).write_bytes(b"\xff")
    with pytest.raises(RuntimeError, match="is damaged"):
        start(first)


def test_a_renewed_and_a_restored_server_keep_their_jobs(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    kit = server(tmp_path / "kits", storage)
    start(kit)
    (storage / "jobs").mkdir()
    (storage / "jobs/meta").write_text("{}")
    start(server(tmp_path / "kits", storage, renew=("localhost",)))
    back_up(kit, tmp_path / "server.zip")
    put_back(tmp_path / "server.zip", tmp_path / "moved", tmp_path / "elsewhere")
    start(tmp_path / "moved")
    assert (tmp_path / "elsewhere" / OWNER).read_bytes() == (storage / OWNER).read_bytes()
    resources = json.loads((tmp_path / "moved/local/resources.json").read_text())
    assert "medsilo_server.flare.own_storage.OwnStorage" in [one.get("path") for one in resources["components"]]


def test_a_backup_contains_a_file_that_replaced_another_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, write = server(tmp_path / "kits", tmp_path / "storage"), zipfile.ZipFile.write
    (kit / "local/state-1").write_text("1")

    def replacing(archive: zipfile.ZipFile, path: Path, name: Any) -> None:
        if path.name == "state-1":
            path.rename(path.with_name("state-2"))
        write(archive, path, name)

    monkeypatch.setattr(zipfile.ZipFile, "write", replacing)
    kept = back_up(kit, tmp_path / "server.zip")
    with zipfile.ZipFile(tmp_path / "server.zip") as archive:
        names = archive.namelist()
    assert "kit/local/state-2" in names and "kit/local/state-1" not in names and kept.files == len(names) - 1
