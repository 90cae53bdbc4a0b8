# Tries to reach a service of the hospital through the service's Unix socket, for example docker's or a database's.
import glob
import socket

from knows import SOCKET
from lead import SECRET, tries

usual = [
    "/run/docker.sock",
    "/run/dbus/system_bus_socket",
    "/dev/log",
    "/run/systemd/journal/socket",
    "/var/run/nscd/socket",
]
for path in [SOCKET, *usual, *glob.glob("/tmp/.X11-unix/*"), *glob.glob("/run/user/*/bus"), *glob.glob("/**/*.sock")]:
    tries(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
    tries(f"{path} by datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(SECRET, path))
tries("a listener", lambda: socket.socket(socket.AF_UNIX).bind(SOCKET + ".mine"))
