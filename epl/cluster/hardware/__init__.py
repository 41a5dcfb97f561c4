"""Devices, links and machines as numbers: what the planner prices plans with."""

from epl.cluster.hardware.build import from_hosts, simulated
from epl.cluster.hardware.description import from_data, parse_description, read_description
from epl.cluster.hardware.export import to_data, to_yaml
from epl.cluster.hardware.profile import Profile, apply_profile, read_profile
from epl.cluster.hardware.spec import Device, Hardware, Link, Node, Place

__all__ = [
    "Device",
    "Hardware",
    "Link",
    "Node",
    "Place",
    "Profile",
    "apply_profile",
    "from_data",
    "from_hosts",
    "parse_description",
    "read_description",
    "read_profile",
    "simulated",
    "to_data",
    "to_yaml",
]
