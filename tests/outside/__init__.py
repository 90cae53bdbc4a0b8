"""Define features that a developer outside of medsilo might write, and a fixture that installs the features' files as a
package.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medsilo.core import package


def installed_as(name: str, entries: str) -> Callable[..., Iterator[None]]:
    @pytest.fixture(autouse=True)
    def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        place = tmp_path_factory.mktemp("installed")
        info = place / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        monkeypatch.syspath_prepend(place)
        package.facts_of.cache_clear()
        yield
        for file in Path(__file__).parent.glob("*.py"):
            sys.modules.pop(file.stem, None)
        package.facts_of.cache_clear()

    return installed
