"""Differences of two sets of values in words: key, old value, new value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medsilo.core.errors import reading
from medsilo.core.text import plain
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan, keys_of
from medsilo.runs import paths

MOST_KEYS, LONGEST_VALUE = 3, 80  # in one line


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the keys whose values differ, each with both values; "" where none does. A key that lacks is null."""
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    words = [f"{key} {_shown(old.get(key))}, now {_shown(new.get(key))}" for key in keys[:MOST_KEYS]]
    return "; ".join([*words, *([f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else [])])


def plan_differences(run: Path, plan: Plan) -> str:
    """Return how the plan of the run in a folder differs from this one; "" where it does not, or no run began there."""
    path = run / paths.PLAN
    if not path.exists():
        return ""
    with reading(f"{paths.PLAN} of run {run.name}"):
        there = dict(keys_of(load_yaml(path.read_text(encoding="utf-8"))))
    return differences(there, dict(keys_of(json.loads(json.dumps(plan.resolved())))))


def _shown(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), LONGEST_VALUE)
