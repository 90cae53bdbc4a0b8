"""List all functions that remove, move or replace files, and the files that each function may remove.

No function removes a person's results. A new function that removes files needs an entry in the list.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.core.errors import MedsiloError
from medsilo.site.settings import SiteSettings
from medsilo_lab.engines import simulator
from tests.conftest import make_plan
from tests.sources import tree_of

NAMES = {"rmtree", "unlink", "rmdir", "removedirs", "remove", "rename", "renames", "move", "replace"}
OF_PATHS = {
    "os",
    "shutil",
}

# Each key has a file below custom/ and a function; the key's value names the files that the function may remove or
# replace.
MAY: dict[tuple[str, str], str] = {
    # Atomic writes replace a whole file, so a failed write leaves no partial file.
    ("medsilo/core/files.py", "replacing"): "the file that is written anew, and its own temporary one",
    ("medsilo/core/files.py", "write_passing"): "the file that is written anew: progress, of use for moments",
    ("medsilo/core/files.py", "sweep"): "half-written files in folders of this run alone",
    (
        "medsilo_lab/deploy/image_files.py",
        "write_mask",
    ): "its own temporary file; a mask that was there is refused before",
    ("medsilo_server/record.py", "Record.keep_as_best"): "its own temporary file, which becomes the best checkpoint",
    ("medsilo_lab/testing/tasks.py", "TaskTester.test_a_hospital_without_its_data_has_one_line"): "data that it wrote",
    # medsilo may remove cached files, because the original files are in another place; a cached file's name is its
    # SHA-256.
    ("medsilo/core/weight_cache.py", "keep"): "the oldest files that were sent for networks, beyond 20 GiB",
    ("medsilo/core/weight_cache.py", "keep_beside"): "the same file under the same hash",
    # Files that a run needs to continue are removed only when the run ends or starts anew.
    ("medsilo_lab/engines/simulator.py", "run"): "what this call made itself, where the run did not even begin",
    (
        "medsilo_lab/engines/simulator_workspace.py",
        "keep_finished",
    ): "nothing: a finished study of a recipe goes beside the workspace that NVFlare empties",
    ("medsilo_lab/engines/simulator.py", "resume"): "the summary of a run that did not end, before it goes on",
    ("medsilo_server/record.py", "Record.make_way"): "a run that no site had to train for",
    ("medsilo_server/record.py", "Record.tell_now"): "the progress of a run that has ended",
    ("medsilo_server/record.py", "Record.save_checkpoint"): "checkpoints before one that is whole, but the best",
    ("medsilo/federation/site_state.py", "SiteState.save"): "states that no round may ask for again",
    ("medsilo/federation/site_state.py", "StatusFile.answering"): "the progress of an answer that is made",
    ("medsilo_lab/study/cells.py", "_discard"): "a run of this very plan that did not end and can't go on",
    ("medsilo_lab/study/cells.py", "run_cell"): "checkpoints and states of a run that has ended well",
    ("medsilo/deploy/supermodel.py", "SuperModel.save"): "the super model of the same folder: its manifest first, and "
    "personal models of hospitals that agree no more",
    # A person requests a removal after the command has listed the files.
    ("medsilo/runs/clean.py", "OldFile.remove"): "what 'medsilo prune' listed, with --yes, but a job's audit.log",
    # a hospital's own records
    ("medsilo/site/query_budget.py", "QueryBudget._running"): "the mark of a study whose process is gone",
    ("medsilo/site/approvals.py", "Approvals.keep"): "plans that asked, without a decision, but the last ones",
    ("medsilo/runs/events.py", "_append"): "the oldest of a kit's files of events, as many as there may be",
    ("medsilo/runs/events.py", "_write"): "the count of refusals, when none is counted any more",
    # jobs with code, in NVFlare's folder of the job
    ("nvflare_reliability/kit_patches.py", "AskingDeployer.deploy"): "what it unpacked of a job that may not start",
    (
        "medsilo/flare/airlock_executor.py",
        "take_code_away",
    ): "nothing: what a job brought lies in a folder of its own",
    ("medsilo/airlock/group.py", "Group.remove"): "the control group of its own room, which is no file",
    ("medsilo/airlock/group.py", "_remove_old"): "control groups of rooms whose process was killed",
    ("medsilo_lab/engines/tensorboard.py", "_EventFiles._write_before"): "the run's event files, to write all rounds",
    ("medsilo/airlock/site.py", "RoomSite._forget"): "files that a script kept with the site, and names no more",
    ("medsilo/site/job_code.py", "drop_code"): "code of jobs that nobody approved, but of the last ones",
    ("medsilo_lab/consortium/provision.py", "provision"): "its own draft; of a kit that --renew names startup-before/",
    ("medsilo_lab/consortium/provision.py", "_replace"): "startup/ of a kit that --renew names, when the new one lies "
    "beside it, and its own copies",
    ("medsilo_lab/consortium/provision.py", "_replace_file"): "connections in local/ of such a kit that it has no more",
    ("medsilo_lab/consortium/backup.py", "put_back"): "its own unpacked files, which become a new kit",
    ("medsilo_lab/consortium/lead.py", "download"): "its own download, which becomes a new run folder",
    ("medsilo_lab/release/release_pages.py", "remove_earlier"): "the page and pictures of an earlier validation there",
    ("medsilo_lab/release/release_folder.py", "write_release"): "the folder that this call made, where it failed",
}


@pytest.mark.xdist_group("house rules")  # the tests of this group read the same files
def test_each_place_that_removes_or_replaces_files_is_in_the_table(root: Path) -> None:
    found = {
        (path.relative_to(root / "custom").as_posix(), where)
        for path in sorted((root / "custom").rglob("*.py"))
        for where in removing(tree_of(path))
    }
    assert found - MAY.keys() == set(), "say in the table what these may remove"
    assert MAY.keys() - found == set(), "these remove nothing any more: take them out of the table"


def test_a_run_takes_no_folder_that_somebody_uses(tmp_path: Path) -> None:
    """A run that failed to start removes only the files that the run wrote."""
    (tmp_path / "run/nvflare").mkdir(parents=True)
    (tmp_path / "run/nvflare/notes").write_text("mine")
    with pytest.raises(MedsiloError, match="choose another --name"):
        simulator.run(make_plan(), tmp_path / "run", SiteSettings(device="cpu"))
    assert (tmp_path / "run/nvflare/notes").read_text() == "mine" and not (tmp_path / "run/job").exists()


def removing(node: ast.AST, where: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        within = f"{where}.{child.name}".lstrip(".") if named else where
        if isinstance(child, ast.Call) and is_removal(child):
            yield within
        yield from removing(child, within)


def is_removal(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in NAMES:
        return False
    of = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    if call.func.attr in ("remove", "replace") and of not in OF_PATHS:
        return call.func.attr == "replace" and len(call.args) == 1 and not call.keywords
    return True
