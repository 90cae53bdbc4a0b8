# Tries to fill the machine with processes that start further processes.
import os
import time

for _ in range(11):
    try:
        os.fork()
    except OSError as error:
        print("held", type(error).__name__, flush=True)
        time.sleep(60)
        break
else:
    time.sleep(60)
    print("GOT as many as it wanted", flush=True)
