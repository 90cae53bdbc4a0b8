"""The plan that a comparison starts from when nobody gives one: the same task, network and training for all methods."""

from typing import Any

SITES = ("hospital-a", "hospital-b", "hospital-c")


def base_plan() -> dict[str, Any]:
    """FedAvg; other methods, tasks and numbers are changes to it."""
    return {
        "algorithm": {"name": "fedavg"},
        "task": {"name": "synthetic-histology"},
        "training": {
            "rounds": 10,
            "batch_size": 16,
            "learning_rate": 0.02,
            "momentum": 0.9,
            "weight_decay": 0.0001,
        },
        "participation": {"sites": list(SITES)},
    }
