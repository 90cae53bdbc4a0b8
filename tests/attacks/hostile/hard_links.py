# Tries to reach a file outside the sandbox by a second name: a hard link, a file handle or an open descriptor.
import ctypes
import os
import stat

import torch
from knows import KIT
from lead import tries

libc = ctypes.CDLL(None, use_errno=True)
for path in (
    f"{KIT}/startup/client.key",
    "/etc/passwd",
    torch.__file__,
    os.path.abspath(__file__),
    "/proc/self/exe",
    "/proc/self/fd/1",
):
    tries(path, lambda: os.link(path, "/tmp/second" + path.replace("/", "-"), follow_symlinks=True))
    tries(f"{path}, moved", lambda: os.rename(path, "/tmp/moved"))
handle = (ctypes.c_int * 34)(8, 1, 2, 0)  # file handle of inode 2, the root of the disk
tries("a handle", lambda: os.listdir(open_by) if (open_by := libc.open_by_handle_at(0, handle, 0)) > 0 else 1 / 0)
tries("its log, as a program for others", lambda: os.fchmod(1, 0o4755) if stat.S_ISREG(os.fstat(1).st_mode) else 1 / 0)
tries("its log, longer", lambda: os.ftruncate(1, 1 << 40))
