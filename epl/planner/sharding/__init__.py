"""How the devices of a group compute a split taskgraph together."""
