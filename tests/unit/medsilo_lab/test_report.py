"""A report contains the scores and failures of the runs' files, and no active code."""

import json
import random
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.runs import paths
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Agreement, RoundCount, Selection, SiteResult, StudyFacts, Summary
from medsilo.runs.site_files import Package, Provenance
from medsilo.tasks.overlays import write_png
from medsilo_lab.report import page, panels
from medsilo_lab.report.formats import text_table
from medsilo_lab.report.panels import Subject
from medsilo_lab.report.read import all_sites, read, read_all
from medsilo_page import charts
from medsilo_server.record import Record
from tests.conftest import over_all

VOID = {"meta", "link", "br", "hr", "img", "input"}
SITES = {"hospital-a": 48, "hospital-b": 72, "hospital-c": 30}


def summary_of(
    method: str,
    title: str,
    scores: Mapping[str, float | None],
    by_site: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> Summary:
    known = [score for score in scores.values() if score is not None]
    sites = {
        name: SiteResult(
            cases={"train": 96, "validation": 32, "test": SITES.get(name, 40)},
            contributed=2,
            validation=[0.5, 0.625, 0.75],
            test=None if score is None else {"accuracy": score, "loss": 0.3, "cases": SITES.get(name, 40)},
            bytes_up=2000,
            bytes_down=4000,
            seconds=6.0,
        ).changed(**(by_site or {}).get(name, {}))
        for name, score in scores.items()
    }
    summary = Summary(
        status="finished",
        method=method,
        title=title,
        task="synthetic-histology",
        task_title="Synthetic histology",
        synthetic=True,
        engine="simulator",
        metric="accuracy",
        seed=0,
        protocol="default",
        plan_hash="abcdef0123456789",
        packages={"medsilo": Package(version="0.1.0", hash="0123456789abcdef")},
        study="demo",
        network="small-cnn",
        parameters=12345,
        rounds=RoundCount(planned=2, done=2),
        agreed=Agreement(sites=list(scores), minimum=len(scores), when_missing="stop"),
        selected=Selection(by="mean", rounds=dict.fromkeys(scores, 2)),
        sites={},
        mean_test=sum(known) / len(known) if known else None,
        pooled_test=0.777 if known else None,
        seconds=33.1,
        started="2026-11-20T10:00:00Z",
        ended="2026-11-20T10:00:33Z",
    )
    return summary.changed(**{"sites": sites, **changes})


def round_line(number: int, sites: list[str], **changes: Any) -> Round:
    return Round(round=number, phase="train", seconds=1.8, asked=sites, answered=sites).changed(**changes)


def save(root: Path, summary: Summary, rounds: list[Round] | None = None) -> Path:
    record = Record(root / f"{summary.method}-seed{summary.seed}")
    record.folder.mkdir(parents=True)
    record.write_summary(summary)
    if rounds is None:
        rounds = [round_line(number + 1, list(summary.sites)) for number in range(summary.rounds.done)]
    for line in rounds:
        record.add_round(line)
    (record.folder / paths.PLAN).write_text(f"method: {summary.method}\nnote: <b>bold</b>\n")
    write_json(record.folder / paths.PROVENANCE, Provenance(python="3.11").as_read())
    return record.folder


def spoil(folder: Path, *path: str, value: Any) -> Path:
    file = folder / paths.SUMMARY
    part = content = json.loads(file.read_text())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    def scores(*values: float | None) -> dict[str, float | None]:
        return dict(zip(SITES, values, strict=True))

    missed = {"contributed": 1, "missed": {2: "lost: no answer within 600 s"}, "validation": [0.5, 0.6, None]}
    fedbn = summary_of("fedbn", "FedBN", scores(0.9, 0.85, 0.8), {"hospital-c": missed})
    names = list(SITES)
    lost = round_line(2, names, answered=names[:2], lost={"hospital-c": "no answer within 600 s"})
    failed = summary_of("adafed", "AdaFed", scores(None, None, None), status="failed", reason="hospital-b went away")
    return [
        save(tmp_path, summary_of("local", "Local", scores(0.8, 0.86, 0.7))),
        save(tmp_path, summary_of("fedavg", "FedAvg", scores(0.875, 0.8611111, 0.7333333))),
        save(tmp_path, fedbn, [round_line(1, names), lost]),
        save(tmp_path, failed),
        save(tmp_path, summary_of("central", "Central (pooled data, upper bound)", scores(0.95, 0.93, 0.9))),
    ]


class Page(HTMLParser):
    """An HTML parser that checks that all elements are closed in the right order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.rows: list[list[str]] = []
        self.sections: list[str] = []
        self.section = ""
        self.header_text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert not [name for name in names if name.startswith("on")], "no event handlers in attributes"
        self.addresses += [names[name] or "" for name in ("src", "href", "action", "data", "srcset") if name in names]
        self.ids += [names["id"] or ""] if "id" in names else []
        self.scripts += tag == "script"
        if tag == "section":
            self.section = names.get("id") or ""
        if tag == "tr":
            self.rows.append([])
            self.sections.append(self.section)
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "header" in self.open:
            self.header_text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, start: str, section: str = "") -> list[str]:
        rows = [row for row, own in zip(self.rows, self.sections, strict=True) if section in ("", own)]
        return next(row for row in rows if row and row[0].strip().startswith(start))


def rendered(folders: list[Path], title: str = "A title") -> tuple[str, Page]:
    text = page.render(read_all(folders), title)
    return text, Page(text)


# The page


def test_the_table_holds_the_numbers_of_the_summaries(folders: list[Path]) -> None:
    _, parsed = rendered(folders)
    for run in read_all(folders):
        cells = [(run.summary.mean_test, 3), (run.summary.pooled_test, 3), *((run.score(site), 2) for site in SITES)]
        shown = ["–" if cell is None else f"{cell:.{digits}f}" for cell, digits in cells]
        assert parsed.row(run.label, "results")[1:] == shown


def captions(text: str) -> list[str]:
    found = re.findall(r"<(caption|figcaption)>(.*?)</\1>", text, re.DOTALL)
    return [re.sub(r"<[^>]*>", "", words) for _, words in found]


def test_each_caption_says_how_many(folders: list[Path]) -> None:
    found = captions(rendered(folders)[0])
    assert len(found) > 10 and not [words for words in found if not re.search(r"n = \d", words)]
    assert f"n = {sum(SITES.values())} test cases" in " ".join(found)


def test_a_page_explains_the_terms_that_stand_in_it(folders: list[Path]) -> None:
    text, _ = rendered(folders[:1])
    found = re.findall(r"<dt>([^<]+)</dt>", text.partition('id="terms"')[2])
    assert {"seed", "accuracy", "round"} <= set(found) and not {"dice", "better", "repetition"} & set(found)
    assert found == sorted(found)


def test_title_purpose_and_contact_stand_before_the_numbers(tmp_path: Path) -> None:
    words = {"title": "Kidneys <2>", "purpose": "find kidneys", "contact": "lead@clinic.example"}
    one = save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5}, description=StudyFacts(**words)))
    _, parsed = rendered([one])
    assert all(told in parsed.header_text for told in words.values())


def test_classes_have_their_names(tmp_path: Path) -> None:
    told = {"classes": {"train": [60, 36], "validation": None, "test": None}}
    labelled = summary_of("fedavg", "FedAvg", {"a": 0.5}, {"a": told}, labels=["well", "ill"])
    _, parsed = rendered([save(tmp_path, labelled)])
    assert ["Site", "well", "ill"] in parsed.rows


def test_page_is_self_contained(folders: list[Path]) -> None:
    text, parsed = rendered(folders)
    assert not re.findall(r"https?://", text)
    assert "@import" not in text and "url(" not in text
    assert all(address.startswith(("#", "data:")) for address in parsed.addresses)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.scripts == 0 and "default-src 'none'" in text and "script-src" not in text


def test_failure_and_missing_rounds_stand_on_the_first_screen(folders: list[Path]) -> None:
    _, parsed = rendered(folders)
    assert "AdaFed: hospital-b went away" in parsed.header_text
    assert "hospital-c in round 2 of 2 – lost" in parsed.header_text
    assert "Synthetic data" in parsed.header_text


def test_single_runs_side_by_side_are_not_ranked(folders: list[Path]) -> None:
    _, parsed = rendered(folders)
    assert "none ranked" in parsed.header_text
    assert "0.850" not in parsed.header_text


def test_runs_of_several_seeds_tell_how_methods_differ_by_seed(tmp_path: Path) -> None:
    """In earlier versions, the page showed the runs of one seed only."""
    means = {("FedAvg", 0): 0.5, ("FedAvg", 1): 0.7, ("FedBN", 0): 0.8, ("FedBN", 1): 0.9}
    told = [
        summary_of(title.lower(), title, {"a": mean, "b": mean}, seed=seed, task="script", study=f"{title}-{seed}")
        for (title, seed), mean in means.items()
    ]
    folders = [save(tmp_path, one) for one in told]
    text, parsed = rendered(folders)
    assert "FedBN minus FedAvg: +25.0 points" in parsed.header_text and "(+20.0 to +30.0 by seed)" in parsed.header_text
    assert "2 seeds" in parsed.header_text and "medsilo.compare" in parsed.header_text
    assert "single seed" not in text and "has one seed" not in text


def test_all_figures_are_shown_and_what_is_withheld_is_called_so(tmp_path: Path) -> None:
    told = {
        "a": {"figures": {"accuracy": 0.5, "auroc": 0.8125}},
        "b": {"figures": {"accuracy": 0.75}, "suppressed": ["chances", "confusion"]},
        "c": {"test": {"accuracy": None, "loss": None, "cases": 3}, "suppressed": ["accuracy"]},
    }
    pooled = {"accuracy": 0.6, "auroc": 0.875}
    summary = summary_of("fedavg", "FedAvg", {"a": 0.5, "b": 0.75, "c": None}, told, pooled=pooled)
    text, parsed = rendered([save(tmp_path, summary)])
    assert parsed.row("FedAvg")[3:] == ["0.50", "0.75", "suppressed"]
    assert not [name for name in ("hd95", "ECE", "rmse") if name in text], "a page explains what it shows"
    shown = [row for row, section in zip(parsed.rows, parsed.sections, strict=True) if section == "figures"]
    assert shown == [
        ["Method and whose test cases", "accuracy", "auroc"],
        ["FedAvg a", "0.50", "0.81"],
        ["FedAvg b", "0.75", "suppressed"],
        ["FedAvg c", "suppressed", "suppressed"],
        ["FedAvg all sites' cases", "0.60", "0.88"],
    ]


@over_all("figure, also", [("hd95_core", "95 %"), ("mae", "rmse")])
def test_figures_of_which_less_is_better_are_explained(figure: str, also: str, tmp_path: Path) -> None:
    summary = summary_of("fedavg", "FedAvg", {"a": 0.5}, {"a": {"figures": {figure: 2.5}}}, pooled={figure: 2.5})
    text, _ = rendered([save(tmp_path / figure, summary)])
    [note] = [line for line in text.splitlines() if "“suppressed”" in line]
    assert also in note and "Smaller is better" in note and ("hd95" in note) == (figure != "mae")


def test_many_sites_stand_below_each_other(tmp_path: Path) -> None:
    scores = {f"site-{place:03}": place / 100 for place in range(100)}
    summaries = [summary_of("fedavg", "FedAvg", scores), summary_of("local", "Local", dict.fromkeys(scores, 0.5))]
    parsed = rendered([save(tmp_path, summary) for summary in summaries])[1]
    rows = [row for row, section in zip(parsed.rows, parsed.sections, strict=True) if section == "results"]
    assert len(rows) == 103 and {len(row) for row in rows} == {3}
    assert rows[0] == ["Site", "FedAvg", "Local reference"] and parsed.row("site-070", "results")[1:] == [
        "0.70",
        "0.50",
    ]


def test_scores_have_intervals_where_their_cases_are(tmp_path: Path) -> None:
    folder = save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.75, "b": 0.5}))
    (folder / "sites/a").mkdir(parents=True)
    lines = [f"{case},{case},{1.0 if case % 4 else 0.0}" for case in range(100)]
    (folder / "sites/a/test.csv").write_text("\n".join(["case,patient,accuracy", *lines]) + "\n")
    run = read(folder)
    low, high = run.intervals["a"]
    assert (high - low) / 2 == pytest.approx(1.96 * (0.75 * 0.25 / 100) ** 0.5, rel=0.1) and low < 0.75 < high
    assert list(run.intervals) == ["a"]
    parsed = rendered([folder])[1]
    assert parsed.row("FedAvg")[3] == f"0.750 {low:.3f}–{high:.3f}" and parsed.row("FedAvg")[4] == "0.50"
    (folder / "sites/a/test.csv").write_text("case,patient\n0,0\n")
    with pytest.raises(MedsiloError, match=r"test\.csv of a in run 'fedavg-seed0'"):
        read(folder)


def test_participation_says_what_each_site_did_and_why_one_is_missing(folders: list[Path]) -> None:
    text, parsed = rendered(folders[2:3])
    assert parsed.row("hospital-a", "participation")[1:] == ["2", "6 s", "2.0 kB", "4.0 kB"]
    assert parsed.row("hospital-c", "participation")[1] == "1"
    assert "<li>Round 2, hospital-c, lost: no answer within 600 s</li>" in text


def test_costs_are_per_contribution(folders: list[Path]) -> None:
    every = panels.costs([Subject(run.label, [run]) for run in read_all(folders)])
    costs = {label: [one["value"] for one in cells] for label, cells in every}
    assert costs["FedAvg"][1:4] == [3, 1000, 2000] and costs["FedBN"][2] == 6000 / 5


def test_text_from_other_machines_is_escaped_everywhere(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u0000\ud800"
    site = f"site {attack}"
    changes = {"status": "failed", "reason": attack, "task_title": attack}
    summary = summary_of("fedavg", f"FedAvg {attack}", {site: 0.5}, {site: {"missed": {1: attack}}}, **changes)
    lines = [round_line(1, [site], answered=[], refused={site: attack}), round_line(2, [site])]
    folder = save(tmp_path, summary, lines)
    (folder / "plan.yaml").write_text("</pre><script>alert(3)</script>")
    written = page.write([folder], tmp_path / "report.html", attack).read_text(encoding="utf-8")
    parsed = Page(written)
    assert parsed.scripts == 0
    assert "<script>alert" not in written and "<img" not in written
    assert "&lt;script&gt;alert(1)" in written


def test_missing_values_are_dashes_and_never_zero(tmp_path: Path) -> None:
    missing = dict.fromkeys(("seconds", "parameters", "plan_hash", "network", "started", "study", "protocol", "task"))
    nothing = {"validation": [None, None, None], "bytes_up": None, "bytes_down": None, "seconds": None}
    by_site = {
        "a": {**nothing, "contributed": None, "cases": {"train": None, "validation": None, "test": None}},
        "b": {**nothing, "contributed": None, "cases": None},
    }
    selected = Selection(by="mean", rounds={"a": None})
    summary = summary_of("fedavg", "FedAvg", {"a": None, "b": None}, by_site, selected=selected, **missing)
    text, parsed = rendered([save(tmp_path, summary)])
    assert parsed.row("FedAvg")[1:] == ["–"] * 4
    assert "The run has no validation scores." in text
    assert "0.000" not in text and "0.0 s" not in text and "0 B" not in text and "None" not in text
    assert "no test score for a and b" in parsed.header_text


def test_not_a_number_counts_as_missing(tmp_path: Path) -> None:
    folder = save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5, "b": 0.6}))
    spoil(folder, "sites", "a", "validation", value=[0.5, float("nan"), 0.75])
    assert read(folder).site("a").validation == [0.5, None, 0.75]


def test_one_run_one_site(tmp_path: Path) -> None:
    _, parsed = rendered([save(tmp_path, summary_of("fedavg", "FedAvg", {"only": 0.5}))])
    assert "FedAvg reaches a mean test accuracy of 0.50" in parsed.header_text
    assert "at the one site" in parsed.header_text and "n = 40 test cases" in parsed.header_text
    assert "ranked" not in parsed.header_text


def test_a_failed_run_alone_is_no_answer(tmp_path: Path) -> None:
    summary = summary_of(
        "fedavg", "FedAvg", {"a": None}, status="failed", reason="no disk", rounds=RoundCount(planned=2, done=0)
    )
    folder = save(tmp_path, summary)
    assert not (folder / "rounds.jsonl").exists()
    _, parsed = rendered([folder])
    assert "No site has a test score." in parsed.header_text and "FedAvg: no disk" in parsed.header_text


def test_a_finished_run_with_fewer_rounds_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5}, rounds=RoundCount(planned=9, done=2)))
    assert "FedAvg: finished with 2 of 9 planned rounds." in rendered([folder])[1].header_text


def test_write_is_atomic_repeatable_and_says_where(tmp_path: Path, folders: list[Path]) -> None:
    destination = tmp_path / "new" / "report.html"
    assert page.write(folders, destination, "Title") == destination
    first = destination.read_bytes()
    page.write(folders, destination, "Title")
    assert destination.read_bytes() == first
    assert [entry.name for entry in destination.parent.iterdir()] == ["report.html"]
    (folders[0] / "summary.json").write_text("{")
    with pytest.raises(MedsiloError):
        page.write(folders, destination, "Title")
    assert destination.read_bytes() == first


# The terminal


def test_text_table_shows_missing_values(tmp_path: Path) -> None:
    run = read(save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5, "b": None})))
    assert text_table(run).split("\n")[1:3] == ["a              0.50", "b              –"]


def test_text_table_keeps_control_characters_from_the_terminal(tmp_path: Path) -> None:
    summary = summary_of("fedavg", "FedAvg", {"a": None}, status="failed", reason="red \u001b[31m\nalert\u202e")
    assert text_table(read(save(tmp_path, summary))) == "FedAvg  FAILED: red alert"


# Reading


@pytest.mark.parametrize("file", ["summary.json", "plan.yaml", "provenance.json", "rounds.jsonl"])
def test_a_missing_file_is_named(folders: list[Path], file: str) -> None:
    (folders[1] / file).unlink()
    with pytest.raises(MedsiloError, match=rf"Run 'fedavg-seed0' has no {file}: .*repeat the run") as caught:
        read(folders[1])
    assert str(folders[1].parent) not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", "{", "summary.json of run 'fedavg-seed0'"),
        ("summary.json", "[]", "has schema None"),
        ("summary.json", '{"schema": 2}', "has schema 2"),
        ("provenance.json", "[]", "provenance.json of run 'fedavg-seed0'"),
        ("rounds.jsonl", '{"round": 1}\n{"rou', "rounds.jsonl of run 'fedavg-seed0', line 2"),
        ("rounds.jsonl", '{"round": "x"}', "line 1: round: "),
    ],
)
def test_a_damaged_file_is_named(folders: list[Path], file: str, content: str, message: str) -> None:
    (folders[1] / file).write_text(content)
    with pytest.raises(MedsiloError, match=re.escape(message)) as caught:
        read(folders[1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("status",), "done", "status: "),
        (("sites", "hospital-a", "test", "accuracy"), "good", "sites.hospital-a.test.accuracy: "),
        (("metric",), "dice", "sites.hospital-a.test has no 'dice'"),
        (("sites", "hospital-a", "test", "accuracy"), 7.5, "sites.hospital-a.test.accuracy is 7.5"),
        (("sites", "hospital-a", "test", "cases"), -5, "test.cases is -5"),
        (("sites", "hospital-a", "cases", "train"), -5, "sites.hospital-a.cases.train: "),
        (("sites", "hospital-a", "cases", "train"), True, "sites.hospital-a.cases.train: "),
        (("sites", "hospital-a", "bytes_up"), 10**400, "sites.hospital-a.bytes_up: "),
        (("mean_test",), 1.5, "mean_test is 1.5"),
        (("seconds",), -1.0, "seconds: "),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    folder = spoil(save(tmp_path, summary_of("fedavg", "FedAvg", {"hospital-a": 0.5})), *path, value=value)
    with pytest.raises(MedsiloError, match=re.escape(message)) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_no_folder_and_no_runs(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match="There is no run folder 'nowhere'"):
        read(tmp_path / "nowhere")
    with pytest.raises(MedsiloError, match="at least one run folder"):
        read_all([])


def test_equal_titles_are_told_apart_by_seed(tmp_path: Path) -> None:
    folders = [save(tmp_path, summary_of("fedavg", "FedAvg", {"a": 0.5}, seed=seed)) for seed in (0, 1)]
    assert [run.label for run in read_all(folders)] == ["FedAvg, seed 0", "FedAvg, seed 1"]


def test_absences_are_those_of_the_rounds(tmp_path: Path) -> None:
    summary = summary_of("fedavg", "FedAvg", {"a": 0.5, "b": 0.5, "c": 0.5})
    names = ["a", "b", "c"]
    lines = [
        round_line(1, names, answered=["b", "c"], lost={"a": "asleep"}),
        round_line(2, names, answered=["c"], refused={"b": "not finite"}, lost={"a": "left"}),
    ]
    run = read(save(tmp_path, summary, lines))
    assert [run.missed(site) for site in "abc"] == [
        {1: "lost: asleep", 2: "lost: left"},
        {2: "refused: not finite"},
        {},
    ]


def test_sites_keep_the_order_of_the_plan(tmp_path: Path) -> None:
    summary = summary_of("fedavg", "FedAvg", {"b": 0.5, "a": 0.5}, agreed=Agreement(sites=["z", "b"]))
    assert all_sites([read(save(tmp_path, summary))]) == ["z", "b", "a"]


# Charts


def chart_of(*series: charts.Series, last_x: int = 4) -> ElementTree.Element:
    options: dict[str, Any] = {"key": "k", "title": "T <1>", "x_label": "rounds", "y_label": "accuracy"}
    return ElementTree.fromstring(charts.line_chart(series, **options, y_ticks=[0, 0.5, 1], last_x=last_x))


def test_a_line_goes_on_over_rounds_without_a_value() -> None:
    chart = chart_of(charts.Series("a", [0.1, 0.2, None, 0.4, None]))
    lines = [path.get("d", "") for path in chart.iter("path") if path.get("class") == "line"]
    assert len(lines) == 1 and lines[0].count("M") == 1 and lines[0].count("L") == 2
    titles = [title.text for title in chart.iter("title")]
    assert titles == ["T <1>", "a, after 0 rounds: 0.100", "a, after 1 rounds: 0.200", "a, after 3 rounds: 0.400"]


def test_a_chart_speaks() -> None:
    chart = chart_of(charts.Series("a", [0.1, 0.2]), charts.Series("b", [None]), last_x=1)
    assert chart.findtext("desc") == "a: 0.100 after 0 rounds, 0.200 after 1. b: no values."
    assert chart.get("role") == "img" and chart.get("aria-labelledby") == "k-title"


def test_series_differ_without_colour() -> None:
    looks = {(charts.DASHES[i % len(charts.DASHES)], charts.MARKERS[i % len(charts.MARKERS)]) for i in range(35)}
    assert len(looks) == 35


def test_pictures_are_in_the_order_of_the_sites_names(tmp_path: Path) -> None:
    names = [f"hospital-{number:02}" for number in range(16)]
    folder = save(tmp_path, summary_of("fedavg", "FedAvg", dict.fromkeys(names, 0.5)))
    for name in random.sample(names, len(names)):
        pictures = paths.site_folder(folder, name) / paths.PICTURES
        pictures.mkdir(parents=True)
        write_png(pictures / "test-best.png", np.zeros((2, 2), np.uint8))
    assert list(read(folder).overlays) == names
