"""FedAvg over two simulated sites."""

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

if __name__ == "__main__":
    recipe = FedAvgRecipe(
        name="stock", model=Net(), min_clients=2, num_rounds=2, train_script="client.py", train_args="--epochs 1"
    )
    recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
