"""Define fixtures and helpers for all tests."""

import gc
import hashlib
import itertools
import locale
import logging
import os
import random
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

import numpy as np
import pytest
import torch
from _pytest.junitxml import xml_key

from medsilo.core.mmap_store import _File
from medsilo.methods.bases import MeanOfOwn, SharedAndOwn, WeighingMethod
from medsilo.methods.fedsm import ModelsAndSelector
from medsilo.plan import Plan, parse_plan
from medsilo.registry import METHODS as METHODS_BY_NAME
from medsilo.registry import NETWORKS, TASKS
from medsilo.site.settings import SiteSettings
from medsilo_lab.comparison import USUAL_SEEDS
from medsilo_lab.comparison.compare import Asked, Study
from medsilo_lab.study.cells import Row, cells_of, run_cell
from medsilo_lab.study.verdict_file import About
from tests.commands import parsed
from tests.hospital import KEY, NAMES, write_photos
from tests.junit import BUILD, build_hash

torch.set_num_threads(1)  # a forked test would wait for threads that exist only in the parent process
SITES = ["hospital-a", "hospital-b", "hospital-c"]
METHODS = [name for name in METHODS_BY_NAME.ours if not METHODS_BY_NAME[name].pooled]
# methods with one training phase and one group of tensors
PLAIN = ["local", "fedavg", "fedprox", "fedbn", "silobn", "fedper", "fedrep"]
# methods with a site-specific network in addition to the shared network
PERSONAL = [name for name in METHODS if issubclass(METHODS_BY_NAME[name], SharedAndOwn | MeanOfOwn)]
# methods in which the server determines each hospital's weight
WEIGHED = [name for name in METHODS if issubclass(METHODS_BY_NAME[name], WeighingMethod)]
FEDSM = [name for name in METHODS if issubclass(METHODS_BY_NAME[name], ModelsAndSelector)]
MOST = float(os.environ.get("MOST_SECONDS", 2.0))  # largest processor time of a test in the default run, in seconds
BESIDE = 9.0  # tolerance factor, so that no test fails because of a slow core or other processes
QUIET = 0.024  # seconds that `pace` measured on the core for which MOST was chosen
LOADED = 100  # the limit on processor time does not apply to a test that imports at least this many new modules
SMALL = ["task.persons=6", "task.windows=6", "task.steps=32", "training.batch_size=8"]
TINY = {"name": "synthetic-activity", "persons": 8, "windows": 10}


def make_plan(method: str = "fedavg", *changes: str, sites: list[str] | None = None) -> Plan:
    """Return a plan that runs in seconds; the plan uses momentum, so that sites have local state in every method."""
    values = {
        "algorithm": {"name": method},
        "task": TINY,
        "training": {"rounds": 2, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.9},
        "participation": {"sites": sites or SITES, "timeout": 120},
    }
    return parse_plan(values, changes)


def wanted(command: list[str]) -> Asked:
    values = parsed(command)[1]
    own = {field.name: values[field.name] for field in fields(Asked)}
    return Asked(**own | {"seeds": values["seeds"] or USUAL_SEEDS})


def processor_seconds() -> float:
    return sum(os.times()[:4])


def pace() -> float:
    """Return the present slowness of this core as a multiple of the core for which MOST was chosen.

    Other processes slow a core down only at some moments, so the function measures several moments and returns the
    largest factor.
    """

    def seconds() -> float:
        before = time.process_time()
        sum(range(2_000_000))
        return time.process_time() - before

    return max(1.0, *(seconds() / QUIET for _ in range(4)))


