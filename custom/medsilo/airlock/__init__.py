"""The airlock: a room without network in which somebody else's training script runs, and its one exit."""
