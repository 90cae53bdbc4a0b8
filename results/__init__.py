"""Run the studies, analyses and simulations that write the files of this folder."""
