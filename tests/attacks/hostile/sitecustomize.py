# Tries to make the hospital's next Python process run the script's code, by writing files such as sitecustomize.py.
import os
import pathlib
import site
import sys

from lead import tries

body = "open('/tmp/mark', 'w')"
here = os.path.dirname(os.path.abspath(__file__))
for folder in {here, os.getcwd(), *sys.path, *site.getsitepackages(), sys.prefix, sys.base_prefix}:
    if folder and not folder.startswith(("/tmp", os.environ["HOME"])):
        for name in ("sitecustomize.py", "usercustomize.py", "evil.pth", "pyvenv.cfg", "json.py"):
            tries(f"{folder}/{name}", lambda: pathlib.Path(folder, name).open("a").write(body))
tries(
    "pythonstartup",
    lambda: (
        (
            pathlib.Path(site.getusersitepackages()).is_dir()
            and not site.getusersitepackages().startswith(os.environ["HOME"])
        )
        or 1 / 0
    ),
)
