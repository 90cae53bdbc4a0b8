# Tries to change the packages that the hospital's own process imports: torch, medsilo, the standard library.
import os
import pathlib

import nvflare
import torch
from lead import tries

import medsilo

for module in (medsilo, nvflare, torch, os, pathlib):
    file = pathlib.Path(module.__file__)
    for path in (
        file,
        file.parent / "evil.py",
        file.parent / "__pycache__" / "evil.pyc",
        file.parent.parent / "evil.pth",
    ):
        tries(str(path), lambda: path.open("a").close())
    tries(f"{file}, its rights", lambda: os.chmod(file, 0o666))
    tries(f"{file}, its time", lambda: os.utime(file))
    tries(f"{file}, removed", lambda: os.remove(file))
tries(
    "a package installed",
    lambda: __import__("subprocess").run(["pip", "install", "--user", "six"], check=True, timeout=9),
)
