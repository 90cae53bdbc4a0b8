"""Today's ratios of the benchmarks beside those of the last release: a regression shows.

    make bench bench-history              # of all benchmarks
    make bench-history                    # of the last `make bench`; where there was none, of the cheap ones, now
    python -m benchmarks.history --keep   # at a release: today's are those to compare with from now on

Each ratio is medsilo's time, memory or bytes against a reference that was measured in the same run, so that they hold
on another machine, too; less is better. Ends with 1 where one is more than a tenth above the release's.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.timing import RATIOS, run

HERE = Path(__file__).parent
RELEASED = HERE / "released.json"  # commit, date and ratios of the last release
NOTED = HERE.parent / "build/ratios.jsonl"  # by `make bench`
CHEAP = ("harmofl.py", "privacy.py", "data.py")
WORSE = 1.1


def read(lines: Iterable[str]) -> dict[str, float]:
    """Return the ratios that benchmarks noted; of one that was noted twice, the last."""
    return {one["name"]: one["ratio"] for one in map(json.loads, lines)}


def run_cheap() -> None:
    """Run the benchmarks that take a minute or two."""
    NOTED.parent.mkdir(parents=True, exist_ok=True)
    for name in CHEAP:
        subprocess.run([sys.executable, HERE / name], env={**os.environ, RATIOS: str(NOTED)}, stdout=sys.stderr)


def table(today: Mapping[str, float], released: Mapping[str, float]) -> tuple[list[str], bool]:
    """Return the lines, and whether a ratio is worse than the release's."""
    lines, worse = [f"{'':<60} {'release':>8} {'today':>8}"], False
    for name in sorted({*today, *released}):
        before, now = released.get(name), today.get(name)
        regressed = before is not None and now is not None and now > WORSE * before
        worse |= regressed
        shown = [f"{'–' if value is None else f'{value:.3f}':>8}" for value in (before, now)]
        lines.append(" ".join([f"{name:<60}", *shown, *(["WORSE"] if regressed else [])]))
    return lines, worse


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or keep today's ratios as the release's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="today's are the last release's from now on")
    given = parser.parse_args(arguments)
    if not NOTED.exists():
        run_cheap()
    today = read(NOTED.read_text("utf-8").splitlines())
    last = (
        json.loads(RELEASED.read_text("utf-8")) if RELEASED.exists() else {"commit": "none", "date": "", "ratios": {}}
    )
    if given.keep:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout
        kept = {
            "commit": commit.strip(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "ratios": {**last["ratios"], **today},
        }
        RELEASED.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        return 0
    print(f"release: {last['commit'][:12]} of {last['date']}")
    lines, worse = table(today, last["ratios"])
    print("\n".join(lines))
    return 1 if worse else 0


if __name__ == "__main__":
    run(main, globals(), NOTED=Path(os.devnull))
