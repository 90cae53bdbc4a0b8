"""Fuzz all inputs from other parties: each invalid input results in an error message of one line.

No input causes a traceback, a long delay or unlimited memory use.

The default suite generates about 1,000 random inputs, which are the same in each run.
"""

import copy
import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors
from medsilo.core.parent_watch import most_held
from medsilo.core.text import LONGEST
from medsilo.core.yaml_text import load_yaml
from medsilo.exchange.acceptance import Acceptance
from medsilo.plan import load_plan, parse_plan
from medsilo.runs.messages import Request, StudyMessage
from medsilo.schedule.phase import views
from medsilo.site.settings import SiteSettings
from medsilo.tasks.scans import Scan
from medsilo_lab.consortium.description import read_consortium
from medsilo_lab.deploy.source import Source
from medsilo_lab.engines import inprocess
from medsilo_lab.report.read import read as read_run
from medsilo_papers.public_files import read_labels
from medsilo_pretrained.checkpoint import read_checkpoint
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.hospital import Volume, write_volume
from tests.sites import site_of
from tests.unit.deploy.test_predict import make_super_model
from tests.unit.tasks.test_hostile_images import FILES, SAMPLES

INPUTS = int(os.environ.get("HOSTILE_INPUTS", "1000"))
MOST_SECONDS, MOST_MEMORY = 10, 1 << 30


def hostile(share: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=max(1, int(share * INPUTS)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def one_line_at_most() -> Iterator[None]:
    """Assert that the code block succeeds or raises a medsilo error of one line, within limits of time and memory."""
    started, held = time.process_time(), most_held()
    try:
        yield
    except MedsiloError as error:
        told = str(error)
        assert told.isprintable() and 0 < len(told) <= LONGEST
    assert time.process_time() - started < MOST_SECONDS
    assert most_held() - held < MOST_MEMORY


# ---------------------------------------------------------------------------------------------------- random inputs
ODD_TEXTS = ["", "x" * 5000, "\x1b[31m", "\0", "\ud800", "../../etc/passwd", "ä\u202e", "a\nb", "{{x}}", "%s", "nan"]
UNEVEN = [[[1], [1, 2]], [[1, 2], 3], [[]], {"a": [1, [2]]}]
ODD_NUMBERS = [0, -1, 2**31, 2**63, 10**40, 1e308, -1e-308, float("nan"), float("inf"), True, False, None]
odd = st.sampled_from([*ODD_TEXTS, *ODD_NUMBERS, *UNEVEN]) | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
YAML_TEXTS = [
    "2026-13-45",
    "!!int x",
    "&a [*a]",
    "<<: {}",
    "[" * 3000,
    "9" * 5000,
    "- " * 3000,
    "? [a]\n: b",
    "0b_",
    "1:99:99",
    "~",
    "!!binary x",
    "{null: 1}",
    "{1: {true: []}}",
    "[[1], [1, 2], 3]",
]


def places(value: Any, here: tuple = ()) -> Iterator[tuple]:
    yield here
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*here, key))


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Return a copy of `whole` in which one to three random values are changed, removed or added."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        every = [place for place in places(value) if place]
        if not every:
            return copy.deepcopy(draw(values))
        *path, last = draw(st.sampled_from(every))
        inner = value
        for key in path:
            inner = inner[key]
        what = draw(st.sampled_from(["put", "put", "drop", "add"]))
        if what == "drop":
            del inner[last]
        elif what == "add" and isinstance(inner, dict):
            inner[draw(st.text(max_size=6))] = copy.deepcopy(draw(values))
        else:
            inner[last] = copy.deepcopy(draw(values))
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a copy of `content` that is truncated, or in which random bytes are changed, inserted or removed."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        place = draw(st.integers(0, min(len(data), draw(st.sampled_from([64, 400, len(data)]))) - 1))
        kind = draw(st.sampled_from(["cut", "flip", "flip", "put", "drop", "fill"]))
        if kind == "cut":
            del data[place:]
        elif kind == "flip":
            data[place] = draw(st.integers(0, 255))
        elif kind == "put":
            data[place:place] = draw(st.binary(min_size=1, max_size=12) | st.sampled_from([b"9" * 12, b"\n\n", b"-1"]))
        elif kind == "drop":
            del data[place : place + draw(st.integers(1, 8))]
        else:
            data[place : place + 8] = draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f" * 8]))[: len(data) - place]
    return bytes(data)


