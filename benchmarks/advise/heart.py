"""UCI's four hospitals as tables of their own, and the plan of a small network for them.

    python -m benchmarks.advise.heart FOLDER [--data DIR]

writes FOLDER/data and FOLDER/plan.yaml, for `medsilo advise` and `medsilo compare` on data that nobody generated.
"""

import argparse
import csv
import sys
from pathlib import Path

from medsilo.core.files import write_text
from medsilo.plan import parse_plan
from medsilo_papers.flamby import HEART, read_heart

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Write the tables and the plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise.heart", description="UCI heart as tables.")
    parser.add_argument("folder", type=Path, help="where they are written")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="holds heart_uci")
    chosen = parser.parse_args(arguments)
    columns: list[str] = []
    for hospital, lines in read_heart(chosen.data / HEART.folder).items():
        columns = [name for name in lines[0] if name not in ("outcome", "part")]
        place = chosen.folder / "data" / hospital
        place.mkdir(parents=True)
        with (place / "cases.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["patient", "outcome", *columns], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({"patient": number, **line} for number, line in enumerate(lines))
    plan = parse_plan(
        {
            "algorithm": {"name": "fedavg"},
            "task": {"name": "table", "columns": columns, "labels": ["0", "1"]},
            "network": {"name": "mlp"},
            "training": {"rounds": 15, "local_epochs": 2, "batch_size": 16, "learning_rate": 0.02, "momentum": 0.9},
            "participation": {"sites": sorted(place.name for place in (chosen.folder / "data").iterdir())},
        }
    )
    write_text(chosen.folder / "plan.yaml", plan.to_yaml())
    return 0


if __name__ == "__main__":
    sys.exit(main())
