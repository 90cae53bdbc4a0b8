"""Cases by class: what sites tell of them, what the server accepts, and the picture in the report."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from medsilo.core.errors import Refused
from medsilo.federation import inprocess
from medsilo.federation.accepting import Acceptance
from medsilo.federation.around import TrainingSite
from medsilo.report import holdings, page
from medsilo.report.read import read_all
from medsilo.runs.messages import Request
from medsilo.site.settings import SiteSettings
from tests.conftest import SITES, make_plan
from tests.sites import site_of
from tests.unit.test_report import save, summary_of

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
    strict = of_site(plan, SITES[1], tmp_path, smallest_metric=2).participant.disclosure.classes()
    for part in PARTS:
        rare = min(count for count in open_[part] if count)
        assert strict[part] == (open_[part] if rare >= 2 else None)
    assert None in strict.values() and of_site(
        plan, SITES[1], tmp_path, smallest_metric=99
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
    reply = of_site(plan, site, tmp_path).answer(request.parcel({}))
    reply.facts["cases"] = {"train": 5, "validation": 2, "test": 1}
    reply.facts["classes"] = {"train": [3, 2, 0, 0, 0, 0], "validation": None, "test": [0, 1, 0, 0, 0, 0]}
    assert acceptance.accept(site, reply, asked, ()).cases.train == 5
    reply.facts["classes"] = told
    with pytest.raises(Refused, match="classes|counts"):
        acceptance.accept(site, reply, asked, ())


# ---------------------------------------------------------------------------------------------------- the picture
def test_areas_are_cases() -> None:
    svg = ElementTree.fromstring(
        holdings.dots(["a", "b"], ["0", "1", "2"], [[100, 25, 0], [None, 4, 100]], key="k", title="T")
    )
    radii = [float(dot.get("r")) for dot in svg.iter("circle")]
    assert len(radii) == 4  # 0 and what is not told have no dot
    assert [r**2 / radii[0] ** 2 for r in radii] == pytest.approx([1, 0.25, 0.04, 1], abs=0.01)
    texts = [text.text for text in svg.iter("text")]
    assert texts.count("–") == 1 and texts.count("100") == 2
    assert svg.find("desc").text == "a: 0 100, 1 25, 2 0. b: 0 not told, 1 4, 2 100."
    across = {dot.get("cx") for dot in svg.iter("circle")}
    down = {dot.get("cy") for dot in svg.iter("circle")}
    assert len(across) == 3 and len(down) == 2


def test_many_classes_and_sites_fit() -> None:
    svg = ElementTree.fromstring(
        holdings.dots(
            [f"s{n}" for n in range(20)],
            [str(n) for n in range(40)],
            [[n + 1] * 40 for n in range(20)],
            key="k",
            title="T",
        )
    )
    width, height = (float(length) for length in svg.get("viewBox").split()[2:])
    dots = list(svg.iter("circle"))
    assert width <= 660 and len(dots) == 800
    assert all(0 < float(dot.get("cx")) < width and 0 < float(dot.get("cy")) < height for dot in dots)
    assert max(2 * float(dot.get("r")) for dot in dots) < (width - 92) / 40


def test_the_page_draws_it_once_for_runs_that_agree(tmp_path: Path) -> None:
    scores = {"hospital-a": 0.5, "hospital-b": 0.75}
    runs = []
    for method in ("fedavg", "fedbn"):
        told = {"hospital-a": [90, 6], "hospital-b": None}
        classes = {site: {"classes": {**dict.fromkeys(PARTS), "train": counts}} for site, counts in told.items()}
        runs.append(save(tmp_path, summary_of(method, method, scores, classes)))
    text = page.render(read_all(runs), "Title")
    assert text.count(">Who has what</h2>") == 1
    assert text.count("Training cases by class") >= 1 and text.count('id="who-') == 4  # two pictures, title and words
    assert "hospital-a, 0: 90" in text and "hospital-b: 0 not told, 1 not told." in text
    without = page.render(read_all([save(tmp_path, summary_of("local", "Local", scores))]), "Title")
    assert "Cases by part" in without and "Training cases by class" not in without
