"""A promise at every hospital: sets, intervals and masks whose risk hospitals' validation cases bound."""
