"""The words of pages, help, messages and templates: what docs/words.py finds, and what the gate allows."""

import re
from pathlib import Path

import pytest

from docs.words import (
    FORBIDDEN,
    MOST,
    MOST_PAGES,
    MOST_WORDS,
    OUTSIDE,
    Sentence,
    blocks,
    counted,
    everything,
    sentences_of,
)


@pytest.fixture(scope="module")
def found() -> list[Sentence]:
    return everything()


@pytest.mark.slow
def test_texts_get_no_worse(found: list[Sentence]) -> None:
    """Who makes them better lowers MOST."""
    counts = counted(found)
    pages = {f"{one.file}: {one.text}": one.wrong for one in found if one.kind == "page" and one.wrong}
    assert all(counts[kind] <= MOST[kind] for kind in MOST), f"{counts}, at most {dict(MOST)}; make words; {pages}"
    assert {one.kind for one in found} == {*MOST}


def test_pages_stay_few_and_short(root: Path) -> None:
    pages = [*root.glob("docs/**/*.md")]
    texts = [WRITTEN.sub("", page.read_text("utf-8")) for page in (*pages, *(root / name for name in OUTSIDE))]
    words = [len(text.split()) for text in texts]
    assert len(pages) <= MOST_PAGES and sum(words) <= MOST_WORDS


# Tables that a program makes.
WRITTEN = re.compile(r"<!-- (\w+): written by .*?<!-- end of \1 -->|<!-- table: .*?<!-- end -->", re.DOTALL)
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
