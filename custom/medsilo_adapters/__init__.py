"""Networks that begin with a checkpoint and of which a part trains: what is frozen is no part of what travels."""
