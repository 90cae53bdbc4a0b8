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
    rows = [(level.level, _level(level, bool(table.baseline))) for level in table.levels]
    return {
        "title": f"By {table.subgroup}, {label}",
        "subgroup": table.subgroup,
        "heads": heads,
        "rows": rows,
        "n": f"n = {counted(sum(one.patients for one in table.levels), 'test patient')}",
        "pairs": [(f"{pair.first} – {pair.second}", [_pair(pair)]) for pair in table.pairs],
        "few": [one.level for one in table.levels if one.few],
    }


def _level(level: SubgroupLevel, suppressed: bool) -> list[dict[str, Any]]:
    ends = None if level.low is None or level.high is None else (level.low, level.high)
    few = f" ({FEW})" if level.few and level.patients else ""
    cells = [
        cell(level.patients or None, missing=FEW) | {"aside": ""},
        cell(level.score.middle, f"{level.score}{few}", interval_text(ends, level.patients)),
    ]
    return [*cells, *([_pair(level.difference) if level.difference else cell(None)] if suppressed else [])]


def _pair(pair: SubgroupPair) -> dict[str, Any]:
    look = ("higher" if pair.mean > 0 else "lower") if pair.sure else ""
    return cell(100 * pair.mean, points(pair.mean), f"{points(pair.low)} to {points(pair.high)}", look)
