"""Hosts, workers and devices, and how taskgraphs are laid out on them."""

from epl.cluster.cluster import Cluster
from epl.cluster.devices import LocalDevice
from epl.cluster.virtual_device import VirtualDevice

__all__ = ["Cluster", "LocalDevice", "VirtualDevice"]
