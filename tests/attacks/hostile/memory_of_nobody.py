# Tries to hold more memory than the limit in shared pages that are in no process's page table.
import mmap
import time

held = []
for _ in range(40):
    held.append(mmap.mmap(-1, 32 << 20))
    for offset in range(0, len(held[-1]), 4096):
        held[-1][offset] = 1
    held[-1].madvise(mmap.MADV_DONTNEED)
time.sleep(20)  # sleeps until the hospital has measured the script's memory
print("GOT 1280 MiB", flush=True)
