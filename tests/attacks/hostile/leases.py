# Tries to delay the hospital's own process with file leases, because a writer must wait until a lease ends.
import fcntl
import os

from lead import tries

for path in (__file__, "/room/kept/script.log", "/room/app/config/plan.yaml", fcntl.__file__, "/usr/bin/env"):
    tries(path, lambda: fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK))
