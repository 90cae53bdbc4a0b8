"""The airlock runs an external training script in a sandbox without network, and checks every answer of the script."""
