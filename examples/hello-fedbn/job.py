"""FedBN over three simulated sites: python job.py"""

import argparse

import torch
from model import Net
from nvflare.recipe import SimEnv

from medsilo import recipes

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="FedBN", help="FedAvg, FedBN, FedProx, ...")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, help="seed of the study's random numbers")
    parser.add_argument("--workspace", default="workspace")
    parser.add_argument("--external", action="store_true", help="run the script in a separate process")
    parser.add_argument("--airlock", action="store_true", help="run the script in a sandbox without network")
    asked = parser.parse_args()
    torch.manual_seed(0)
    recipe = getattr(recipes, f"{asked.method}Recipe")(
        name="hello-fedbn",
        model=Net(),
        min_clients=3,
        num_rounds=asked.rounds,
        train_script="client.py",
        train_args="--epochs 2",
        launch_external_process=asked.external,
        seed=asked.seed,
        airlock=asked.airlock,
    )
    run = recipe.execute(SimEnv(num_clients=3, num_threads=asked.threads, workspace_root=asked.workspace))
    print("Results:", run.get_result())
