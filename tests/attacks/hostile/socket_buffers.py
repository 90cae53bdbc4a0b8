# Tries to exhaust the machine's memory through the buffers of sockets, which count as no process's memory.
import socket
import time

from lead import tries

one, other = socket.socketpair()
tries("a large buffer to send", lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22))
tries("a large buffer to receive", lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22))
kept = []
for _ in range(1500):
    kept.append(socket.socketpair())
    kept[-1][0].setblocking(False)
    try:
        while kept[-1][0].send(bytes(65536)):
            pass
    except BlockingIOError:
        continue
time.sleep(20)
print("GOT 3,000 sockets", flush=True)
