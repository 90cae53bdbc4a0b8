# Tries to leave symbolic links out of the sandbox in the script's scratch folder, for a reader of the folder to follow.
import os

from knows import KIT
from lead import tries

os.chdir("/tmp")
for number, to in enumerate(
    (
        f"{KIT}/startup/client.key",
        f"/proc/1/root{KIT}/startup/client.key",
        f"../../../..{KIT}/startup/client.key",
        "/proc/self/root/etc/shadow",
        "/proc/1/cwd",
    )
):
    os.symlink(to, f"link{number}")
    tries(to, lambda: open(f"link{number}", "rb").read(9)[0])
os.chroot("/tmp") if False else None
tries("a root of its own", lambda: os.chroot("/tmp"))
tries("an old root", lambda: os.listdir("/oldroot")[0])
tries("a link in place of its code", lambda: os.symlink(KIT, os.path.dirname(os.path.abspath(__file__)) + "/kit"))
