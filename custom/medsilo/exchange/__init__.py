"""The terms on which a server and a site write to each other: channel, bounds, acceptance."""
