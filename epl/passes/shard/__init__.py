"""Dividing the taskgraphs of `split` scopes among the devices of a group."""
