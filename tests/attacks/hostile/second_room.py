# Tries to reach another sandbox of the same hospital through scratch folders, shared memory, queues, sockets or locks.
import ctypes
import os
import socket

from lead import learn, tries

libc = ctypes.CDLL(None, use_errno=True)
found = [
    path
    for folder in ("/tmp", "/dev/shm", "/dev/mqueue", "/run", "/var/tmp")
    if os.path.isdir(folder)
    for path in os.listdir(folder)
    if "meet" in path
]
tries("a file of another room", lambda: found[0])
tries("a shared segment", lambda: ((got := libc.shmget(1961, 4096, 0)) >= 0 and got) or 1 // 0)
tries("a queue", lambda: ((got := libc.mq_open(b"/meet", 0)) >= 0 and got) or 1 // 0)
tries("a socket", lambda: socket.socket(socket.AF_UNIX).connect("\0meet"))
tries("a server", lambda: socket.create_connection(("127.0.0.1", 1961), 1))
tries(
    "a process",
    lambda: [own for own in os.listdir("/proc") if own.isdigit() and b"meet" in open(f"/proc/{own}/comm", "rb").read()][
        0
    ],
)
open("/tmp/meet", "w").close(), open("/dev/shm/meet", "w").close(), open("/proc/self/comm", "w").write("meet")
libc.shmget(1961, 4096, 0o1600), libc.mq_open(b"/meet", 0o102, 0o600, None)
abstract, server = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 1961))
abstract.bind("\0meet"), abstract.listen()
learn()
