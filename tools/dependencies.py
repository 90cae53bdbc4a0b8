"""Write the lists of packages that pip reads, from the dependency groups in pyproject.toml.

python tools/dependencies.py        # write requirements.txt and custom/medsilo/tested.txt
python tools/dependencies.py dev    # print the packages of a group and of all groups that it includes
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = {
    "requirements.txt": ("run", "All that medsilo and its pages need, in the versions that are tested."),
    "custom/medsilo/tested.txt": ("tested", "The versions that medsilo is tested with."),
}


def group_of(name: str, groups: dict[str, list[Any]] | None = None) -> list[str]:
    if groups is None:
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    found: list[str] = []
    for own in groups[name]:
        found += group_of(own["include-group"], groups) if isinstance(own, dict) else [own]
    return list(dict.fromkeys(found))


def text_of(file: str) -> str:
    group, words = WRITTEN[file]
    told = f"# {words} Written by 'python tools/dependencies.py'\n# from the group {group!r} of pyproject.toml.\n"
    return told + "\n".join([*group_of(group), ""])


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*group_of(sys.argv[1]), sep="\n")
    else:
        for name in WRITTEN:
            (ROOT / name).write_text(text_of(name), encoding="utf-8")
