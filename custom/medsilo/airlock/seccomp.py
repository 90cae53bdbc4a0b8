"""The system calls that a training script may not make, as a program for the kernel's seccomp filter.

bubblewrap loads the filter, which denies system calls that attackers have used to reach the memory of the kernel or of
other processes. A script may open sockets only between programs in its sandbox, which has no network.
"""

import os
import struct
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {  # each system call's number on x86_64 and on aarch64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
    "pidfd_getfd": (438, 438),
    # These system calls allocate kernel memory that does not count towards any process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "vmsplice": (278, 75),
    "tee": (276, 77),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),  # all processes of the machine share one limit (aio-max-nr), which a script could use up
}
# The allowed families of sockets: Unix, IPv4, IPv6 and netlink. In a sandbox, IPv4 and IPv6 sockets reach only the
# loopback interface.
FAMILIES = (1, 2, 10, 16)


@dataclass(frozen=True)
class Limited:
    """A system call that the filter allows only for some values of one argument."""

    numbers: tuple[int, int]  # the system call's numbers on x86_64 and on aarch64
    argument: int
    values: tuple[int, ...]
    # True: the call is allowed only with an argument in `values`. False: the call is allowed only with an argument that
    # is not in `values`.
    allowed: bool


LIMITED = {
    "socket": Limited((41, 198), 0, FAMILIES, True),
    "socketpair": Limited((53, 199), 0, (1,), True),
    # A lease on a file (F_SETLEASE) delays each process outside the sandbox that opens this file for writing.
    "fcntl": Limited((72, 25), 1, (1024,), False),
    # SO_SNDBUF and SO_RCVBUF enlarge a socket's buffer, whose memory does not count towards any process.
    "setsockopt": Limited((54, 208), 2, (7, 8), False),
}
X32 = 0x40000000  # on x86_64, this bit marks a system call of the x32 interface
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050001  # EPERM
# Byte offsets in seccomp_data, the kernel's record of a system call: call number, processor architecture, first
# argument
NUMBER, ARCHITECTURE, FIRST = 0, 4, 16


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for this machine's processor, or None if the module lacks this processor's system call numbers.

    >>> len(filter_program("x86_64")) % 8
    0
    """
    machine = machine or os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    # Each line: an instruction, the lines to skip if its test is true, the lines to skip if it is false, and an
    # operand. DENY and ALLOW stand for a jump to the last or the second last line of the filter.
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 0, DENY, ARCHITECTURES[machine]), (LOAD, 0, 0, NUMBER)]
    lines += [(GREATER, DENY, 0, X32)] if machine == "x86_64" else []
    lines += [(EQUAL, DENY, 0, number) for number in sorted(own[column] for own in NUMBERS.values())]
    for call in LIMITED.values():
        listed, other = (ALLOW, DENY) if call.allowed else (DENY, ALLOW)
        lines += [(EQUAL, 0, len(call.values) + 2, call.numbers[column]), (LOAD, 0, 0, FIRST + 8 * call.argument)]
        lines += [(EQUAL, listed, 0, value) for value in call.values]
        lines += [(RETURN, 0, 0, other)]
    end = len(lines)
    body = [
        _line(does, _skip(true, end - place), _skip(false, end - place), value)
        for place, (does, true, false, value) in enumerate(lines)
    ]
    return b"".join([*body, _line(RETURN, 0, 0, ALLOW), _line(RETURN, 0, 0, DENY)])


def _skip(lines: int, left: int) -> int:
    """Return the number of lines that a jump skips: the given number, or, for ALLOW and DENY, up to one of the last two
    lines.
    """
    return {ALLOW: left - 1, DENY: left}.get(lines, lines)


def _line(does: int, true: int, false: int, number: int) -> bytes:
    return struct.pack("<HBBI", does, true, false, number)
