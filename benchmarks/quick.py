"""Every benchmark with --quick, one after the other in one process, so that all are imported once.

    python -m benchmarks.quick [NAME...]

It shows that they run, and says nothing of what they measure. Ends with 1 where one does not run.
"""

import os
import runpy
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("quick.py", "cross.py", "federation_parts/stock_site.py", "against_peft.py")
OWN = {HERE / name for name in NAMES}


def benchmarks() -> list[str]:
    """Return what is run: files, and modules of the package."""
    files = [
        path
        for path in sorted(HERE.rglob("*.py"))
        if path not in OWN and '__name__ == "__main__"' in path.read_text("utf-8")
    ]
    parts = [path.relative_to(HERE).with_suffix("").parts for path in files]
    return [".".join(part for part in own if part != "__main__") for own in parts]


def runs(name: str) -> bool:
    """Return whether a benchmark runs."""
    path, started = HERE / f"{name}.py", time.monotonic()
    sys.argv = [str(path), "--quick"]
    good = True
    try:
        if path.exists() and "from benchmarks" not in path.read_text("utf-8"):
            runpy.run_path(str(path), run_name="__main__")
        else:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as end:
        good = not end.code
    except Exception:
        traceback.print_exc()
        good = False
    print(f"{'ran' if good else 'FAILED'}: {name}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return good


def main(names: list[str]) -> int:
    """Zero when all ran."""
    os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))  # one of them would start itself a second time to set it
    sys.path.insert(0, str(HERE))
    failed = [name for name in names or benchmarks() if not runs(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