@st.composite
def yaml_text(draw: st.DrawFn, whole: dict) -> str:
    text = yaml.safe_dump(draw(changed(whole)), allow_unicode=draw(st.booleans()))
    lines = text.splitlines()
    if draw(st.booleans()) and lines:
        place = draw(st.integers(0, len(lines) - 1))
        key = lines[place].partition(":")[0]
        lines[place] = f"{key}: {draw(st.sampled_from(YAML_TEXTS) | st.text(max_size=30))}"
    return "\n".join(lines)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def put(path: Path, content: str | bytes) -> Path:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------------------------------------------- YAML
PLANS = [
    make_plan("fedavg").resolved(),
    make_plan("harmofl").resolved(),
    {
        "algorithm": {"name": "fedsm", "pull": 0.5},
        "task": {"name": "image-folder", "labels": ["a", "b"], "size": [32, 32]},
        "network": {"name": "unet", "features": [4, 8]},
        "participation": {"sites": ["a", "b"], "minimum": 1, "when_missing": "continue"},
    },
]
SETTINGS = {
    "data": {
        "folder": "/data",
        "images": "*.nii",
        "label_map": {1: "a"},
        "columns": {"image": ["a"]},
        "shares": [0.6, 0.2, 0.2],
    },
    "output": "/out",
    "device": "cpu",
    "answers": 10,
    "memory_limit": 512,
}
HERE = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@hostile(0.2)
@given(st.data())
def test_plans(place: Path, data: st.DataObject) -> None:
    path = put(place / "plan.yaml", data.draw(yaml_text(data.draw(st.sampled_from(PLANS)))))
    with one_line_at_most():
        load_plan(path)


@pytest.mark.parametrize("section", ["packages", "task", "network", "aggregation", "participation", "layers"])
@pytest.mark.parametrize("value", ["{null: 1}", "{1: 1}", "{true: {}}", "[null]", "[[1], 2]"])
def test_sections_whose_keys_are_no_texts(section: str, value: str) -> None:
    with one_line_at_most(), pytest.raises(MedsiloError, match=section):
        parse_plan(PLANS[0], [f"{section}={value}"])


@hostile(0.1)
@given(st.data())
def test_changes_to_a_plan(data: st.DataObject) -> None:
    keys = [".".join(map(str, key)) for key in places(PLANS[0]) if key]
    key = data.draw(st.sampled_from(keys) | st.text(max_size=20))
    value = data.draw(st.sampled_from([*YAML_TEXTS, *ODD_TEXTS]) | st.text(max_size=20) | values.map(json.dumps))
    with one_line_at_most():
        parse_plan(PLANS[0], [f"{key}={value}"])


@hostile(0.1)
@given(st.data())
def test_settings(place: Path, data: st.DataObject) -> None:
    put(place / "medsilo.yaml", data.draw(yaml_text(SETTINGS)))
    with one_line_at_most():
        SiteSettings.read(place)


@pytest.mark.slow
@hostile(0.1)
@given(st.data())
def test_consortia(place: Path, data: st.DataObject) -> None:
    whole = load_yaml((HERE / "provisioning/consortium.yaml").read_text("utf-8"))
    path = put(place / "consortium.yaml", data.draw(yaml_text(whole)))
    with one_line_at_most():
        read_consortium(path)


@hostile(0.1)
@given(st.one_of(st.text(), st.text(alphabet="[]{}&*!?-:,|>\"'#%@ \n\ta1.~", max_size=200)))
def test_any_text_as_yaml(text: str) -> None:
    with one_line_at_most():
        load_yaml(text)


# ---------------------------------------------------------------------------------------------------- messages
Spoken = list[tuple[StudyMessage, StudyMessage]]
PLAN = make_plan("fedavg", "training.rounds=1")


