"""What writes the files of this folder: studies of methods, analyses of runs and simulations, one command each."""
