"""What the pages promise is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.tables import PAGES, TABLES, renewed
from medsilo.cli import parsed
from tests.conftest import make_plan


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (page.name, *match)
        for page in (*root.glob("docs/*.md"), *root.glob("**/README.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    assert len(named) > 10
    for page, file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{page} names {test}"


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_models(name: str, root: Path) -> None:
    page = (root / "docs" / name).read_text(encoding="utf-8")
    assert renewed(page) == page, "make docs-tables writes them anew"
    assert renewed(page.replace("| key |", "| keys |")) == page, "the test sees a change"


def test_every_table_stands_on_a_page(root: Path) -> None:
    pages = "".join((root / "docs" / name).read_text(encoding="utf-8") for name in PAGES)
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", pages)) == sorted(TABLES)


def test_every_key_of_every_section_is_in_the_plan_s_tables(root: Path) -> None:
    page = (root / "docs/plan.md").read_text(encoding="utf-8")
    for plan in (make_plan("fedsm"), make_plan("harmofl", "task.name=synthetic-prostate")):
        for name, values in plan.resolved().items():
            for key in values if isinstance(values, dict) else ():
                assert f"`{name}.{key}`" in page or f"`{name}.{key}.name`" in page, f"{name}.{key}"


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's code that call medsilo, without what the shell does with the output."""
    fenced = False
    for line in page.read_text().replace("\\\n", " ").splitlines():
        fenced ^= line.startswith("```")
        code = line.strip() if fenced or line.startswith("    ") else ""
        if code.startswith("medsilo "):
            command = code.removeprefix("medsilo ").partition(" > ")[0]
            yield re.sub(r"<[^>]*>|…|\.\.\.", "X", command)  # what stands for a reader's own words


def test_every_command_of_a_page_is_one(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [(page, line) for page in (root / "README.md", *root.glob("docs/*.md")) for line in commands(page)]
    for page, line in found:
        words = shlex.split(line, comments=True)
        assert parsed(words)[0] == words[0], f"{page.name}: medsilo {line}"
    assert len(found) > 50


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """The functions and classes of a file; those of a class as Class.method."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{node.name}.")
    return found


def test_every_place_of_the_newcomers_walk_exists(root: Path) -> None:
    page = (root / "CONTRIBUTING.md").read_text("utf-8")
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py):([\w.]+)`", page, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, 11))
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(places) > len(steps)
    for file, name in places:
        assert name in names_in(ast.parse((root / "custom/medsilo" / file).read_text("utf-8")).body), f"{file}:{name}"
