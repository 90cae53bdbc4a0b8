"""A training script of the user's own: its network and its metric in a plan, and a site that the script trains."""
