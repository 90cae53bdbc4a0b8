"""A hospital's own time series: a task over windows of recordings, and what looks at, predicts and exports them."""
