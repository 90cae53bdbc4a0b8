"""After a study: a signed folder with its model, and tests of it at hospitals that did not join."""
