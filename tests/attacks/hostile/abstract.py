# Tries to reach a helper process outside the sandbox at an abstract Unix socket, which is not part of the file system.
import socket

from knows import ABSTRACT
from lead import SECRET, tries

own = socket.socket(socket.AF_UNIX)
own.bind("\0mine")
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    tries(f"kind {kind}", lambda: socket.socket(socket.AF_UNIX, kind).connect("\0" + ABSTRACT))
tries("a datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(SECRET, "\0" + ABSTRACT))
others = [line for line in open("/proc/net/unix").read().splitlines() if "@" in line and "@mine" not in line]
tries("names of others", lambda: others[0])
