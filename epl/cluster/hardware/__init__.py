"""Devices, links and machines as numbers: what the planner prices plans with."""

from epl.cluster.hardware.spec import Device, Hardware, Link, Node, Place

__all__ = ["Device", "Hardware", "Link", "Node", "Place"]
