# Tries to read secrets in the environment of the hospital's process: passwords, tokens, proxies, home folders.
import ctypes
import os

from lead import tries

tries("a secret", lambda: [own for own, value in os.environ.items() if "secret-of-the-site" in value][0])
tries(
    "what is usual",
    lambda: {
        own
        for own in os.environ
        if own.startswith(("AWS", "SSH", "DBUS", "XDG", "NVFLARE", "SUDO", "PYTEST", "http", "HTTP"))
    }.pop(),
)
for who in ("self", "1", "thread-self"):
    tries(f"/proc/{who}", lambda: b"secret-of-the-site" in open(f"/proc/{who}/environ", "rb").read() or 1 / 0)
stack = [line for line in open("/proc/self/maps") if "[stack]" in line][0].split("-")
first, last = int(stack[0], 16), int(stack[1].split()[0], 16)
tries("the stack", lambda: b"of-the-site" in ctypes.string_at(last - 16384, 16384) or 1 / 0)
tries("who it is", lambda: __import__("pwd").getpwuid(os.getuid()).pw_name == "root" or 1 / 0)
tries("its machine", lambda: os.uname().nodename == open("/etc/hostname").read().strip() or 1 / 0)
