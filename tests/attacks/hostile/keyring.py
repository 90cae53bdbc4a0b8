# Tries to read the keys in the kernel's keyrings of the hospital's account, and to find an inherited open file.
import ctypes
import os

from lead import tries

libc = ctypes.CDLL(None, use_errno=True)


def call(*numbers: object) -> int:
    if (got := libc.syscall(*numbers)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return got


for ring in (-1, -2, -3, -4, -5):  # the keyrings of a thread, a process, a session, a user, and a user's session
    tries(f"keyring {ring}", lambda: call(250, 11, ring, ctypes.create_string_buffer(4096), 4096, 0))
tries("a key of its own for others", lambda: call(248, b"user", b"miller", b"1961", 4, -4))
tries("a request of a key", lambda: call(249, b"user", b"miller", b"", -4))
tries("the list of keys", lambda: open("/proc/keys").read()[0])
tries(
    "an inherited file",
    lambda: [
        link
        for own in os.listdir("/proc/self/fd")
        if int(own) > 2 and "/proc/" not in (link := os.readlink(f"/proc/self/fd/{own}"))
    ][0],
)
