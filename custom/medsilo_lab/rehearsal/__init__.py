"""A whole consortium on one machine, as it is walked through before anybody else is asked."""
