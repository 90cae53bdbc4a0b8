# Tries to move memory pages into a pipe, where the kernel counts the pages for no process.
import ctypes
import os
import platform

from lead import tries

VMSPLICE, TEE, INOTIFY = {"x86_64": (278, 276, 294), "aarch64": (75, 77, 26)}[platform.machine()]
call = ctypes.CDLL(None, use_errno=True).syscall


class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def works(number: int, *arguments: object) -> int:
    if (done := call(number, *arguments)) < 0:
        raise OSError(ctypes.get_errno(), "call")
    return done


page, (reads, writes) = ctypes.create_string_buffer(4096), os.pipe()
os.write(writes, b"x")
tries("vmsplice", lambda: works(VMSPLICE, writes, ctypes.byref(Piece(ctypes.addressof(page), 1)), 1, 0))
tries("tee", lambda: works(TEE, reads, os.pipe()[1], 1, 0))
tries("inotify", lambda: works(INOTIFY, 0))
