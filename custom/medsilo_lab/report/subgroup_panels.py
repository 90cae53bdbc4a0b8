"""The section of a page that shows scores of subgroups of patients."""

from collections.abc import Mapping, Sequence
from typing import Any

from medsilo.core.text import counted
from medsilo.runs.score import interval_text
from medsilo_lab.report.formats import cell
from medsilo_lab.study.subgroup_tables import SubgroupLevel, SubgroupPair, SubgroupTable
from medsilo_lab.study.words import points

FEW = "too few"


def section(tables: Mapping[str, Sequence[SubgroupTable]]) -> dict[str, Any]:
    """Return the section about subgroups. If no subgroup is disclosed, the section is empty.

    Args:
        tables: the tables of subgroups, by the label of their run or configuration
    """
    panels = [_panel(label, table) for label, own in tables.items() for table in own]
    return {"panels": panels, "baseline": next((one.baseline for own in tables.values() for one in own), "")}


def _panel(label: str, table: SubgroupTable) -> dict[str, Any]:
    heads = ["Patients", "Score", *([f"Difference from {table.baseline}"] if table.baseline else [])]
    rows = [(one.level, _level(one, bool(table.baseline))) for one in table.levels]
    return {
        "title": f"By {table.subgroup}, {label}",
        "subgroup": table.subgroup,
        "heads": heads,
        "rows": rows,
        "n": f"n = {counted(sum(one.patients for one in table.levels), 'test patient')}",
        "pairs": [(f"{one.first} – {one.second}", [_pair(one)]) for one in table.pairs],
        "few": [one.level for one in table.levels if one.few],
    }


def _level(one: SubgroupLevel, held: bool) -> list[dict[str, Any]]:
    ends = None if one.low is None or one.high is None else (one.low, one.high)
    few = f" ({FEW})" if one.few and one.patients else ""
    cells = [
        cell(one.patients or None, missing=FEW) | {"aside": ""},
        cell(one.score.middle, f"{one.score}{few}", interval_text(ends, one.patients)),
    ]
    return [*cells, *([_pair(one.difference) if one.difference else cell(None)] if held else [])]


def _pair(one: SubgroupPair) -> dict[str, Any]:
    look = ("higher" if one.mean > 0 else "lower") if one.sure else ""
    return cell(100 * one.mean, points(one.mean), f"{points(one.low)} to {points(one.high)}", look)
