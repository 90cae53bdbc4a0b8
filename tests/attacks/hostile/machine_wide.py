# Tries to use up resources that the kernel limits for the whole machine, and to read the kernel's list of memory pages.
import ctypes
import os
import socket
import struct

from lead import tries

libc = ctypes.CDLL(None, use_errno=True)


def call(*numbers: object) -> int:
    if (got := libc.syscall(*numbers)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return got


semget, io_setup = {"x86_64": (64, 206), "aarch64": (190, 0)}[os.uname().machine]
tries("a GiB of semaphores", lambda: [call(semget, 0, 32_000, 0o1600) for _ in range(500)])
tries("all asynchronous requests", lambda: call(io_setup, 4096, ctypes.byref(ctypes.c_ulong(0))))
tries("an alarm of the kernel", lambda: os.write(os.open("/proc/pressure/memory", os.O_RDWR), b"some 500000 2000000"))
for name in ("kpagecount", "kpageflags", "kpagecgroup"):
    tries(name, lambda: open(f"/proc/{name}", "rb").read(8)[0])
for family in (3, 5, 17, 30, 40):
    tries(f"a pair of sockets of family {family}", lambda: socket.socketpair(family))
tries(
    "a signal to the hospital's process, which made the socket",
    lambda: call(424, struct.unpack("i", socket.socket(fileno=os.dup(0)).getsockopt(1, 77, 4))[0], 0, 0, 0),
)