@pytest.fixture(scope="module")
def spoken(place: Path) -> Spoken:
    site = site_of(PLAN, SITES[0], SITES, SiteSettings(device="cpu"), place / "study/sites" / SITES[0])
    given = views(PLAN.course.phases[0].given, PLAN.build_networks())
    asked = [
        Request(task=task, round=number, study="study", plan=PLAN.hash, sites=tuple(SITES), packages=PLAN.code)
        for task, number in (("join", 0), ("round", 1), ("deliver", 1), ("test", 1))
    ]
    sent = [one.message(given if one.task in ("round", "deliver") else {}) for one in asked]
    return [(one, site.answer(one)) for one in sent]


@pytest.mark.slow
@hostile(0.2)
@given(st.data())
def test_answers_of_a_site(spoken: Spoken, data: st.DataObject) -> None:
    asked, answer = data.draw(st.sampled_from(spoken))
    facts = data.draw(changed(answer.facts).filter(lambda value: isinstance(value, dict)))
    message = StudyMessage(answer.groups, facts)
    acceptance = Acceptance(PLAN, "study", SITES, SITES)
    with one_line_at_most():
        acceptance.accept(SITES[0], message, (asked.facts["task"], asked.facts["round"]), ())


@hostile(0.1)
@given(st.data())
def test_what_a_server_asks(spoken: Spoken, data: st.DataObject) -> None:
    asked, _ = data.draw(st.sampled_from(spoken))
    with one_line_at_most():
        Request.received(data.draw(changed(asked.facts)))


# ---------------------------------------------------------------------------------------------------- images
def _images(folder: Path) -> dict[str, bytes]:
    for kind, name in FILES:
        SAMPLES[kind](folder / name)
    values = np.random.default_rng(0).normal(size=(3, 8, 9)).astype(np.float32)
    for name in ("b.nii", "c.nii.gz"):
        write_volume(folder / name, Volume(values, np.eye(4)))
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray((values * 50).astype(np.int16)), str(folder / "f.mha"), True)
    pixels = np.random.default_rng(1).integers(0, 256, (9, 8, 3), np.uint8)
    for name in ("g.png", "h.tif", "j.jpg", "k.bmp"):
        Image.fromarray(pixels).save(folder / name)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".raw"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _images(tmp_path_factory.mktemp("images"))


@pytest.mark.slow
@hostile(0.3)
@given(st.data())
def test_images(place: Path, images: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(images)))
    other = data.draw(st.sampled_from([name, name, name, *images]))
    path = put(place / f"x{name}", data.draw(damaged(images[other])))
    for read in (Scan.read, Scan.of_mask, read_labels):
        with one_line_at_most():
            read(path)
    path.unlink()


# ---------------------------------------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the content of weight files in each format that medsilo reads: safetensors, torch's present and old
    formats, and a bundle.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    weights = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).state_dict()
    save_tensors(folder / "a.safetensors", weights)
    torch.save({"state_dict": weights, "epoch": 3}, folder / "b.pt")
    for name, whole in (("c.pt", weights), ("d.pt", {"network_weights": weights, "trainer": "x"})):
        torch.save(whole, folder / name, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "e.zip", "w") as bundle:
        bundle.write(folder / "b.pt", "bundle/models/model.pt")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.filterwarnings("ignore")  # torch warns about old storage types
@hostile(0.2)
@given(st.data())
def test_checkpoints(place: Path, checkpoints: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(checkpoints)))
    path = put(place / "weights", data.draw(damaged(checkpoints[name])))
    with one_line_at_most():
        assert read_checkpoint(path)


