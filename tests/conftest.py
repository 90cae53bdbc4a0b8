"""Fixtures and helpers that all tests share."""

import gc
import locale
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.junitxml import xml_key

from medsilo.core.mmap_store import _File
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import SiteSettings
from medsilo_lab.cli.comparing import USUAL_SEEDS, seeds_of
from medsilo_lab.study.cells import Row, cells_of, run_cell
from medsilo_lab.study.compare import Asked, Study
from medsilo_lab.study.verdict_file import About
from tests.commands import parsed
from tests.hospital import KEY, NAMES, write_photos
from tests.junit import BUILD, build_hash

torch.set_num_threads(1)  # a test that forks would wait for threads that its child does not have
SITES = ["hospital-a", "hospital-b", "hospital-c"]
PLAIN = ["local", "fedavg", "fedprox", "fedbn", "silobn", "fedper", "fedrep"]  # one phase, one group
# the server makes a step of its own
STEPPING = ["fednova", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "scaffold", "feddyn"]
INSIDE_FEDSM = ["ditto", "apfl", "per-fedavg", "pfedme", "fine-tuning"]  # may make its personal models
PERSONAL = ["mr-mtl", "fedala", *INSIDE_FEDSM, "fedbabu", "fedrod"]  # a network of the site's own beside the shared one
FEDSM = ["fedsm", "fedsm-extra", "fedsm-ensemble"]
WEIGHED = ["feddg-ga", "fedlws", "fedawa", "fedce"]  # the server finds out how much each hospital counts
METHODS = [
    *(*PLAIN, "fedrdn", *STEPPING, *WEIGHED, "moon", "condistfl", "cyclic", *PERSONAL, "harmofl"),
    *("adafed", "d-adafed", "f-adafed", *FEDSM),
]
# not tried at every change in all that is tried of others
NEWER = ["silobn", "fedrdn", *WEIGHED, "condistfl", "cyclic", "fedrep", "feddyn", "fedala", "fedbabu", "fedrod"]
# keep and send what fedper, fine-tuning, scaffold, ditto and fedavg do
AS_ANOTHER = ["condistfl", "fedrep", "fedbabu", "feddyn", "fedrod", "fedlws", "fedawa"]
MOST = float(os.environ.get("MOST_SECONDS", 2.0))  # of processor, of a default test
BESIDE = 3.0  # how much more beside others
QUIET = 0.024  # seconds of processor that `pace` takes on the core for which MOST is said
LOADED = 100  # modules; what first loads so many takes the seconds of its imports
SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8"]
TINY = {"name": "synthetic-activity", "persons": 8, "windows": 10}


def make_plan(method: str = "fedavg", *changes: str, sites: list[str] | None = None) -> Plan:
    """A plan that runs in seconds; momentum, so that sites have a state of their own in every method."""
    values = {
        "algorithm": {"name": method},
        "task": TINY,
        "training": {"rounds": 2, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.9},
        "participation": {"sites": sites or SITES, "timeout": 120},
    }
    return parse_plan(values, changes)


def wanted(command: list[str]) -> Asked:
    """Return the comparison that a command line asks for."""
    values = parsed(command)[1]
    own = {field.name: values[field.name] for field in fields(Asked)}
    return Asked(**own | {"seeds": values["seeds"] or seeds_of(USUAL_SEEDS)})


def processor_seconds() -> float:
    """Return what this process took of the processor, and those that it started and waited for."""
    return sum(os.times()[:4])


def pace() -> float:
    """Return how many times slower this core is now than the one for which MOST is said."""
    before = time.process_time()
    sum(range(2_000_000))
    return max(1.0, (time.process_time() - before) / QUIET)


