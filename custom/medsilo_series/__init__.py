"""Train on a hospital's time series: a task over windows of recordings, dataset inspection and prediction."""
