"""Test the checks in tools/words.py, and assert that the number of findings in all texts does not exceed the limits."""

import pytest

from tools.words import (
    FORBIDDEN,
    MOST,
    Sentence,
    blocks,
    counted,
    everything,
    of_code,
    of_settings,
    sentences_of,
)


@pytest.fixture(scope="module")
def found() -> list[Sentence]:
    return everything()


@pytest.mark.slow
def test_texts_get_no_worse(found: list[Sentence]) -> None:
    """Lower the limits in MOST whenever the texts improve."""
    counts = counted(found)
    pages = {f"{one.file}: {one.text}": one.wrong for one in found if one.kind == "page" and one.wrong}
    assert all(counts[kind] <= MOST[kind] for kind in MOST), f"{counts}, at most {dict(MOST)}; make words; {pages}"
    assert {one.kind for one in found} == {*MOST}


LONG = "The server asks " + "and asks " * 12 + "a site."
PAGE = f"""# A page of `code`

See [the other](other.md) at e.g. a site. {LONG}

| key | meaning |
|---|---|
| `a` | Gone is b |

- first
- second is refused
- third is refused by the server

```
surely
```
"""


def test_what_is_found_on_a_page() -> None:
    own = [Sentence("page", "p.md", text) for block in blocks(PAGE) for text in sentences_of(block)]
    assert [one.text for one in own][:3] == ["A page of CODE", "See the other at e.g. a site.", LONG]
    wrong = {one.text: [reason.partition(": ")[0] for reason in one.wrong] for one in own if one.wrong}
    assert wrong == {LONG: ["29 words"], "Gone is b": ['"Gone is"'], "second is refused": ['"is refused"']}
    assert counted(own)["page"] == 3 and len(FORBIDDEN) > 15


CODE = '''"""Reads a table.

    python -m table

It says what a line holds.
"""

MOST = 3  # lines of which nothing is kept
# The first line names the columns, and
# the second line has units.
key = Field(description="what the model is for")


def read(path):
    """Return whether a table is read.

    >>> read("what")
    """
'''
SETTINGS = """# The settings of a hospital.
data: /data  # one of a kind
folds: 5
"""


def test_docstrings_comments_and_descriptions_are_found_in_code() -> None:
    found = {(one.kind, one.text): bool(one.wrong) for one in of_code("table.py", CODE)}
    assert found == {
        ("docstring", "Reads a table."): False,
        ("docstring", "It says what a line holds."): True,
        ("docstring", "Return whether a table is read."): True,
        ("key", "what the model is for"): True,
        ("comment", "lines of which nothing is kept"): False,
        ("comment", "The first line names the columns, and the second line has units."): False,
    }
    assert [(one.text, bool(one.wrong)) for one in of_settings("medsilo.yaml", SETTINGS)] == [
        ("The settings of a hospital.", False),
        ("one of a kind", True),
    ]
