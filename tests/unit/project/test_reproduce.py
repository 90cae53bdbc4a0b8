"""Each command in docs/research/reproduce.md is valid, even if the data are missing."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import joined, parsed
from tests.conftest import wanted

TEXT = (Path(__file__).resolve().parents[3] / "docs/research/reproduce.md").read_text()
TEXT = joined(TEXT)
COMMANDS = re.findall(r"^    medsilo (.+)$", TEXT, re.MULTILINE)
# checking a plan builds the plan's networks, and the networks in the papers are large
BY_SIZE = [pytest.param(line, marks=pytest.mark.long) if "compare --plan" in line else line for line in COMMANDS]


@pytest.mark.slow
@pytest.mark.parametrize("command", BY_SIZE)
def test_the_command_is_one(command: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    name, values = parsed(shlex.split(command))
    if name == "compare":
        cells = replace(wanted(shlex.split(command)), seeds=[0]).all_cells()
        assert len(cells) >= 2
        names = {cell.row.title for cell in cells}
        assert values["baseline"] is None or values["baseline"] in names
    if name == "run":
        from medsilo.plan import load_plan

        assert list(load_plan(values["plan"], values["changes"]).participation.evaluation_sites) == ["rim-one"]