def files_beside() -> set[str]:
    with os.scandir(Path(__file__).parents[1]) as entries:
        return {entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves a file in the repository, and a test of the default run that takes too much processor
    time.
    """
    there, modules, before = files_beside(), len(sys.modules), processor_seconds()
    result = yield
    if left := files_beside() - there:
        pytest.fail(f"the test left {', '.join(sorted(left))} in the repository: let it write into tmp_path")
    used = processor_seconds() - before
    ring = item.get_closest_marker("slow") or item.get_closest_marker("long")
    most = MOST * BESIDE
    if used > most and not ring and len(sys.modules) - modules < LOADED and used > most * pace():
        pytest.fail(f"the test took {used:.1f} s of processor; the limit is {MOST:.0f} s: shorten it or mark it slow")
    return result


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Turn fsync off, because it took a sixth of the tests' time, and only tests of power cuts need it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def same_draws() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_locale() -> Iterator[None]:
    """Reset the locale after each test, because ITK's DICOM writer sets the locale to "C", in which a later test would
    read files as ASCII.
    """
    yield
    locale.setlocale(locale.LC_ALL, "")


@pytest.fixture(autouse=True)
def nothing_given() -> Iterator[None]:
    """Unregister the classes that a test registers, because other tests examine all registered classes."""
    yield
    for table in (METHODS_BY_NAME, NETWORKS, TASKS):
        table._given.clear()


@pytest.fixture(autouse=True)
def logs_of_ours() -> None:
    """Enable medsilo's loggers again, because NVFlare's logging configuration disables them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("medsilo") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture(autouse=True)
def no_opacus_of_another_test() -> Iterator[None]:
    """Unload Opacus after a test, because medsilo rejects some methods in a process that has imported Opacus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "opacus", raising=False)
        yield


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Write a hash of the tested build into JUnit files, because `python -m tests.claims` rejects results of other
    builds.
    """
    if xml := config.stash.get(xml_key, None):
        xml.add_global_property(BUILD, build_hash())


@pytest.hookimpl(tryfirst=True)  # after this hook, pytest-xdist reads the groups of tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign tests that share a module's fixture to one process, so that pytest creates the fixture once.

    Tests marked `first` run first, and the largest groups of tests run next, so that no long test runs alone at the
    end.
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
    """Exclude the objects of imported modules from garbage collection, because scanning them takes 0.6 s each time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.freeze()


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of real data sets; tests run even without this folder, because nobody may redistribute the data
    sets.
    """
    folder = Path(os.environ.get("MEDSILO_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no real data: neither MEDSILO_DATA nor ../shared/data is a folder")
    return folder


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parent.parent


def make_study(folder: Path, plan: Plan, *titles: str) -> Study:
    cells = cells_of(plan, [Row.parse(title) for title in titles], [0, 1], [], folder)
    for cell in cells:
        assert run_cell(cell, SiteSettings(device="cpu")) == ""
    study = Study(folder, About(title="A study", machine="a test"), cells)
    study.conclude([])
    return study


@pytest.fixture
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every hospital the same known key, so that all runs split data alike."""
    monkeypatch.setattr("medsilo.site.query_budget.secrets", SimpleNamespace(token_hex=lambda size: KEY))


@pytest.fixture
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed all secret noise, so that no statistical test fails by chance."""
    number = itertools.count()
    key = lambda size: hashlib.sha256(str(next(number)).encode()).digest()[:size]  # noqa: E731
    monkeypatch.setattr("medsilo.privacy.noise.secrets", SimpleNamespace(token_bytes=key))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photographs of two classes, with one photograph of each patient; tests must not change the photographs."""
    return write_photos(tmp_path_factory.mktemp("photos"), NAMES)


@pytest.fixture(scope="session")
def panels_study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Compare methods on images with masks, so that the reports contain pictures of cases; tests must not change the
    comparison.
    """
    small = ["task.patients=4", "task.size=32", "training.rounds=1", "training.batch_size=8", "network.features=[4, 8]"]
    plan = make_plan("fedavg", "task.name=synthetic-prostate", *small)
    return make_study(tmp_path_factory.mktemp("panels"), plan, "harmofl", "adafed", "fedsm:pull=0.6")


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        if folder.is_mount():
            subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fresh_spills(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
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
    """Make a single test that runs all cases and reports all failures together."""

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
    """Mark every case that is not in `fast` as slow. If `slow` is given, a case that is in neither `fast` nor `slow` is
    marked as long instead.
    """

    def of(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        if case in fast or values[0] in fast:
            return case
        late = slow is not None and not (case in slow or values[0] in slow)
        return pytest.param(*values, marks=pytest.mark.long if late else pytest.mark.slow)

    return [of(case) for case in cases]
