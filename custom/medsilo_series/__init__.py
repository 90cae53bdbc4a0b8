"""Train on a hospital's time series: a task whose cases are windows of recordings, inspection of data sets, and
prediction.
"""
