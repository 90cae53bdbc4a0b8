"""Run the tests for changed files: tests in the folder of the file's package, and tests that import a changed file.

    python -m tests.changed BASE [OPTION...]     # `make test-changed` runs it: against main, with pytest's options

If a changed file belongs to a package outside the engine, the program also runs this package's slow tests. The engine's
slow tests run only in `make test-slow`.

The program lists changed files that no test imports.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.sources import Imports, modules

ROOT = Path(__file__).parents[1]
ENGINE, TESTS = "medsilo", ROOT / "tests"


def changed(base: str) -> list[str]:
    where = _git("merge-base", base, "HEAD")[0]
    return sorted({*_git("diff", "--name-only", where), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"git {' '.join(words)}: {done.stderr.strip()}; name a commit that is here: make test-changed SINCE=main"
        )
    return done.stdout.splitlines()


def module_of(file: str) -> str:
    """Return the name of a file's module; an HTML template belongs to the module of the template's folder."""
    known = {path.relative_to(ROOT).as_posix(): name for name, path in modules().items()}
    folder = Path(file).parent.as_posix()
    return known.get(file) or (known.get(f"{folder}/__init__.py", "") if file.startswith("custom/") else "")


def tests_for(files: Iterable[str]) -> tuple[set[Path], set[Path], list[str]]:
    engine, beside, others = set[Path](), set[Path](), []
    for file in files:
        module, path = module_of(file), ROOT / file
        if module:
            own = engine if module.partition(".")[0] == ENGINE else beside
            own |= beside_code(module) | importing(module)
        elif path.is_relative_to(TESTS) and path.name.startswith("test_") and path.is_file():
            engine.add(path)
        elif path.is_relative_to(TESTS) and path.suffix == ".py":
            engine |= importing(".".join(path.relative_to(ROOT).with_suffix("").parts))
        else:
            others.append(file)
    return engine - beside, beside, others


def beside_code(module: str) -> set[Path]:
    """Return the tests in the folder of a module's package; `tests/unit` has a folder for each package."""
    package, _, inner = module.partition(".")
    folder = inner.partition(".")[0] if package == ENGINE else package
    return set((TESTS / "unit" / folder).glob("test_*.py")) if folder else set()


def importing(module: str) -> set[Path]:
    found = set()
    for path in TESTS.rglob("test_*.py"):
        if module in (text := path.read_text("utf-8")) or module.rpartition(".")[2] in text:
            reader = Imports({module: path})
            reader.visit(ast.parse(text))
            found |= {path} if reader.found else set()
    return found


def main(arguments: Sequence[str]) -> int:
    base, *options = arguments
    engine, beside, others = tests_for(changed(base))
    codes = []
    for marks, found in (("not slow and not long", engine), ("not long", beside)):
        if found:
            names = sorted(path.relative_to(ROOT).as_posix() for path in found)
            print(f"{len(names)} files, {marks}:", *names, flush=True)
            command = [sys.executable, "-m", "pytest", "-m", marks, *options, *names]
            codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    if others:
        print("make test alone has the tests of:", *others)
    return int(any(code not in (0, 5) for code in codes))  # pytest's exit code 5 means that no test was selected


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
