"""Lead a study on the consortium's server: check the sites' answers, and aggregate the tensors in the answers."""
