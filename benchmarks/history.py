"""Compare today's ratios of the benchmarks with those of the last release, to find regressions.

    make bench bench-history              # of all benchmarks
    make bench-history                    # of the last `make bench`, or of the cheap benchmarks, now
    python -m benchmarks.history --now    # of the cheap benchmarks, now; a worse ratio is measured twice
    python -m benchmarks.history --keep   # at a release: later ratios are compared with today's

Each ratio is medsilo's time, memory or bytes divided by the reference's value in the same run, so ratios of different
machines are comparable. A smaller ratio is better. The program exits with 1 if a ratio is more than a tenth above the
release's ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.timing import RATIOS, run

HERE = Path(__file__).parent
RELEASED = HERE / "released.json"  # commit, date and ratios of the last release
NOTED = HERE.parent / "build/ratios.jsonl"  # the ratios that `make bench` records
CHEAP = (
    *((str(HERE / name),) for name in ("harmofl.py", "privacy.py", "data.py")),
    ("-m", "benchmarks.own_script"),
)
WORSE = 1.1


def read(lines: Iterable[str]) -> dict[str, float]:
    """Return the recorded ratios of the benchmarks; a later record of a ratio replaces an earlier record."""
    return {one["name"]: one["ratio"] for one in map(json.loads, lines)}


def run_cheap(noted: Path) -> dict[str, float]:
    """Run the benchmarks that take a minute or two, append their ratios to the file `noted`, and return the
    ratios.
    """
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.touch()
    for words in CHEAP:
        before = noted.stat().st_size
        environment = {**os.environ, RATIOS: str(noted)}
        subprocess.run([sys.executable, *words], cwd=HERE.parent, env=environment, stdout=sys.stderr)
        if noted.stat().st_size == before:
            sys.exit(f"{words[-1]} measured nothing; its output above gives the reason")
    return read(noted.read_text("utf-8").splitlines())


def run_now(released: Mapping[str, float]) -> dict[str, float]:
    """Measure a worse ratio a second time, because a short load of the machine rarely disturbs both measurements."""
    with tempfile.TemporaryDirectory() as folder:
        today = run_cheap(Path(folder) / "first")
        if table(today, released)[1]:
            again = run_cheap(Path(folder) / "second")
            today = {name: min(ratio, again.get(name, ratio)) for name, ratio in today.items()}
    return today


def table(today: Mapping[str, float], released: Mapping[str, float]) -> tuple[list[str], bool]:
    lines, worse = [f"{'':<60} {'release':>8} {'today':>8}"], False
    for name in sorted({*today, *released}):
        before, now = released.get(name), today.get(name)
        regressed = before is not None and now is not None and now > WORSE * before
        worse |= regressed
        shown = [f"{'–' if value is None else f'{value:.3f}':>8}" for value in (before, now)]
        lines.append(" ".join([f"{name:<60}", *shown, *(["WORSE"] if regressed else [])]))
    return lines, worse


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="store today's ratios as the ratios of the last release")
    parser.add_argument("--now", action="store_true", help="measure only the benchmarks that take a minute or two")
    given = parser.parse_args(arguments)
    last = (
        json.loads(RELEASED.read_text("utf-8")) if RELEASED.exists() else {"commit": "none", "date": "", "ratios": {}}
    )
    if given.now:
        today = run_now(last["ratios"])
    else:
        today = read(NOTED.read_text("utf-8").splitlines()) if NOTED.exists() else run_cheap(NOTED)
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
