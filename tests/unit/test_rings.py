"""The rings of tests: who runs with whom, what a default test may take, which tests a change asks for, and how old
`make test-long` is."""

import subprocess
from pathlib import Path

import nvflare
import pytest

from tests import changed, conftest, upgrade

AUTHOR = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")


@pytest.mark.xdist_group("a-group")
def test_groups_of_tests_are_kept_together(request: pytest.FixtureRequest) -> None:
    """Else each process of `make test` makes what one of them makes for all: three federations over TLS for one."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("only 'make test' has groups")
    assert request.node.nodeid.endswith("@a-group"), "install pytest and pytest-xdist as requirements-dev.txt has them"


@pytest.fixture(scope="module")
def made_once() -> list[str]:
    return []


def test_tests_that_share_what_their_file_makes_are_a_group(request: pytest.FixtureRequest, made_once: list) -> None:
    """Without a word in the file; those that share nothing go wherever a process is free."""
    of = {
        item.name: item.get_closest_marker("xdist_group") for item in request.session.items if item.path == request.path
    }
    assert of.pop(request.node.name).args == ("test_rings",)
    assert not any(mark and mark.args == ("test_rings",) for mark in of.values())


# ---------------------------------------------------------------------------------------------------- a default test
@pytest.mark.parametrize(("used", "mark", "fails"), [(2.5, None, False), (6.5, None, True), (9.0, "slow", False)])
def test_a_default_test_takes_two_seconds_of_the_processor(
    used: float, mark: str | None, fails: bool, request: pytest.FixtureRequest
) -> None:
    ends = pytest.raises(pytest.fail.Exception, match=r"took 6\.5 s .*slow") if fails else pytest.raises(StopIteration)
    with pytest.MonkeyPatch.context() as patch:  # which ends before this very test is watched to its own end
        patch.setattr(conftest, "processor_seconds", iter([1.0, 1.0 + used]).__next__)
        patch.setattr(request.node, "get_closest_marker", lambda name: name if name == mark else None)
        watched = conftest.pytest_runtest_call(request.node)
        next(watched)
        with ends:
            watched.send(None)


# ---------------------------------------------------------------------------------------------------- what changed
def asked_for(*files: str) -> tuple[set[str], set[str], list[str]]:
    engine, beside, others = changed.tests_for(files)
    return {path.name for path in engine}, {path.name for path in beside}, others


def test_a_change_of_dicom_asks_for_dicoms_tests_alone() -> None:
    engine, beside, others = asked_for("custom/medsilo_dicom/predicting.py")
    assert engine == set() and others == [] and "test_dicom.py" in beside and "test_coordinator.py" not in beside


def test_a_change_of_the_engine_asks_for_its_capability_and_for_what_imports_it() -> None:
    engine, beside, _ = asked_for("custom/medsilo/mixing/defence.py")
    assert {"test_robust.py", "test_far_updates.py"} <= engine and beside == set() and "test_dicom.py" not in engine


def test_a_template_is_its_folders_and_a_helpers_tests_are_its_users() -> None:
    assert "test_outside_methods.py" in asked_for("custom/medsilo_lab/new/making.py")[1]
    assert asked_for("custom/medsilo_lab/new/other.template")[1]
    assert "test_review.py" in asked_for("tests/junit.py")[0]
    assert asked_for("tests/unit/test_yaml.py", "tests/unit/test_gone.py", "Makefile") == (
        {"test_yaml.py"},
        set(),
        ["Makefile"],
    )


def test_what_differs_from_where_the_branch_began_is_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed on the branch, edited, and new; not what others have put on main since, nor what git ignores."""

    def git(*words: str) -> None:
        subprocess.run(["git", *AUTHOR, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"# {name}\n*.log\n")

    def commit(*names: str) -> None:
        write(*names)
        git("add", *names)
        git("commit", "--message", "Write files")

    git("init", "--initial-branch", "main")
    commit(".gitignore", "edited", "untouched")
    git("checkout", "-b", "branch")
    commit("committed")
    git("checkout", "main")
    commit("of-others")
    git("checkout", "branch")
    write("new", "ignored.log")
    (tmp_path / "edited").write_text("edited\n")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed("main") == ["committed", "edited", "new"]
    with pytest.raises(SystemExit, match="BASE="):
        changed.changed("no-such-commit")


def test_another_nvflare_is_tried_over_all_packages_that_this_python_sees() -> None:
    """Those that a worktree's environment borrows by a path, too."""
    below = [Path(folder) for folder in upgrade.installed_folders()]
    assert {Path(module.__file__ or "").parents[1] for module in (nvflare, pytest)} <= set(below)
