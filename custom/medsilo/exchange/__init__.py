"""The rules for messages between a server and a site: channel, size limits, and checks of answers."""
