"""Each study in results/ runs with few cases, missing results are named, and the index is up to date."""

import re
import shlex
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from runpy import run_module
from subprocess import run

import numpy as np
import pytest
import torch
from PIL import Image

from medsilo.core.errors import DataError, MedsiloError
from medsilo.flare.jobs import plan_of
from medsilo.plan import parse_plan
from medsilo_lab.comparison.compare import comparable
from medsilo_lab.deploy.source import Source
from medsilo_lab.study.cells import Row, base_plan
from medsilo_lab.study.evidence import Scores
from results import __main__ as command_line
from results import contrasts, result_files, told_twice
from results.ensembles import ensemble_scores
from results.har import in_order, shifted, write_windows
from results.kept import Kept, Terms
from results.making import Comparison, Places, comparisons, make
from results.page import changed, command, study
from results.pages import (
    BRAINS,
    BRCA,
    CELLS,
    HEART,
    IMPACT,
    LOOKS,
    PAGES,
    VOLUMES,
    Page,
    Part,
)
from results.result_files import parsed
from results.stress import HOSPITALS, POWERS, write_stress
from tests.commands import parsed as parse_command
from tests.conftest import slow_but, wanted
from tests.patients import write_hearts, write_studies, write_survival
from tests.sources import makefile
from tests.unit.medsilo_papers.test_nuclei import draw

NO_OPTIONS = (
    "results.contrasts",
    "results.told_twice",
    "results.gamma",
    "results.intervals",
    "results.power",
)  # programs whose only options are options for reading, and --write
THREE = "participation.sites=[a,b,c]"
SMALL = {
    "activity-windows": ("participation.sites=[subject_01,subject_02,subject_03]",),
    "image-folder": ("task.size=[16, 16]", "network.features=[2, 4]"),
    "nnunet": ("training.local_steps=1", "task.shares=[0.2, 0.2, 0.6]"),
    "nuclei": ("task.size=16", "network.features=[2, 4]"),
    "table": (),
    "synthetic-activity": ("task.persons=3", "task.windows=4", "task.steps=32", THREE),
    "synthetic-histology": ("task.patients=4", "task.patches=4", "task.size=32", THREE),
    "synthetic-prostate": ("task.patients=3", "task.slices=3", "task.size=32", "network.features=[2, 4]", THREE),
}
TINY = Page("Tiny", "drawn", "Words.", (PAGES["baselines"].parts[1],))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    data = tmp_path_factory.mktemp("data")
    draw(data / "nuclei_he", images=9)
    write_hearts(data / HEART)
    write_survival(data / BRCA)
    write_studies(data / IMPACT)
    for laboratory in ("cellavision", "jiangxi"):
        write_cells(data / CELLS / laboratory)
    write_volumes(data / VOLUMES)
    (data / "har_uci").mkdir()
    for number in range(1, 4):
        np.savez(data / "har_uci" / f"subject_{number:02}.npz", **people(number))
    return Places(tmp_path_factory.mktemp("cells"), data)


def write_cells(folder: Path, images: int = 10) -> None:
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(images):
        picture = np.random.default_rng(number).integers(150, 250, (20, 20, 3)).astype(np.uint8)
        mask = np.zeros((20, 20), np.uint8)
        mask[4:16, 4:16], mask[7:12, 7:12] = 1, 2
        picture[mask > 0] -= np.uint8(20) * mask[mask > 0, None]
        Image.fromarray(picture).save(folder / "images" / f"{number:03}.png")
        Image.fromarray(mask).save(folder / "labels" / f"{number:03}.png")


def write_volumes(folder: Path, volumes: int = 40) -> None:
    nibabel = pytest.importorskip("nibabel")
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(volumes):
        drawn = np.random.default_rng(number)
        labels = np.zeros((35, 50, 6), np.uint8)
        labels[12:22, 10 : 20 + number % 5, 2:4], labels[12:22, 25:35, 2:4] = 1, 2
        image = drawn.uniform(0, 40, labels.shape) + 60.0 * (labels > 0)
        for part, values in (("images", image.astype(np.float32)), ("labels", labels)):
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / part / f"hippocampus_{number:03}.nii.gz")


def waves(number: int, count: int) -> np.ndarray:
    """Return windows [n, sensors, steps] of slow movements, with a different offset for each sensor."""
    draw = np.random.default_rng(number)
    phase = draw.uniform(0, 6, (count, 9, 1)) + np.linspace(0, 3, 128)
    return (np.sin(phase) + np.arange(9)[:, None]).astype(np.float32)