def files_beside() -> set[str]:
    """Return the files in the repository's root, but hidden ones."""
    with os.scandir(Path(__file__).parents[1]) as entries:
        return {entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves a file in the repository, and one of the default ring that takes too long.

    By the processor: on a busy machine that stays the same.
    """
    there, modules, before = files_beside(), len(sys.modules), processor_seconds()
    result = yield
    if left := files_beside() - there:
        pytest.fail(f"left {', '.join(sorted(left))} in the repository: give it a folder of its own")
    used = processor_seconds() - before
    ring = item.get_closest_marker("slow") or item.get_closest_marker("long")
    most = MOST * BESIDE
    if used > most and not ring and len(sys.modules) - modules < LOADED and used > most * pace():
        pytest.fail(f"took {used:.1f} s of processor, and a default test has {MOST:.0f} s: shorten or mark it slow")
    return result


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """A file outlives the process that wrote it without fsync, which took a sixth of all tests: none pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def same_locale() -> Iterator[None]:
    """ITK's writer of DICOM sets the locale to "C", and files of later tests would be read as ASCII."""
    yield
    locale.setlocale(locale.LC_ALL, "")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Say in JUnit files which build was tested: `python -m tests.claims` takes no results of another."""
    if xml := config.stash.get(xml_key, None):
        xml.add_global_property(BUILD, build_hash())


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share what their file makes once in one process: else each process makes it for itself.

    With several processes, those marked `first` and then the largest groups begin, so that none runs alone at the end.
    """
    for item in items:
        made = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
        shared = any(one[-1].scope == "module" and one[-1].baseid == item.nodeid.partition("::")[0] for one in made)
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if items and items[0].config.getoption("loadgroup", False):
        _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        groups.setdefault(mark.args[0] if mark else item.nodeid, []).append(item)

    def late(group: list[pytest.Item]) -> tuple[bool, int]:
        return not any(item.get_closest_marker("first") for item in group), -len(group)

    items[:] = [item for group in sorted(groups.values(), key=late) for item in group]


def pytest_collection_finish() -> None:
    """Keep a million objects of what was imported out of every search for garbage that a test makes: 0.6 s each."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Keep what is left out of pytest's last searches for garbage, which take long on a busy machine."""
    gc.freeze()


@pytest.fixture
def shared_data() -> Path:
    """Real data beside the project: MEDSILO_DATA, or ../shared/data. They may not be shipped, so tests do without."""
    folder = Path(os.environ.get("MEDSILO_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no real data: neither MEDSILO_DATA nor ../shared/data is a folder")
    return folder


@pytest.fixture
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parent.parent


def make_study(folder: Path, plan: Plan, *titles: str) -> Study:
    """A finished comparison of two seeds, run here and now."""
    cells = cells_of(plan, [Row.parse(title) for title in titles], [0, 1], [], folder)
    for cell in cells:
        assert run_cell(cell, SiteSettings(device="cpu")) == ""
    study = Study(folder, About(title="A study", machine="a test"), cells)
    study.conclude([])
    return study


@pytest.fixture
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each hospital of this process the same key, by which the same patients are in its parts in every run."""
    monkeypatch.setattr("medsilo.site.query_budget.secrets", SimpleNamespace(token_hex=lambda size: KEY))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital's photographs in two classes, one of each patient. They are read and never changed."""
    return write_photos(tmp_path_factory.mktemp("photos"), NAMES)


@pytest.fixture(scope="session")
def panels_study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A comparison of methods that have panels, on images with masks. It is read and never changed."""
    small = ["task.patients=4", "task.size=32", "training.rounds=1", "training.batch_size=8", "network.features=[4, 8]"]
    plan = make_plan("fedavg", "task.name=synthetic-prostate", *small)
    return make_study(tmp_path_factory.mktemp("panels"), plan, "harmofl", "adafed", "fedsm:pull=0.6")


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A real file system with so little room."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fresh_spills(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of an earlier test is handed on to this one, nor one of this to a later test."""
    gc.collect()  # what an earlier test left gives its file back now, and not to this one
    monkeypatch.setattr(_File, "spare", own := list[int]())
    yield
    gc.collect()
    while own:
        os.close(own.pop())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder


def over_all(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test that goes through all cases, each with a value for every name; those that fail are told together.

    For what needs nothing of its own: fixtures are made once for all.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        own, every_case = [name.strip() for name in names.split(",")], list(cases)

        @wraps(test)
        def every(subtests: pytest.Subtests, **given: Any) -> None:
            for case in every_case:
                values = dict(zip(own, case if len(own) > 1 else [case], strict=True))
                with subtests.test(**values):
                    test(**given, **values)

        asked = [each for each in signature(test).parameters.values() if each.name not in own]
        every.__signature__ = Signature(  # type: ignore[attr-defined]
            [*asked, Parameter("subtests", Parameter.KEYWORD_ONLY)]
        )
        return every

    return decorate


def slow_but(fast: Collection[Any], cases: Iterable[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Return the cases of a parameter; those that neither are in `fast` nor begin with a value of it are slow.

    Where `slow` says which are, the others are long.
    """

    def of(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        if case in fast or values[0] in fast:
            return case
        late = values[0] in AS_ANOTHER if slow is None else not (case in slow or values[0] in slow)
        return pytest.param(*values, marks=pytest.mark.long if late else pytest.mark.slow)

    return [of(case) for case in cases]


def all_but_newer(*methods: str) -> list[Any]:
    """Return the methods as a parameter's cases; the newer ones are slow, or tried before a release."""
    return slow_but([method for method in methods if method not in NEWER], methods)
