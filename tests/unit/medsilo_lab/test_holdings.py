"""Test the numbers of cases by class: their disclosure, the server's checks, and the picture in the report."""

from pathlib import Path

import pytest

from medsilo.core.errors import Refused
from medsilo.exchange.acceptance import Acceptance
from medsilo.federation.site_stack import TrainingSite
from medsilo.runs.messages import Request
from medsilo.site.settings import SiteSettings
from medsilo_lab.report import data_table, page
from medsilo_lab.report.read import read, read_all
from tests import inprocess
from tests.conftest import SITES, make_plan
from tests.sites import site_of
from tests.unit.medsilo_lab.test_report import Page, save, summary_of

SMALL = ["task.persons=6", "task.windows=12", "task.steps=32", "training.batch_size=8", "training.rounds=1"]
PARTS = ("train", "validation", "test")


def of_site(plan, site: str, folder: Path, **settings) -> TrainingSite:
    return site_of(plan, site, SITES, SiteSettings(device="cpu", **settings), folder)


def test_a_synthetic_site_tells_its_classes(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    for site in SITES:
        data = plan.task.load(site, SITES, plan.seed, None)
        labels = {part: getattr(data, part).targets.tolist() for part in PARTS}
        expected = {part: [mine.count(label) for label in range(6)] for part, mine in labels.items()}
        assert of_site(plan, site, tmp_path / site).participant.disclosure.classes() == expected


def test_a_class_with_few_cases_hides_its_part(tmp_path: Path) -> None:
    plan = make_plan("fedavg", *SMALL)
    open_ = of_site(plan, SITES[1], tmp_path).participant.disclosure.classes()
    strict = of_site(plan, SITES[1], tmp_path, min_patients_per_metric=2).participant.disclosure.classes()
    for part in PARTS:
        rare = min(count for count in open_[part] if count)
        assert strict[part] == (open_[part] if rare >= 2 else None)
    assert None in strict.values() and of_site(
        plan, SITES[1], tmp_path, min_patients_per_metric=99
    ).participant.disclosure.classes() == dict.fromkeys(PARTS)


def test_masks_have_no_classes(tmp_path: Path) -> None:
    plan = make_plan("fedavg", "task={name: synthetic-prostate}")
    assert of_site(plan, SITES[0], tmp_path).participant.disclosure.classes() == dict.fromkeys(PARTS)


def test_the_summary_has_them_at_the_sites_and_when_pooled(tmp_path: Path) -> None:
    told = {}
    for method in ("fedavg", "central"):
        plan = make_plan(method, *SMALL)
        summary = inprocess.run(plan, folder=tmp_path / method, settings=SiteSettings(device="cpu")).summary
        told[method] = {site: facts.classes for site, facts in summary.sites.items()}
        for site, facts in summary.sites.items():
            assert {part: sum(told[method][site][part]) for part in PARTS} == facts.cases
    assert told["fedavg"] == told["central"]


UNTOLD = {"validation": None, "test": None}


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        {"train": [3, 2, 0, 0, 0, 0], "validation": None},
        {"train": [3, 3, 0, 0, 0, 0], **UNTOLD},
        {"train": [5], **UNTOLD},
        {"train": [3, 2, 0, 0, 0, 0, 0], **UNTOLD},
        {"train": [6, -1, 0, 0, 0, 0], **UNTOLD},
        {"train": [5.0, 0, 0, 0, 0, 0], **UNTOLD},
        {"train": [True, 4, 0, 0, 0, 0], **UNTOLD},
        {"train": "500000", **UNTOLD},
        {"train": None, **UNTOLD, "more": None},
    ],
)
def test_the_server_refuses_what_does_not_add_up(told: object, tmp_path: Path) -> None:
    plan, site = make_plan("fedavg", *SMALL), SITES[0]
    acceptance, asked = Acceptance(plan, "s", SITES, SITES), ("join", 0)
    request = Request(task="join", round=0, study="s", plan=plan.hash, sites=tuple(SITES))
    reply = of_site(plan, site, tmp_path).answer(request.message({}))
    reply.facts["cases"] = {"train": 5, "validation": 2, "test": 1}
    reply.facts["classes"] = {"train": [3, 2, 0, 0, 0, 0], "validation": None, "test": [0, 1, 0, 0, 0, 0]}
    assert acceptance.accept(site, reply, asked, ()).cases.train == 5
    reply.facts["classes"] = told
    with pytest.raises(Refused, match="classes|counts"):
        acceptance.accept(site, reply, asked, ())


# ---------------------------------------------------------------------------------------------------- the picture
def test_the_darker_a_class_the_more_common_and_what_is_not_told_is_no_zero(tmp_path: Path) -> None:
    cases = {"a": {"train": 4, "validation": 2}, "b": {"train": 0, "validation": 1, "test": 1}}
    told = {
        site: {"cases": own, "classes": {"train": [75, 25, 0] if site == "a" else None}} for site, own in cases.items()
    }
    run = read(save(tmp_path, summary_of("fedavg", "FedAvg", dict.fromkeys(cases), told)))
    (_, heads, parts, _), (title, classes, rows, _) = data_table.tables([run])
    assert [[cell["text"] for cell in cells] for _, cells in parts] == [["4", "2", "–"], ["0", "1", "1"]]
    assert {cell["heat"] for _, cells in parts for cell in cells} == {0}
    assert (heads, title, classes) == (data_table.PARTS, "Training cases by class", ["class 0", "class 1", "class 2"])
    (_, told), (_, untold) = rows
    assert [(cell["text"], cell["aside"], cell["heat"]) for cell in told] == [
        ("75", "75%", 0.75),
        ("25", "25%", 0.25),
        ("0", "", 0.0),
    ]
    assert [(cell["text"], cell["value"], cell["heat"]) for cell in untold] == [("–", "", 0.0)] * 3


def test_the_page_draws_it_once_for_runs_that_agree(tmp_path: Path) -> None:
    scores = {"hospital-a": 0.5, "hospital-b": 0.75}
    runs = []
    for method in ("fedavg", "fedbn"):
        told = {"hospital-a": [90, 6], "hospital-b": None}
        classes = {site: {"classes": {**dict.fromkeys(PARTS), "train": counts}} for site, counts in told.items()}
        runs.append(save(tmp_path, summary_of(method, method, scores, classes)))
    text = page.render(read_all(runs), "Title")
    assert text.count('id="holdings-title"') == 1
    assert text.count("Training cases by class,") == text.count("Cases by part,") == 1
    assert Page(text).row("hospital-a", "holdings")[1:] == ["96", "32", "48"]
    assert "94%" in text
    without = page.render(read_all([save(tmp_path, summary_of("local", "Local", scores))]), "Title")
    assert "Cases by part" in without and "Training cases by class" not in without
