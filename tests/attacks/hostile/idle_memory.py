# Tries to exhaust the memory after sending the answer, when the hospital no longer waits for the script.
import json
import os
import time

from lead import learn


def waits(model, metrics) -> None:
    time.sleep(25)


def eats(model, metrics) -> None:
    if os.fork():
        return
    time.sleep(2)
    for _ in range(4):
        if not os.fork():
            mine = b"x" * (300 << 20)
            time.sleep(20)
            print("GOT 1.2 GiB", len(mine), flush=True)
            os._exit(0)
    time.sleep(60)
    os._exit(0)


learn(waits if json.loads(os.environ["MEDSILO_AIRLOCK"])["site"] == "b" else eats)
