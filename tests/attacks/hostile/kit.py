# Tries to read the hospital's startup kit, whose private key would let the script act as the hospital.
import os

from knows import KIT
from lead import tries

for name in ("startup/client.key", "startup/client.crt", "local/medsilo.yaml", "local/authorization.json"):
    tries(name, lambda: open(f"{KIT}/{name}").read())
    tries(f"{name}, changed", lambda: open(f"{KIT}/{name}", "a").write("airlock: off"))
tries("the kit's folder", lambda: os.listdir(KIT))
tries("another way there", lambda: open(f"/proc/1/root{KIT}/startup/client.key").read())
mine = ("/proc", "/sys", "/usr")
found = [f"{a}/{c}" for a, _, b in os.walk("/") if not a.startswith(mine) and "site-packages" not in a for c in b]
tries("any key", lambda: next(path for path in found if path.endswith((".key", "id_rsa", "id_ed25519"))))
tries(
    "an open file",
    lambda: [own for own in os.listdir("/proc/self/fd") if KIT in os.readlink(f"/proc/self/fd/{own}")][0],
)
