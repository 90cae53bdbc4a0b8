"""Say where the numbers of a page come from."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from medsilo.report.formats import moment_of, short, shown
from medsilo.report.read import RunResult, same


def provenance(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Facts shared by all runs as a list, those that differ as a table."""
    facts: dict[str, Callable[[RunResult], str]] = {
        "Status": lambda run: run.summary.status,
        "Task": lambda run: shown(run.summary.task),
        "Protocol": lambda run: shown(run.summary.protocol),
        "Seed": lambda run: shown(run.summary.seed),
        "Network": lambda run: shown(run.summary.network),
        "Parameters": lambda run: shown(run.summary.parameters),
        "Rounds": lambda run: f"{run.summary.rounds.done} of {run.summary.rounds.planned}",
        "Model chosen": lambda run: {"mean": "one round for all sites", "site": "per site"}.get(
            run.summary.selected.by or "", shown(run.summary.selected.by)
        ),
        "Engine": lambda run: shown(run.summary.engine),
        "Package": lambda run: f"{shown(run.summary.package.version)} ({short(run.summary.package.hash)})",
        "Study": lambda run: shown(run.summary.study),
        "Started": lambda run: moment_of(run.summary.started),
        "Ended": lambda run: moment_of(run.summary.ended),
        "Plan hash": lambda run: short(run.summary.plan_hash),
        "Folder": lambda run: run.folder,
    }
    shared = {name: same(runs, view) for name, view in facts.items()}
    differing = [name for name, value in shared.items() if value is None]
    return {
        "shared": {name: value for name, value in shared.items() if value is not None},
        "differing": differing,
        "rows": [{"label": run.label, "cells": [facts[name](run) for name in differing]} for run in runs],
        "plans": [
            {
                "label": run.label,
                "hash": shown(run.summary.plan_hash),
                "text": run.plan.rstrip(),
                "record": json.dumps(
                    run.provenance.model_dump(mode="json", exclude_unset=True), indent=2, ensure_ascii=False
                ),
            }
            for run in runs
        ],
    }
