# Tries to exhaust the machine's memory through shared memory, which a process's memory limit does not count.
import mmap
import time

block = bytes(16 << 20)
kept = []
for _ in range(200):  # 3.2 GB in total
    kept.append(mmap.mmap(-1, len(block)))
    kept[-1].write(block)
time.sleep(60)  # sleeps until the hospital has measured the script's memory
print("GOT 3 GB", flush=True)
