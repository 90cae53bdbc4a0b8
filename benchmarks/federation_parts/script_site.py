"""Return the received model unchanged, through the client API of NVFlare or of medsilo."""

import argparse
from importlib import import_module

import torch
from monai.networks.nets import UNet

parser = argparse.ArgumentParser()
parser.add_argument("--api", required=True, help="client API: nvflare.client or medsilo.client")
parser.add_argument("--features", required=True, help="16,32,64")
parser.add_argument("--residual-units", type=int, required=True)
asked = parser.parse_args()
features = [int(width) for width in asked.features.split(",")]
strides = [2] * (len(features) - 1)
model = UNet(2, 1, 2, features, strides, num_res_units=asked.residual_units, act="RELU", norm="BATCH")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

flare = import_module(asked.api)
flare.init()
if asked.api == "medsilo.client":
    flare.join(model, optimizer, [(torch.zeros(8, 1, 64, 64), torch.zeros(8, dtype=torch.long))])
while flare.is_running():
    model.load_state_dict(flare.receive().params)
    answer = {"metrics": {"accuracy": 0.5}, "meta": {"NUM_STEPS_CURRENT_ROUND": 8}}
    flare.send(flare.FLModel(params=model.state_dict(), **answer))
