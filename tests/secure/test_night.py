"""All kinds of disturbances happen during one unattended night, and each message about a disturbance comes only once.

The environment variable SEED=7 gives a night with different disturbances.
"""

import os
from pathlib import Path

import pytest

from tests.secure import night


@pytest.mark.long
def test_a_night(tmp_path: Path, root: Path) -> None:
    rows = night.run(tmp_path, int(os.environ.get("SEED", "0")), root)
    assert sorted(row.kind for row in rows) == sorted(night.KINDS)
    for row in rows:
        heard = [text for _, text in (*row.told, *row.at_home)]
        assert row.lost <= 1, row
        assert len(heard) == len(set(heard)) and len(heard) <= 2, row
        assert bool(row.told) or not row.is_told, row
