"""Train on a hospital's time series, with a task whose cases are windows of recordings."""
