# Tries to pass open files out of the sandbox, to keep files open, and to exhaust the hospital's file descriptors.
import array
import os
import socket

from lead import door, learn


def hand_over(model, metrics) -> None:
    end = socket.socket(fileno=os.dup(door().pair.fileno()))
    own = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200)
    for _ in range(50):
        end.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, own)])


learn(hand_over)
