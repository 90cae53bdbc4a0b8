"""Compare the times of two functions by the fastest of several repetitions, because other processes can only slow a
repetition down.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Work = Callable[[], object]
QUICK = "--quick"
RATIOS = "MEDSILO_RATIOS"  # a file to which `note` appends each ratio, for benchmarks/history.py


def seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fastest(work: Work, repeats: int) -> float:
    """Return the seconds of the fastest call after a warm-up call."""
    work()
    return min(seconds(work) for _ in range(repeats))


def fastest_in_turn(first: Work, second: Work, repeats: int) -> tuple[float, float]:
    """Return the seconds of both functions; the functions are called in turn, so that a change of the machine's speed
    affects both.
    """
    first(), second()
    times = [(seconds(first), seconds(second)) for _ in range(repeats)]
    return min(time for time, _ in times), min(time for _, time in times)


def run(main: Callable[[], int | None], names: dict[str, Any], **quick: Any) -> NoReturn:
    """With --quick, the variables `names` get smaller values, the measured ratios mean little, and the program checks
    no bounds.
    """
    asked = QUICK in sys.argv[1:]
    if asked:
        sys.argv.remove(QUICK)
        names |= {"QUICKLY": [QUICK], **quick}
    code = main()
    sys.exit(0 if asked else code)


def note(name: str, ratio: float) -> None:
    """Record a ratio of medsilo to its reference for a comparison with the last release; a smaller ratio is better."""
    if place := os.environ.get(RATIOS):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "ratio": round(ratio, 4)}) + "\n")
