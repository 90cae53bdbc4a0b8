"""Create studies of the synthetic hospitals of benchmarks/brains.py."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.brains import HOSPITALS, QUESTION, narrow, plans_of, write_brain, write_hospitals
from medsilo.plan import Plan, parse_plan

__all__ = ["HOSPITALS", "QUESTION", "narrow", "plans_of", "study", "write_brain", "write_hospitals"]
TINY = {"rounds": 2, "batch_size": 2, "local_steps": 1, "momentum": 0.9}


def study(
    plans: Mapping[str, Any],
    sites: Iterable[str],
    algorithm: Mapping[str, Any],
    training: Mapping[str, Any] = TINY,
    task: Mapping[str, Any] = {"mirror": False},
    **others: Any,
) -> Plan:
    own = {"name": "nnunet", "question": QUESTION.model_dump(mode="json"), "plans": plans, **task}
    return parse_plan(
        {
            "algorithm": dict(algorithm),
            "task": own,
            "participation": {"sites": list(sites)},
            "training": dict(training),
            **others,
        }
    )
