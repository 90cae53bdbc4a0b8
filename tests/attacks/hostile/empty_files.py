# Tries to exhaust the kernel's memory with a million empty files, because limits on bytes do not count empty files.
import os

for number in range(1_000_000):
    os.close(os.open(f"/dev/shm/{number:0250}", os.O_CREAT))
print("GOT a million", flush=True)