# ---------------------------------------------------------------------------------------------------- folders
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "supermodel"
    make_super_model().save(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    inprocess.run(make_plan(), folder=folder, settings=SiteSettings(device="cpu"))
    return folder


def spoil(path: Path, data: st.DataObject) -> None:
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(["bytes", "delete", "folder", "facts", "facts", "facts", "facts"]))
    if kind == "facts" and path.suffix == ".json":
        put(path, json.dumps(data.draw(changed(json.loads(content)))))
    elif kind == "facts" and path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(data.draw(changed(json.loads(lines[place]))))
        put(path, "\n".join(lines) + "\n")
    elif kind == "facts" and path.suffix == ".safetensors":
        tensors, facts = load_tensors(path)
        with suppress(ValueError):
            save_tensors(path, tensors, data.draw(changed(facts)))
    elif kind in ("delete", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        put(path, data.draw(damaged(content)))


def files_of(folder: Path) -> list[str]:
    every = (path for path in folder.rglob("*") if path.is_file() and "events" not in path.name)
    return sorted(path.relative_to(folder).as_posix() for path in every)


@contextmanager
def spoiled(folder: Path, place: Path, data: st.DataObject, only: str = "") -> Iterator[Path]:
    copied = place / "copy"
    shutil.copytree(folder, copied)
    try:
        spoil(copied / data.draw(st.sampled_from([name for name in files_of(folder) if only in name])), data)
        yield copied
    finally:
        shutil.rmtree(copied)


@hostile(0.03)
@given(st.data())
def test_super_models(place: Path, model: Path, data: st.DataObject) -> None:
    with spoiled(model, place, data) as folder, one_line_at_most():
        Source.open(folder)


@pytest.mark.slow
@hostile(0.02)
@given(st.data())
def test_reports_of_runs(place: Path, run: Path, data: st.DataObject) -> None:
    with spoiled(run, place, data) as folder, one_line_at_most():
        told = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", told)
            patch.setattr("sys.stdout", io.StringIO())
            ended = main(["report", str(folder)])
        assert told.getvalue().count("\n") == ended


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison") / "study"
    (folder.parent / "plan.yaml").write_text(make_plan().to_yaml())
    words = ["compare", "--plan", str(folder.parent / "plan.yaml"), "--methods", "local,fedavg,adafed"]
    assert main([*words, "--seeds", "0,1", "--at-once", "1", "--device", "cpu", "-o", str(folder)]) == 0
    return folder


@pytest.mark.slow
@hostile(0.02)
@given(st.data())
def test_reports_of_comparisons(place: Path, comparison: Path, data: st.DataObject) -> None:
    with spoiled(comparison, place, data, ".json") as folder, one_line_at_most():
        told = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", told)
            patch.setattr("sys.stdout", io.StringIO())
            ended = main(["report", str(folder), *(["--hospitals"] if data.draw(st.booleans()) else [])])
        assert told.getvalue().count("\n") == ended


@pytest.mark.parametrize(
    "change",
    [
        {"reliability": [[[1, 1, 0.5]] * 10, [[1, 1, 0.5]] * 9]},
        {"reliability": [[[1, 1, 0.5]] * 11]},
        {"confusion": [[1]], "reliability": None},
    ],
)
def test_uneven_lists_in_a_summary(change: dict[str, Any], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/summary.json"
    told = json.loads(path.read_text())
    told["sites"][SITES[0]]["decisions"] |= change
    path.write_text(json.dumps(told))
    with one_line_at_most(), pytest.raises(MedsiloError, match="summary.json"):
        read_run(tmp_path / "run")


@pytest.mark.slow
def test_a_verdict_without_a_site(comparison: Path, tmp_path: Path) -> None:
    shutil.copytree(comparison, tmp_path / "study")
    path = tmp_path / "study/verdict.json"
    told = json.loads(path.read_text())
    for row in told["rows"]:
        row["sites"].pop(SITES[0])
        row["difference"]["sites"].pop(SITES[0], None)
    path.write_text(json.dumps(told))
    assert main(["report", str(tmp_path / "study")]) == 0


@hostile(0.03)
@given(st.data())
def test_what_a_run_goes_on_from(place: Path, run: Path, data: st.DataObject) -> None:
    with spoiled(run, place, data) as folder:
        record = Record(folder)
        for read in (record.rounds, record.summary, record.load_checkpoint, record.can_go_on, record.check_unfinished):
            with one_line_at_most():
                read()


@pytest.mark.long
def test_twenty_thousand_inputs(root: Path) -> None:
    if INPUTS > 1000:
        pytest.skip("this run already has many inputs")
    patch = {"HOSTILE_INPUTS": "20000", "MOST_SECONDS": "3600"}
    import subprocess
    import sys

    line = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", __file__]
    subprocess.run(line, cwd=root, env={**os.environ, **patch}, check=True, timeout=3600)
