"""A process reports the largest amount of memory that it has used so far."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from medsilo.core import parent_watch

SCRIPT = """
import torch
from medsilo.core.parent_watch import forget_most, most_held
before = most_held()
torch.ones(25_000_000)
most = most_held()
forget_most()
print(most - before, most_held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not parent_watch.STATUS.exists(), reason="reads the peak memory from Linux's /proc")
def test_what_was_freed_counts_until_it_is_forgotten() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=True)
    most, then = map(int, done.stdout.split())
    assert 90e6 < most < 150e6
    assert then < 50e6


def test_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_watch, "STATUS", tmp_path / "none")
    monkeypatch.setattr(parent_watch, "FORGET", tmp_path / "none" / "none")
    parent_watch.forget_most()
    assert parent_watch.most_held() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
