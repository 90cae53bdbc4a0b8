"""tests/nvflare_names.py lists all NVFlare names that medsilo uses, and the installed NVFlare has all these names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nvflare
import pytest

from medsilo.core.package import PLACE, ROOT
from medsilo_lab.jobs import canonical_job
from tests.conftest import make_plan
from tests.nvflare_names import (
    KEYS,
    KNOW_NVFLARE,
    MODULES,
    PATHS,
    RECORDED,
    lost_keys,
    stands,
    texts_of_nvflare,
    used,
)
from tests.nvflare_uses import Uses, uses_of

# Attributes of NVFlare's internal objects, and all names with a leading underscore.
INNER = {"RxTask", "blob_cb", "byte_receiver", "byte_streamer", "client_tasks", "command_agent", "communicator"}
INNER |= {"core_cell", "job_runner", "max_blob_size", "requests_dict"}
SET = {f"apis.controller_spec.ClientTask.{of}" for of in ("result", "task.data", "task.name")}
USES = json.loads(RECORDED.read_text("utf-8"))
OURS = {"id", "name", "app"}


@pytest.mark.parametrize("module", sorted({use.rpartition(".")[0] for use in USES}))
def test_what_we_use_of_nvflare_is_there(module: str) -> None:
    own = [use for use in USES if use.rpartition(".")[0] == module]
    assert [use for use in own if not stands(use)] == []


@pytest.mark.parametrize("path", PATHS)
def test_a_class_that_our_files_name_is_there(path: str) -> None:
    assert stands(f"{MODULES}.{path}")


@pytest.mark.long
def test_the_keys_of_files_still_mean_something() -> None:
    assert list(lost_keys(texts_of_nvflare())) == []


# --------------------------------------------------------------------------------------------- completeness of the list
def test_every_use_is_in_the_list_and_every_line_of_the_list_is_used() -> None:
    assert len(USES) > 150 and set(USES) == used(), "python -m tests.nvflare_names --write"


def is_inner(use: str) -> bool:
    parts = use.split(".")
    return parts[1] == "private" or any(part in INNER or re.match("_[a-z]", part) for part in parts)


def test_inner_parts_are_touched_in_one_file() -> None:
    """medsilo uses NVFlare's internal attributes only in patches, each of which an issue for NVFlare's maintainers
    describes.
    """
    files = [path for room in KNOW_NVFLARE for path in (PLACE / room).glob("*.py")]
    inner = {path.name for path in files if any(map(is_inner, uses_of(path)))}
    assert inner == {"kit_patches.py", "patches.py"}
    setting = {use for path in files if path.name not in inner for use in Uses(path).set}
    assert {use.removeprefix(f"{MODULES}.") for use in setting} <= SET


def test_a_new_use_is_found(tmp_path: Path) -> None:
    source = tmp_path / "new.py"
    source.write_text(
        "from nvflare.apis.fl_context import FLContext\n"
        "from nvflare.apis.fl_component import FLComponent\n\n\n"
        "class Own(FLComponent):\n"
        "    def handle_event(self, event: str, fl_ctx: FLContext) -> None:\n"
        "        names = [client.token for client in fl_ctx.get_engine().get_clients()]\n"
        "        self.log_debug(fl_ctx, str(names))\n"
    )
    found = {use.removeprefix("nvflare.apis.") for use in uses_of(source)}
    assert found == {
        "fl_component.FLComponent.handle_event",
        "fl_component.FLComponent.log_debug",
        "fl_context.FLContext.get_engine.get_clients.token",
    }


def test_every_key_of_a_job_and_of_a_kit_is_in_the_list(root: Path) -> None:
    known = {key.text for key in KEYS} | OURS
    plan = make_plan("fedavg")
    assert {
        key.removeprefix("tensor_") for content in canonical_job(plan).values() for key in keys_of(content)
    } <= known
    files = [path.read_text() for path in root.glob("site_configs/*/resources.json")]
    assert {key for text in files for key in json.loads(text)} <= known | {"client"}
    described = (ROOT.parent / "medsilo_lab/consortium/description.py").read_text()
    named = {*re.findall(r"nvflare\.([\w.]+\.[A-Z]\w+)", "".join(files))}
    named |= {f"lighter.impl.{part}" for part in re.findall(r"\{room\}\.([\w.]+)", described)}
    assert named == set(PATHS)


def keys_of(value: object) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return set()


# ---------------------------------------------------------------------------------------------------- a seeded break
@pytest.mark.long
def test_a_name_that_nvflare_renamed_is_named(root: Path, tmp_path: Path) -> None:
    broken = {
        "add_job_audit_event": "apis.utils.fl_context_utils.add_job_audit_event",
        "get_startup_kit_dir": "apis.workspace.Workspace.get_startup_kit_dir",
    }
    installed = Path(str(nvflare.__file__)).parent
    shutil.copytree(installed, tmp_path / "nvflare", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "nvflare").rglob("*.py"):
        text = path.read_text("utf-8")
        if any(name in text for name in broken):
            path.write_text(re.sub(rf"\b({'|'.join(broken)})\b", r"\1_now", text), "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT.parent), str(root)])}
    command = [sys.executable, "-m", "tests.nvflare_names"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(broken), "what was not renamed still stands"
    assert {f"{MODULES}.{name}" for name in broken.values()} == set(lines)
