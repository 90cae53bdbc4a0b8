"""Let a user's training script take part in a study, with the script's network, metric and training loop."""
