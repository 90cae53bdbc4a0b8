"""AdaFed over the 15 studies of IMPACT: python job.py --table impact.csv"""

import argparse
from pathlib import Path

import torch
from model import Net, studies
from nvflare.recipe import SimEnv

from medsilo import recipes

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path, required=True, help="impact.csv; its column 'name' names the study")
    parser.add_argument("--method", default="AdaFed", help="AdaFed, FedAvg, FedBN, Ditto, ...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=15)
    parser.add_argument("--workspace", default="workspace")
    asked = parser.parse_args()
    torch.manual_seed(0)
    sites = min(asked.sites, len(studies(asked.table)))
    recipe = getattr(recipes, f"{asked.method}Recipe")(
        name="tabular",
        model=Net(),
        min_clients=sites,
        num_rounds=asked.rounds,
        train_script="client.py",
        train_args=f"--table {asked.table.resolve()}",
        key_metric="auc",
    )
    run = recipe.execute(SimEnv(num_clients=sites, workspace_root=asked.workspace))
    print("Results:", run.get_result())
