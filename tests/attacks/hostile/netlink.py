# Tries to create a network interface, or to read the hospital's network settings, through netlink and similar sockets.
import array
import fcntl
import socket
import struct

from lead import tries

tries("an interface", lambda: [name for _, name in socket.if_nameindex() if name != "lo"][0])


def ask(kind: int, request: int, flags: int, body: bytes) -> bytes:
    end = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, kind)
    end.settimeout(1)
    end.sendto(struct.pack("=IHHII", 16 + len(body), request, flags, 1, 0) + body, (0, 0))
    reply = end.recv(65536)
    if struct.unpack_from("=H", reply, 4) == (2,) and (code := struct.unpack_from("=i", reply, 16)[0]):
        raise OSError(-code, "netlink says no")
    return reply


tries(
    "a veth",
    lambda: ask(
        0,
        16,
        5 | 0x400,
        bytes(16) + struct.pack("=HH8s", 12, 3, b"mine") + struct.pack("=HHHH6s", 16, 18, 10, 1, b"dummy"),
    ),
)
tries(
    "an address",
    lambda: ask(
        0, 20, 5 | 0x400, struct.pack("=BBBBI", 2, 24, 0, 0, 1) + struct.pack("=HH4s", 8, 2, bytes([10, 9, 8, 7]))
    ),
)
tries("a record of audit", lambda: ask(9, 1100, 5, b"Miller"))
tries("uevents", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15).bind((0, 1)) or 1 / 0)
tries(
    "a name of an interface",
    lambda: fcntl.ioctl(socket.socket(), 0x8923, array.array("b", struct.pack("16s24x", b"lo"))),
)
