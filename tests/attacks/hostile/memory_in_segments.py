# Tries to exhaust the machine's memory through shared segments that outlive their process.
import ctypes
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for _ in range(200):  # 3.2 GB in total
    if (segment := libc.shmget(0, 16 << 20, 0o1600)) < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    ctypes.memset(there := libc.shmat(segment, None, 0), 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(there))
time.sleep(60)  # sleeps until the hospital has measured the script's memory
print("GOT 3 GB", flush=True)
