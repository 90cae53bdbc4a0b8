# Tries to read data of other processes of this account: command lines, environment variables, memory and files.
import glob
import os

from knows import PID
from lead import tries

for who in (PID, 1):
    for what in ("root/etc/shadow", "environ", "mem", "fd/0", "cwd/x"):
        tries(f"{who} {what}", lambda: open(f"/proc/{who}/{what}", "rb").read(1)[0])
tries(
    "a site's token",
    lambda: [own for own in glob.glob("/proc/[0-9]*/cmdline") if b"pytest" in open(own, "rb").read()][0],
)
for path in (
    "kcore",
    "kmsg",
    "sysrq-trigger",
    "sys/kernel/core_pattern",
    "sys/kernel/hostname",
    "sys/kernel/panic",
    "sys/vm/drop_caches",
):
    tries(path, lambda: open(f"/proc/{path}", "rb" if path[0] == "k" else "r+b").read(1)[0])
tries("to be killed last", lambda: os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"-1000"))
