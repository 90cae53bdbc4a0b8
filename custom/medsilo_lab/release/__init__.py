"""After a study: a signed folder with its model, tests of it at hospitals that did not join, and their receipts."""
