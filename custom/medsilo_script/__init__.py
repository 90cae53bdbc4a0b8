"""Let a user's own training script take part in a study: its network, metric and training loop."""
