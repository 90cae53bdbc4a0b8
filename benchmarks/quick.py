"""Run every benchmark and every study of results/ with --quick, in one process, so that libraries are imported once.

    python -m benchmarks.quick [NAME...]

The program shows that the benchmarks run, and measures no times. The program exits with 1 if a benchmark fails.
"""

import os
import runpy
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
# programs that lack the option --quick: they do not measure medsilo, or they need data that are not synthetic
OTHERS = {
    *(HERE / name for name in ("quick.py", "federation_parts/stock_site.py")),
    *(RESULTS / name for name in ("cross.py", "convert.py", "result_files.py")),
}


def benchmarks() -> list[str]:
    files = [
        path
        for folder in (HERE, RESULTS)
        for path in sorted(folder.rglob("*.py"))
        if path not in OTHERS and '__name__ == "__main__"' in path.read_text("utf-8")
    ]
    parts = [path.relative_to(HERE if HERE in path.parents else HERE.parent).with_suffix("").parts for path in files]
    return [".".join(part for part in own if part != "__main__") for own in parts]


def runs(name: str) -> bool:
    path, started = HERE / f"{name}.py", time.monotonic()
    sys.argv = [str(path), "--quick"]
    good = True
    try:
        if path.exists() and "from benchmarks" not in path.read_text("utf-8"):
            runpy.run_path(str(path), run_name="__main__")
        else:
            module = name if name.partition(".")[0] == RESULTS.name else f"benchmarks.{name}"
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        good = not end.code
    except Exception:
        traceback.print_exc()
        good = False
    print(f"{'ran' if good else 'FAILED'}: {name}, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return good


def main(names: list[str]) -> int:
    # without the variable MALLOC_TOP_PAD_, a benchmark would restart itself
    os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))
    sys.path.insert(0, str(HERE))
    failed = [name for name in names or benchmarks() if not runs(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