def people(number: int) -> dict[str, np.ndarray]:
    """Return a person's file: values ordered [steps, sensors], but stored with the shape [sensors, steps]."""
    stored = {}
    for part, count in (("train", 12), ("test", 6)):
        stored[f"x_{part}"] = waves(number, count).transpose(0, 2, 1).reshape(count, 9, 128).astype(np.float16)
        stored[f"y_{part}"] = (np.arange(count) % 6).astype(np.uint8)
    return stored


def tiny(part: Part, seeds: int = 1, rows: tuple[str, ...] = ()) -> Part:
    """Return a small version of a study's part, with one round and only two methods: the baseline, and single-site
    training.

    FedAvg replaces HarmoFL, because HarmoFL needs more images than a site of the test has.
    """
    baseline = "FedAvg" if part.baseline.startswith("HarmoFL") else part.baseline
    chosen = {baseline, *rows, "local"}
    kept = tuple(row for row in part.rows if Row.parse(row).title in chosen)
    task = part.task or {
        "nuclei_he": "nuclei",
        HEART: "table",
        BRCA: "table",
        IMPACT: "table",
        BRAINS: "nnunet",
        CELLS: "image-folder",
        VOLUMES: "image-folder",
    }.get(part.data, "")
    named = [change.removeprefix("task.name=") for change in part.changes if change.startswith("task.name=")]
    task = task or (named[0] if named else "synthetic-histology")
    changes = (*part.changes, *SMALL[task], "training.rounds=1")
    beside = part.beside and ("local",)
    folds = part.folds and 3
    return replace(part, rows=kept, baseline=baseline, changes=changes, seeds=seeds, folds=folds, beside=beside)


@pytest.mark.long
def test_every_plan_of_every_page_is_in_order(places: Places) -> None:
    for name, page in PAGES.items():
        for part in page.parts:
            one = replace(part, seeds=1, folds=None)
            comparison = Comparison.of(name, one, places)
            titles = {cell.row.title for cell in comparison.cells}
            assert {"local", part.baseline, *part.beside} <= titles
            assert ("HarmoFL, whole" in titles) == ("HarmoFL, mean" in titles)


def test_every_study_has_a_file_whose_command_makes_it(root: Path) -> None:
    files = {path.stem: result_files.header_of(path) for path in (root / "results").glob("*.csv")}
    assert {*PAGES} <= {*files}
    for name in PAGES:
        assert files[name]["command"] == [f"python -m results {name} --write"]
        assert {"title", "data", "date", "declared", "runs"} <= {*files[name]}


def test_the_index_is_that_of_the_files(root: Path) -> None:
    assert (root / "results/README.md").read_text("utf-8") == result_files.index(root / "results")


def test_files_of_results_have_the_columns_and_numbers(root: Path) -> None:
    for path in (root / "results").glob("*.csv"):
        rows = result_files.rows_of(path)
        assert rows and {*rows[0]} == {*result_files.COLUMNS}, path.name
        for row in rows:
            told = [row[name] for name in ("value", "spread", "low", "high")]
            assert any(told) or row["text"], f"{path.name}: {row}"
            assert all(abs(float(value)) >= 0 for value in told if value), row
            assert not row["low"] or not row["high"] or float(row["low"]) <= float(row["high"]), row


@pytest.mark.parametrize(
    "text, told",
    [
        ("53.4 ± 0.5", {"value": "53.4", "spread": "0.5"}),
        ("+1.7 (−3.9 to +7.3)", {"value": "+1.7", "low": "-3.9", "high": "+7.3"}),
        ("**+9.9 (+5.8 to +13.9)**", {"value": "+9.9", "low": "+5.8", "high": "+13.9", "significant": "yes"}),
        ("never, 3, 4", {"text": "never, 3, 4"}),
        ("5.70 s, 5.25 s", {"text": "5.70 s, 5.25 s"}),
        ("93.5; 12", {"value": "93.5", "text": "93.5; 12"}),
        ("488,394", {"value": "488394"}),
        ("–", {}),
    ],
)
def test_a_cell_is_read_as_numbers(text: str, told: dict[str, str]) -> None:
    assert parsed(text) == told


