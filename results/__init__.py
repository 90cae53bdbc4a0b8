"""Programs that run the studies, analyses and simulations, and that write the files of this folder."""
