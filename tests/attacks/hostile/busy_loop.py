# Tries to use the processor forever, in a process that has left its parent and its session and ignores signals.
import os
import signal

if not os.fork():
    os.setsid()
    if not os.fork():
        [signal.signal(own, signal.SIG_IGN) for own in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        while True:
            pass
while True:
    pass
