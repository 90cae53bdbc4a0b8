# Tries to encode a number in the script's memory use, which hospitals disclose for planning.
import time

from lead import learn


def hold(model, metrics) -> None:
    kept = b"x" * (1333 << 20)
    time.sleep(6)


learn(hold)
