"""The questions that the command line asks of a comparison."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import PLAN, find_job
from medsilo.plan import Plan, load_plan, parse_plan
from medsilo.registry import METHODS
from medsilo.study.base_plan import base_plan
from medsilo.study.cells import Cell, Row, cells_of, parse_sweep, plan_of, swept_rows
from medsilo.study.norms import with_local_pairs


@dataclass(frozen=True)
class Asked:
    """The comparison that a person asks for, as it was written."""

    task: str | None
    plan: Path | None  # a plan or a job's folder
    methods: Sequence[str]
    row: Sequence[str]
    seeds: Sequence[int]
    sweep: Sequence[str]
    equal_work: bool
    protocol: str | None
    changes: Sequence[str]
    out: Path
    folds: int | None = None


def asked(options: Asked) -> tuple[Plan, list[Cell]]:
    """Return the plan that the rows change, and the cells; a wrong one is an error before anything starts."""
    task = [f"task.name={options.task}"] if options.task else []
    if options.plan:
        path = find_job(options.plan) / PLAN if options.plan.is_dir() else options.plan
        plan = load_plan(path, task)
    else:
        plan = parse_plan(base_plan(), task)
    rows = [Row.parse(text) for text in [*",".join(options.methods).split(","), *options.row] if text]
    if options.protocol:
        rows = [_under(row, options.protocol, plan) for row in rows]
    if not rows:
        raise MedsiloError("nothing to compare; give --methods local,fedavg or --row 'title: key=value'")
    work = None
    if options.equal_work:
        training = plan.with_changes(options.changes).training
        work = training.rounds * training.local_epochs
    rows = swept_rows(rows, parse_sweep(options.sweep), work)
    rows = with_local_pairs(rows, {row: plan_of(plan, row, options.changes) for row in rows})
    return plan, cells_of(plan, rows, options.seeds, options.changes, options.out, options.folds)


def _under(row: Row, protocol: str, plan: Plan) -> Row:
    """The row with all that the protocol says of its method; what the row says itself must agree with it."""
    method = METHODS.get(row.method or plan.algorithm.name)
    said = method.protocols.get(protocol, {}) if method else {}
    name = [change for change in row.changes if change == f"algorithm.name={row.method}"]
    rest = [change for change in row.changes if change not in name]
    # What a plan lacks, as some networks lack norms, can't break the rule either.
    values = [f"{key}={json.dumps(value)}" for key, value in said.items() if _has(plan, key)]
    return replace(row, changes=(*name, f"protocol={protocol}", *values, *rest))


def _has(plan: Plan, key: str) -> bool:
    section, _, name = key.partition(".")
    return section == "algorithm" or hasattr(getattr(plan, section), name)
