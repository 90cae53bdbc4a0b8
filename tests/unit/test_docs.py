"""Promises of the pages, held against the package."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.links import anchors, for_the_site, is_outward, links, target_of
from docs.tables import PAGES, REFERENCE, TABLES, emptied, renewed
from medsilo import __version__
from medsilo.check.disclosure import leaks, leaving
from medsilo.check.method_facts import FACTS
from medsilo.cli import main
from medsilo.core.yaml_text import load_yaml
from medsilo.registry import METHODS
from medsilo.site.settings import SiteSettings
from medsilo.tasks.sources import DataSource
from results.result_files import rows_of
from tests.commands import parsed
from tests.conftest import make_plan

SCRIPT = re.compile(r"python (benchmarks/[\w/]+\.py)")


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (page.name, *match)
        for page in (*root.glob("docs/**/*.md"), *root.glob("**/README.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    for page, file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{page} names {test}"


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_models(name: str, root: Path) -> None:
    page = (root / "docs" / name).read_text(encoding="utf-8")
    assert renewed(page) == page, "make docs-tables writes them again"
    assert renewed(page.replace("| key |", "| keys |")) == page, "the test sees a change"


def test_reference_pages_are_filled_when_the_site_is_built(root: Path) -> None:
    for name in REFERENCE:
        page = (root / "docs" / name).read_text(encoding="utf-8")
        assert emptied(page) == page, f"docs/{name} keeps the content of its tables"
        assert len(page.split()) < 800 < 3_000 < len(renewed(page).split()), name


def test_every_table_stands_on_a_page(root: Path) -> None:
    pages = "".join((root / "docs" / name).read_text(encoding="utf-8") for name in (*PAGES, *REFERENCE))
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", pages)) == sorted(TABLES)


def test_every_key_of_every_section_is_in_the_plan_s_tables(root: Path) -> None:
    page = text_of(root / "docs/reference/keys.md") + (root / "docs/research/methods.md").read_text("utf-8")
    for plan in (make_plan("fedsm"), make_plan("harmofl", "task.name=synthetic-prostate")):
        for name, values in plan.resolved().items():
            for key in values if isinstance(values, dict) else ():
                assert f"`{name}.{key}`" in page or f"`{name}.{key}.name`" in page, f"{name}.{key}"


def test_every_key_that_a_page_names_is_one(root: Path) -> None:
    """As `participation.minimum`, or `threads: 1`. What follows is NVFlare's, Docker's or a layer's own."""
    others = {"host", "image", "medsilo", "out", "scheme", "use"}
    rows = [line for made in TABLES.values() for line in made().splitlines() if line.startswith("| `")]
    known = {key for row in rows for key in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    sections = {key.partition(".")[0] for key in known if "." in key}
    parts = {
        *others,
        *SiteSettings.model_fields,
        *DataSource.model_fields,
        *(part for key in known for part in key.split(".")),
    }
    for page in root.glob("docs/**/*.md"):
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`", text):
            last = key.rpartition(".")[2]
            if key.split(".")[0] in sections and last not in ("csv", "html", "json", "jsonl", "py", "yaml"):
                assert key in known or any(own.startswith(f"{key}.") for own in known), f"{page.name}: {key}"
        for key in re.findall(r"`([a-z_]+): [^`]*`", text):
            assert key in parts, f"{page.name}: {key}"


def text_of(page: Path) -> str:
    """Return a page's text; of a reference page as the site has it."""
    text = page.read_text("utf-8")
    return renewed(text) if page.as_posix().endswith(tuple(f"docs/{name}" for name in REFERENCE)) else text


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's code that call medsilo, without what the shell does with the output."""
    fenced = False
    for line in text_of(page).replace("\\\n", " ").splitlines():
        fenced ^= line.startswith("```")
        code = line.strip() if fenced or line.startswith("    ") else ""
        if code.startswith("medsilo "):
            command = code.removeprefix("medsilo ").partition(" > ")[0]
            yield re.sub(r"<[^>]*>|…|\.\.\.", "X", command)  # what stands for a reader's own words


def test_every_command_of_a_page_is_one(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = (root / "README.md", *root.glob("docs/**/*.md"))
    found = [(page, line) for page in told for line in commands(page)]
    for page, line in found:
        words = shlex.split(line, comments=True)
        assert parsed(words)[0].partition(" ")[0] == words[0], f"{page.name}: medsilo {line}"
    assert len(found) > 50


def test_the_guide_explains_each_place_of_a_check(root: Path) -> None:
    page = text_of(root / "docs/study/join.md").partition("| where |")[2].partition("\n\n")[0]
    told = {word.strip() for line in page.splitlines()[1:] for word in line.split("|")[1].split(",")}
    code = "".join(path.read_text() for path in (root / "custom/medsilo/check").glob("*.py"))
    places = set(re.findall(r"(?:Finding|Finding\.stopping|_guarded)\(\s*\"(\w+)\"", code))
    assert len(places) > 8 and places <= told


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """The functions and classes of a file; those of a class as Class.method."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{node.name}.")
    return found


def test_the_guides_first_study_is_of_the_hospitals_whose_kits_they_make(root: Path) -> None:
    made = {
        hospital["name"] for hospital in load_yaml((root / "provisioning/consortium.yaml").read_text())["hospitals"]
    }
    for page in ("docs/study/consortium.md", "provisioning/README.md"):
        first = next(line for line in (root / page).read_text().splitlines() if line.startswith("medsilo submit jobs"))
        named = re.search(r"participation\.sites=\[(.+?)\]", first)
        assert named and {*named[1].split(",")} == made, page


def test_every_place_of_the_newcomers_walk_exists(root: Path) -> None:
    page = (root / "CONTRIBUTING.md").read_text("utf-8")
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py):([\w.]+)`", page, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, 11))
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(places) > len(steps)
    for file, name in places:
        assert name in names_in(ast.parse((root / "custom/medsilo" / file).read_text("utf-8")).body), f"{file}:{name}"
    read = {file for number, file, _ in steps if number != "9"}
    assert sum(len((root / "custom/medsilo" / file).read_text("utf-8").splitlines()) for file in read) <= 2_050


def rows_of_methods(root: Path) -> dict[str, str]:
    """Return what the page of methods says that leaves a hospital, by method."""
    page = (root / "docs/research/methods.md").read_text("utf-8")
    return dict(re.findall(r'^\| <a name="([\w-]+)">(?:[^|]+\|){3} ([^|]+?) \|', page.replace("\\|", "/"), re.M))


def test_the_page_of_methods_says_what_leaves_a_hospital(root: Path) -> None:
    """A line begins with the groups that the phases send; remarks follow after a semicolon."""
    rows = rows_of_methods(root)
    assert list(rows) == list(FACTS)
    assert {name: told.partition(";")[0] for name, told in rows.items()} == {
        name: leaving(METHODS[name]()) for name in FACTS
    }


@pytest.mark.parametrize("method", [name for name in FACTS if not METHODS[name].pooled])
def test_every_group_that_leaves_is_named(method: str, root: Path) -> None:
    """The disclosure report names groups that have tensors in this plan's networks; the list has their titles."""
    plan = make_plan(method)
    titles = {group.name: group.title or group.name for phase in plan.course.phases for group in phase.sent}
    told = rows_of_methods(root)[method]
    assert all(titles[leak.group] in told for leak in leaks(plan))
    assert (told == "nothing") == (not leaks(plan))


def test_the_command_says_what_leaves_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "run central with --engine inprocess" in lines["run"]
    for name, cell in rows_of_methods(root).items():
        assert lines[name].endswith(cell.partition(";")[0])


# ---------------------------------------------------------------------------------------------------- versions, words


def test_every_benchmark_that_a_page_names_is_there(root: Path) -> None:
    """A page told how to repeat it by commands that were gone."""
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text("utf-8")
        modules = {
            name.rstrip(".").replace(".", "/")
            for name in re.findall(r"python -m ((?:benchmarks|results)\b[\w.]*)", text)
        }
        files = {root / f"{name}.py" for name in modules if not (root / name / "__main__.py").is_file()}
        gone = [str(file) for file in files | {root / name for name in SCRIPT.findall(text)} if not file.is_file()]
        assert gone == [], page.name


def test_intervals_on_pages_are_those_of_the_files(root: Path) -> None:
    """A page concluded from three seeds, beside tables of five."""
    known = set()
    for path in (root / "results").glob("*.csv"):
        for line in (line for line in rows_of(path) if line["low"] and line["high"]):
            ends = round(float(line["low"]), 1), round(float(line["high"]), 1)
            known |= {ends, (-ends[1], -ends[0])}
    for page in ("docs/research/which-method.md", "docs/start/your-data.md"):
        text = (root / page).read_text("utf-8").replace("−", "-")
        found = {(float(low), float(high)) for low, high in re.findall(r"\(([+-][\d.]+) to ([+-][\d.]+)\)", text)}
        assert found and found <= known, (page, found - known)


def test_changelog_and_citation_are_of_this_version(root: Path) -> None:
    changes = (root / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## (\S+)", changes, re.M)
    cited = load_yaml((root / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert newest and newest[1] == str(cited["version"]) == __version__
    assert (cited["license"], cited["title"]) == (project["license"], project["name"])
    named = re.search(r"\((\S+) names them\)", cited["message"])
    assert named and "| method | paper |" in (root / named[1]).read_text("utf-8")
    assert cited["repository-code"] == project["urls"]["Repository"]
    assert f"tag `v{__version__}`" in changes  # the links of a wheel's README lead to it


# ---------------------------------------------------------------------------------------------------- links
def pages_of(root: Path) -> list[Path]:
    """All pages that people read in the repository or on the site."""
    folders = ("docs", "jobs", "provisioning", "site_configs", "results", "examples")
    return [*root.glob("*.md"), *(page for folder in folders for page in root.glob(f"{folder}/**/*.md"))]


def lost(root: Path, page: str, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    gone = []
    for link in links(text):
        path, anchor = target_of(page, link)
        if is_outward(link):
            continue
        known = anchors(text_of(root / path)) if anchor and path.endswith(".md") else {""}
        if not (root / path).exists() or anchor not in known:
            gone.append(link)
    return gone


def test_every_link_and_anchor_of_a_page_leads_somewhere(root: Path) -> None:
    pages = {page.relative_to(root).as_posix(): text_of(page) for page in pages_of(root)}
    assert {name: gone for name, text in pages.items() if (gone := lost(root, name, text))} == {}
    assert sum(len(links(text)) for text in pages.values()) > 200
    wrong = "[a](your-data.md#no-such) [b](none.md) `[c](code.md)` [d](#nor-this)\n```\n[e](fenced.md)\n```\n"
    assert lost(root, "docs/start/install.md", wrong) == ["your-data.md#no-such", "none.md", "#nor-this"]


def test_links_hold_on_the_site_as_well(root: Path) -> None:
    text = (
        "[a](docs/reference/keys.md#training) [b](jobs/fedbn) [c](provisioning) [d](#here) [e](https://example.org/x)"
    )
    assert links(for_the_site(text, "README.md")) == [
        "reference/keys.md#training",
        "repository/jobs/fedbn.md",
        "repository/provisioning/README.md",
        "index.md#here",
        "https://example.org/x",
    ]
    assert links(for_the_site("[a](../../README.md) [b](../reference/keys.md)", "docs/start/install.md")) == [
        "../index.md",
        "../reference/keys.md",
    ]


def test_every_page_is_in_the_site_s_navigation(root: Path) -> None:
    written = (root / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"[\w/.-]+\.md$", written, re.M)) - {"index.md"}
    outside = {name for name in named if name.startswith("repository/")}
    pages = {page.relative_to(root / "docs").as_posix() for page in root.glob("docs/**/*.md")}
    assert named - outside == pages
    assert all((root / name.removeprefix("repository/")).is_file() for name in outside)
