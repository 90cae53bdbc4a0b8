# Tries to send a patient's name in logs, in an error message and in an exit code, and to fill the disk with logs.
import logging
import sys

from lead import SECRET, learn

import medsilo.client as flare


def tell(model, metrics) -> None:
    logging.getLogger("nvflare").error(SECRET.decode())
    flare.log("miller", 1961.0, "METRIC")
    for _ in range(256):
        print("Miller 1961 " * 100_000, flush=True)
    print("\x1b]0;Miller\x07", file=sys.stderr, flush=True)
    raise SystemExit(SECRET.decode())


learn(tell)
