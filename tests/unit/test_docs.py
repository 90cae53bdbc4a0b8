"""What the pages promise is there."""

import re
from pathlib import Path


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (page.name, *match)
        for page in (*root.glob("docs/*.md"), *root.glob("**/README.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    ]
    assert len(named) > 10
    for page, file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{page} names {test}"
