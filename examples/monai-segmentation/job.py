"""HarmoFL, FedSM or another method on a MONAI script: python job.py --method HarmoFL"""

import argparse

import torch
from model import SIZE, unet
from nvflare.recipe import SimEnv

from medsilo import recipes

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="HarmoFL", help="HarmoFL, FedSM, FedAvg, FedBN, ...")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workspace", default="workspace")
    asked = parser.parse_args()
    torch.manual_seed(0)
    shape = {"input_shape": (1, SIZE, SIZE)} if asked.method == "HarmoFL" else {}
    recipe = getattr(recipes, f"{asked.method}Recipe")(
        name="monai-segmentation",
        model=unet(),
        min_clients=3,
        num_rounds=asked.rounds,
        train_script="client.py",
        key_metric="dice",
        **shape,
    )
    run = recipe.execute(SimEnv(num_clients=3, workspace_root=asked.workspace))
    print("Results:", run.get_result())
