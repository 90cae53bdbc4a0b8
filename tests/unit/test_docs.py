"""What the pages promise is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from medsilo.cli import parsed


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (page.name, *match)
        for page in (*root.glob("docs/*.md"), *root.glob("**/README.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    assert len(named) > 10
    for page, file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{page} names {test}"


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
