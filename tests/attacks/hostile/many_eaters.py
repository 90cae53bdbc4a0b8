# Tries to exhaust the memory with many processes, each of which stays below its own limit.
import os
import time

for _ in range(6):
    if not os.fork():
        mine = b"x" * (700 << 20)
        time.sleep(65)
time.sleep(60)
print("GOT 4 GiB", flush=True)
