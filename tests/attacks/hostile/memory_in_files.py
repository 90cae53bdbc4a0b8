# Tries to exhaust the machine's memory through files in memory that have no name and are not mapped.
import os
import time

block = bytes(16 << 20)
kept = []
for _ in range(200):  # 3.2 GB in total
    kept.append(os.memfd_create("x"))
    os.write(kept[-1], block)
time.sleep(60)  # sleeps until the hospital has measured the script's memory
print("GOT 3 GB", flush=True)
