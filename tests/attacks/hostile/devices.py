# Tries to open the machine's devices: disks, memory, the terminal of the person who started the site, a graphics card.
import fcntl
import os
import stat

from lead import tries

for name in (
    "mem",
    "kmsg",
    "sda",
    "vda",
    "nvme0n1",
    "kvm",
    "fuse",
    "nvidia0",
    "nvidiactl",
    "dri/renderD128",
    "console",
    "loop-control",
    "mapper/control",
    "net/tun",
    "vsock",
    "userfaultfd",
    "tty",
):
    tries(name, lambda: os.open(f"/dev/{name}", os.O_RDONLY))
for major, minor in ((1, 1), (8, 0), (259, 0), (195, 0)):
    tries(
        f"a device made: {major}",
        lambda: os.mknod(
            f"/tmp/d{major}", 0o600 | stat.S_IFBLK if major > 1 else 0o600 | stat.S_IFCHR, os.makedev(major, minor)
        ),
    )
tries("keys pressed at the terminal", lambda: [fcntl.ioctl(own, 0x5412, b"\n") for own in (0, 1, 2)])
tries("what /sys has", lambda: os.listdir("/sys/class")[0])
tries(
    "all others",
    lambda: sorted(
        set(os.listdir("/dev"))
        - {
            *[
                "console",
                "core",
                "fd",
                "full",
                "null",
                "ptmx",
                "pts",
                "random",
                "shm",
                "stderr",
                "stdin",
                "stdout",
                "tty",
                "urandom",
                "zero",
            ]
        }
    )[0],
)
