# Tries to exhaust the machine's memory through page tables: the script only reads memory to which it never wrote.
import ctypes
import time

STEP = 2 << 20  # bytes of memory that one page of the page table covers
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
size = 400 << 30
start = libc.mmap(None, ctypes.c_size_t(size), 1, 0x4022, -1, 0)  # readable, private memory without reserved space
libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 15)  # no huge pages
for offset in range(0, size, STEP):
    ctypes.string_at(start + offset, 1)
time.sleep(20)  # sleeps until the hospital has measured the script's memory
print("GOT 800 MiB", flush=True)
