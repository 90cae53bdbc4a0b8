# Tries to stop the hospital's own process with signals to the script's parent, process group and all processes.
import contextlib
import ctypes
import os
import signal
import socket

from knows import PID
from lead import tries

libc = ctypes.CDLL(None, use_errno=True)
peer = socket.socket(fileno=os.dup(0))
tries(
    "the process at the exit",
    lambda: signal.pidfd_send_signal(
        int.from_bytes(peer.getsockopt(socket.SOL_SOCKET, 77, 4), "little"), signal.SIGKILL
    ),
)
tries(
    "the pid at the exit",
    lambda: os.kill(
        int.from_bytes(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little") or 1 << 22, signal.SIGKILL
    ),
)
tries("by its number", lambda: os.kill(PID, signal.SIGKILL))
tries("its files' owner", lambda: libc.fcntl(0, 8, -PID) and 1 / 0)
with contextlib.suppress(OSError):
    os.kill(-1, signal.SIGKILL)
os.killpg(0, signal.SIGKILL)