def rows_of(found: result_files.Study) -> set[str]:
    return {line["configuration"] for table in found.tables for line in table.lines()}


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but((), [name for name in PAGES if name != "shift"], ["study-nuclei"]))
def test_every_page_is_made(name: str, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "nnunet":
        pytest.importorskip("nnunetv2", reason="needs medsilo[nnunet]")
        monkeypatch.setattr("benchmarks.brains.HEADS", 9)
        monkeypatch.setattr("benchmarks.brains.WIDTH", 24.0)
    page = replace(PAGES[name], parts=tuple(tiny(part) for part in PAGES[name].parts))
    parts = comparisons(name, page, places)
    assert make(parts, places, None) == []
    found = study(name, page, parts)
    assert found.header["title"] == page.title and found.header["command"].endswith(f" {name} --write")
    assert len(found.header["declared"]) == len(parts) == sum("1 of 1 seeds" in one for one in found.header["runs"])
    lines = [line for table in found.tables for line in table.lines()]
    for part in parts:
        own = [line for line in lines if line["part"] == part.part.title and line["configuration"] == "local"]
        assert {line["quantity"] for line in own} > {"mean over sites", "worst site"}
        assert (
            part.part.elsewhere
            or part.part.baseline == "local"
            or any(line["baseline"] == part.part.baseline for line in own)
        )


@pytest.fixture
def activity(tmp_path: Path, places: Places) -> tuple[Page, list[Comparison], Places]:
    part = replace(tiny(TINY.parts[0], 2, ("fedprox", "fedbn")), later=("fedbn",))
    page, own = replace(TINY, parts=(part,)), Places(tmp_path, places.data)
    return page, comparisons("tiny", page, own), own


@pytest.mark.long
def test_a_page_that_was_stopped_says_what_is_missing_and_goes_on(
    activity: tuple[Page, list[Comparison], Places],
) -> None:
    page, parts, own = activity
    make(parts, own, time.monotonic())
    nothing = study("tiny", page, parts)
    assert "0 of 2 seeds; 0 of 8 runs" in nothing.header["runs"][0] and not nothing.tables
    assert nothing.header["unfinished"] == "0 of 8 runs"
    make(parts, own, None, seeds=1)
    assert comparisons("tiny", page, own)[0].whole_seeds() == [0]
    (half,) = study("tiny", page, parts).header["runs"]
    assert "1 of 2 seeds; 4 of 8 runs" in half and "not done" not in half
    for cell in parts[0].cells:
        if cell.seed == 1 and cell.row.title in ("local", "fedavg"):
            make([replace(parts[0], cells=[cell])], own, None)
    assert parts[0].whole_seeds() == [0]
    for cell in parts[0].first:
        make([replace(parts[0], cells=[cell])], own, None)
    later = study("tiny", page, parts)
    assert "2 of 2 seeds; 7 of 8 runs" in later.header["runs"][0]
    assert "not done with these seeds: fedbn; p is" in later.header["runs"][0]
    assert "fedprox" in rows_of(later) and "fedbn" not in rows_of(later)
    make(parts, own, None)
    assert "fedbn" in rows_of(whole := study("tiny", page, parts)) and "unfinished" not in whole.header


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(command_line, "FOLDER", tmp_path)
    yield tmp_path


@pytest.mark.long
def test_a_file_is_written_from_three_seeds_on_and_keeps_its_remarks(
    folder: Path, places: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = folder / "harmofl-synthetic.csv"
    old = "# title: old\n# remark: measured otherwise\n"
    page.write_text(old, "utf-8")
    options = ["--minutes", "0", "--write", "--cells", str(folder / "cells"), "--data", str(places.data)]
    assert command_line.main(["harmofl-synthetic", *options]) == 1
    assert page.read_text("utf-8") == old
    assert "0 seeds are done" in capsys.readouterr().err
    monkeypatch.setattr(command_line, "LEAST_SEEDS", 0)
    assert command_line.main(["harmofl-synthetic", *options]) == 1
    text = page.read_text("utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n") and "# remark: measured otherwise\n" in text
    assert "old" not in text and "0 of 10 seeds" in text
    assert "harmofl-synthetic.csv" in (folder / "README.md").read_text("utf-8")


def test_the_command_asks_for_the_very_same_cells(places: Places) -> None:
    for name, page in PAGES.items():
        part = replace(page.parts[0], seeds=1, folds=page.parts[0].folds and 3)
        asked = wanted(shlex.split(command(part))[1:])
        assert asked.folds == part.folds and list(asked.seeds) == [0] and list(asked.changes) == list(part.changes)
        rows = [*",".join(asked.methods).split(","), *asked.row]
        assert sorted(rows) == sorted(row for row in part.rows if not changed(row)), name
    assert sum(map(changed, PAGES["controls"].parts[0].rows)) == 2 * len(LOOKS)


def recorded() -> Iterator[tuple[str, str]]:
    for path in sorted(result_files.FOLDER.glob("*.csv")):
        header = result_files.header_of(path)
        lines = [part for line in header.get("command", ()) for part in line.split("; ")]
        lines += [line[line.index("medsilo ") :] for line in header.get("compare", ()) if "medsilo " in line]
        lines += re.findall(r"`(medsilo [^`]+ -[^`]+|python -m [^`]+)`", path.read_text("utf-8").replace('""', '"'))
        yield from ((path.name, line) for line in dict.fromkeys(lines))


class Parsed(Exception):
    """Raised after a program has parsed its command line."""


@pytest.mark.slow
def test_every_recorded_command_line_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program parses its own commands, and the plan accepts each changed key."""
    reads = ArgumentParser.parse_args

    def stops(parser: ArgumentParser, *given: object) -> None:
        reads(parser, *given)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", stops)
    wrong = {}
    for name, line in recorded():
        try:
            with pytest.raises(Parsed):
                read_by_its_program(shlex.split(line), monkeypatch)
        except (Exception, SystemExit) as error:
            wrong[f"{name}: {line}"] = repr(error)
    assert wrong == {}
    assert len([*recorded()]) > 40


def read_by_its_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "medsilo":
        command, values = parse_command(words[1:])
        if command in ("compare", "run"):
            task = [f"task.name={values['task']}"] if values.get("task") else []
            given = values["plan"] or values.get("job")
            changes = [*task, *values["changes"]]
            plan = plan_of(Path(given), changes, local=True) if given else parse_plan(base_plan(), changes)
            rows = [*",".join(values.get("methods", ())).split(","), *values.get("row", ())]
            comparable(plan, [Row.parse(row) for row in rows if row], values["changes"])
        raise Parsed
    if words[0] == "make":
        assert f"\n{words[1]}:" in makefile(result_files.ROOT)
        raise Parsed
    assert words[:2] == ["python", "-m"]
    if find_spec(f"{words[2]}.__main__" if find_spec(words[2]).submodule_search_locations else words[2]) is None:
        raise ModuleNotFoundError(words[2])
    if words[2] in NO_OPTIONS or words[2] == "pytest":
        raise Parsed
    monkeypatch.setattr(sys, "argv", words[2:])
    run_module(words[2], run_name="__main__", alter_sys=False)


# ------------------------------------------------------------------ declared contrasts
def write_scores(folder: Path, name: str, **terms: str) -> Path:
    drawn, folder = np.random.default_rng(3), folder / "scores"
    hard = {site: drawn.uniform(0.4, 0.6, 20) for site in "ab"}
    usual = {"images": "as they are", "weighting": "uniform", "network": "mlp, batch", "epochs": 1}
    own = {"fedavg": usual, "local": {**usual, "weighting": "own"}, "fedbn": {**usual, **terms}}
    scores = {
        configuration: [
            {
                site: Scores(values + difference + drawn.normal(0, 0.02, 20), np.arange(20))
                for site, values in hard.items()
            }
            for _ in range(4)
        ]
        for configuration, difference in (("fedavg", 0.0), ("local", 0.0), ("fedbn", 0.1))
    }
    told = {title: Terms(**one) for title, one in own.items()}
    found = Kept("Drawn", "dice", (0, 1, 2, 3), told, {"fedbn": 0.6}, scores)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.csv").write_text(found.text(), "utf-8")
    return folder


def shown(text: str) -> list[tuple[str, bool]]:
    """Return each difference with its interval on a page, such as "+9.9 (+5.8 to +13.9)", and whether the page prints
    the difference in bold.
    """
    found = re.findall(r"(\*\*)?([+−-]\d[\d.]*) \(([+−-][\d.]+) to ([+−-][\d.]+)\)", text)
    return [(f"{value} ({low} to {high})".replace("−", "-"), bool(bold)) for bold, value, low, high in found]


def undeclared(text: str, known: dict[str, bool]) -> list[str]:
    wrong = [one for one, bold in shown(text) if one not in known or (bold and not known[one])]
    crossing = [one for one, bold in shown(text) if bold and "(-" in one and "to +" in one]
    return list(dict.fromkeys([*wrong, *crossing]))


def test_pages_show_declared_contrasts_only_as_kept_scores_give_them(root: Path) -> None:
    """In earlier versions, a page had a bold difference between methods on different images, and one contrast had three
    values.
    """
    known = {
        contrasts.difference_of(one).replace("*", ""): one.sure
        for found in contrasts.answers()
        for one in found.found.values()
    }
    page = (root / "docs/research/which-method.md").read_text("utf-8")
    assert len(shown(page)) > 20 and undeclared(page, known) == []
    some = next(one for one, sure in known.items() if not sure)
    breaches = ["adafed **+10.9 (+6.0 to +15.8)**", "fedavg +0.1 (−0.3 to +0.4)", f"fedbn **{some}**"]
    assert all(undeclared(one, known) for one in breaches) and undeclared(f"fedbn {some}", known) == []


def test_scores_of_few_patients_are_whole_percents(root: Path) -> None:
    """With fewer than 100 patients, a score's third decimal place has no meaning."""
    page = (root / "docs/research/which-method.md").read_text("utf-8")
    rows = page.partition("table: evidence-scores ")[2].partition("<!-- end")[0]
    told = re.findall(r"^\|.*\| (\d+) patients, \d seeds \|(.*)\|$", rows, re.MULTILINE)
    assert {int(patients) < 100 for patients, _ in told} == {True, False}
    for patients, scores in told:
        shown = [cell for cell in scores.split("|") if re.match(r" \d+(\.\d)? ", cell)]
        assert shown and all(("." in one) == (int(patients) >= 100) for one in shown)


def test_the_file_of_contrasts_is_what_kept_scores_give(root: Path) -> None:
    made = [line for table in contrasts.tables() for line in table.lines()]
    kept = result_files.rows_of(root / "results/contrasts.csv")
    assert [{name: line.get(name, "") for name in result_files.COLUMNS} for line in made] == kept
    assert contrasts.declaration().date <= result_files.header_of(root / "results/contrasts.csv")["date"][0]


@pytest.mark.slow
def test_the_file_of_contrasts_told_before_is_what_that_commit_gives(root: Path) -> None:
    told = run(["git", "rev-parse", "--is-shallow-repository"], cwd=root, capture_output=True, text=True, check=False)
    if told.stdout.strip() != "false":
        pytest.skip("this copy of the repository has no git history")
    made = [line for table in told_twice.tables() for line in table.lines()]
    kept = result_files.rows_of(root / "results/told-twice.csv")
    assert [{name: line.get(name, "") for name in result_files.COLUMNS} for line in made] == kept
    before = {(line["part"], line["configuration"], line["baseline"], line["quantity"]) for line in made}
    assert {(one.name, *pair, result_files.MEAN) for one in told_twice.earlier() for pair in one.found} <= before


def test_a_contrast_is_of_kept_scores_and_names_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrasts.kept, "FOLDER", write_scores(tmp_path, "drawn"))
    found = contrasts.answer("drawn")
    assert found.chosen == "fedbn" and found.patients == 40
    difference = found.found["fedbn", "fedavg"]
    assert difference.sure and difference.low < 0.1 < difference.high and not found.found["fedavg", "local"].sure
    # the contrast with the chosen method is declared twice: under the word chosen, and under the method's name
    assert found.pairs("chosen") == [("fedbn", "fedavg")]
    assert Kept.read(tmp_path / "scores/drawn.csv").text() == (tmp_path / "scores/drawn.csv").read_text("utf-8")


@pytest.mark.parametrize(
    "terms",
    [{"images": "standardised"}, {"weighting": "cases"}, {"network": "mlp, group"}],
    ids=lambda one: next(iter(one)),
)
def test_a_contrast_of_other_images_weights_or_networks_is_refused(
    terms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference between AdaFed on standardised images and FedAvg on raw images does not measure AdaFed alone."""
    monkeypatch.setattr(contrasts.kept, "FOLDER", write_scores(tmp_path, "drawn", **terms))
    with pytest.raises(MedsiloError, match=f"fedbn and fedavg differ in {next(iter(terms))}"):
        contrasts.answer("drawn")


def test_intervals_of_the_deleted_kind_are_gone(root: Path) -> None:
    """The intervals of earlier versions added a patient with the worst score to each hospital."""
    withdrawn = {path.stem for path in (root / "results").glob("*.csv") if "intervals" in result_files.header_of(path)}
    assert withdrawn == {*PAGES} - {"what-differs", "weights"}
    for name in withdrawn:
        lines = result_files.rows_of(root / f"results/{name}.csv")
        own = [line for line in lines if line["low"] and "each person one number" not in line["baseline"]]
        assert own == [], name


@pytest.mark.long
def test_single_site_models_answer_together_as_their_mean_probability(places: Places, tmp_path: Path) -> None:
    """The ensemble predicts the class with the highest mean probability, and survival models have no ensemble."""
    heart, brca = (
        Comparison.of("whole", replace(tiny(part), rows=("local",), baseline="local"), Places(tmp_path, places.data))
        for part in PAGES["what-differs"].parts
        if part.data in (HEART, BRCA)
    )
    assert make([heart, brca], Places(tmp_path, places.data), None) == []
    settings = heart.settings(Places(tmp_path, places.data))
    (cell,) = heart.cells
    found = ensemble_scores(cell, settings)
    assert found is not None
    sites = sorted(cell.plan.participation.everyone)
    members = [Source.open(cell.folder / "sites" / site).network for site in sites]
    for site in sites:
        data = cell.plan.task.site_data(site, sites, cell.plan.seed, settings.of(site).data)
        inputs, targets = zip(*(data.test[place] for place in range(len(data.test))), strict=True)
        with torch.no_grad():
            probabilities = torch.stack([member(torch.stack(inputs)).sigmoid() for member in members]).mean(0)
        right = ((probabilities.flatten() > 0.5) == (torch.tensor([float(one) for one in targets]) > 0.5)).double()
        assert np.array_equal(found[site].values, right.numpy())
    assert ensemble_scores(brca.cells[0], brca.settings(Places(tmp_path, places.data))) is None


def test_stressed_hospitals_differ_in_one_way_each(places: Places, tmp_path: Path) -> None:
    for kind in POWERS:
        made = write_stress(places.data / VOLUMES, tmp_path / kind, kind)
        assert sorted(path.name for path in made.iterdir()) == list(HOSPITALS)
        pictures = {site: [read(made / site / "images" / path.name) for path in files(made, site)] for site in "ad"}
        masks = {site: [read(made / site / "labels" / path.name) for path in files(made, site)] for site in "ab"}
        assert {values.shape for own in pictures.values() for values in own} == {(32, 48)}
        means = {site: float(np.mean([values.mean() for values in own])) for site, own in pictures.items()}
        sizes = {site: float(np.mean([(values > 0).sum() for values in own])) for site, own in masks.items()}
        places_of = {
            site: float(np.mean([np.argwhere(values)[:, 1].mean() for values in own])) for site, own in masks.items()
        }
        assert (means["a"] > 1.3 * means["d"]) == (kind == "gamma")
        assert (sizes["b"] > 1.5 * sizes["a"]) == (kind == "scale")
        assert (abs(places_of["a"] - places_of["b"]) > 8) == (kind == "structure")
    with pytest.raises(DataError, match="hippocampus"):
        write_stress(tmp_path, tmp_path / "none", "gamma")


def files(folder: Path, site: str) -> list[Path]:
    return sorted((folder / site / "images").glob("*.png"))


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(float)


# ------------------------------------------------------------------ recorded activity
def test_windows_are_put_in_order_and_left_so() -> None:
    right = waves(0, 4)
    stored = people(0)["x_train"]
    assert np.allclose(in_order(stored)[:4], waves(0, 12)[:4], atol=0.01)
    assert np.array_equal(in_order(right), right)


def test_the_shift_moves_axes_turns_signs_and_scales_kinds_of_sensors() -> None:
    windows = waves(0, 4)
    moved = shifted(windows, 5, "subject_03").reshape(4, 3, 3, 128)
    kinds = windows.reshape(4, 3, 3, 128)
    orders = set()
    for kind in range(3):
        ratios = moved[0, kind, :, None] / kinds[0, kind, None]  # the axes are [new axis, old axis, steps]
        even = np.argwhere(ratios.std(2) < 1e-4)
        assert len(even) == 3 and set(even[:, 0]) == set(even[:, 1]) == {0, 1, 2}
        factors = np.array([ratios[new, old].mean() for new, old in even])
        assert np.allclose(abs(factors), abs(factors[0]), rtol=1e-3) and 0.5 <= abs(factors[0]) <= 2
        orders.add((tuple(even[:, 1]), tuple(np.sign(factors))))
    assert len(orders) == 1  # all sensors of a device have the same orientation


def test_without_files_it_says_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="har_uci"):
        write_windows(tmp_path, tmp_path / "out", None)
