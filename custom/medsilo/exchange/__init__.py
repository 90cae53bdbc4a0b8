"""Define how a server and a site exchange messages: the channel, the size limits, and the checks of answers."""
