# Tries to fill the hospital's disk or memory through the script's scratch folder and through any other folder.
import os

from lead import tries


def write(path: str, mib: int) -> int:
    with open(path, "wb", buffering=0) as file:
        return sum(file.write(bytes(1 << 20)) for _ in range(mib))


tries("the scratch", lambda: write("/tmp/large", 300))
tries("shared memory", lambda: write("/dev/shm/large", 300))
tries("both by a reserve", lambda: os.posix_fallocate(os.open("/tmp/reserve", os.O_CREAT | os.O_RDWR), 0, 300 << 20))
for place in ("/", "/run", "/var/tmp", "/home", "/dev", "/etc", os.path.dirname(os.path.abspath(__file__))):
    tries(place, lambda: write(f"{place}/large", 300))
