# Tries to send a patient's name in UDP and raw packets, which need no answer.
import socket

from knows import UDP
from lead import SECRET, tries

for address in (("192.0.2.1", 53), ("255.255.255.255", 9), ("224.0.0.251", 5353), ("169.254.169.254", 123)):
    tries(address[0], lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(SECRET, address))
tries("IPv6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(SECRET, ("2001:db8::1", 53)))
tries("a ping", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1).sendto(SECRET, ("192.0.2.1", 0)))
tries("a raw packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
tries("a virtual machine's socket", lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
# the loopback interface inside the sandbox
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(SECRET, ("127.0.0.1", UDP))
