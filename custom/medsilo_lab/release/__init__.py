"""After a study: release its model in a signed folder, and test it at hospitals that did not participate."""
