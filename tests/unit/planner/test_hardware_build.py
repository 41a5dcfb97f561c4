"""Clusters from the hosts of a job, and made-up ones."""

import pytest

from epl.cluster.hardware import Device, Link, catalogue, from_hosts, simulated
from epl.errors import ClusterError

RATE = "bytes or bits a second with a unit, such as '50 Gb/s' or '300 GB/s'"
LINK = "the name of a link (pcie3, pcie4, pcie5), or a bandwidth such as '50 Gb/s'"


def test_workers_on_one_machine_share_a_node():
    hardware = from_hosts("a:1,a:2,b:1", [1, 2, 4], ["V100", "T4", "Tesla V100-SXM2-32GB"], inter="25 Gb/s", price=1.5)
    assert [(node.name, [device.kind for device in node.devices]) for node in hardware.nodes] == [
        ("a", ["V100-16GB", "T4", "T4"]),
        ("b", ["V100-32GB"] * 4),
    ]
    assert hardware.nodes[0].intra.rate == pytest.approx(12e9)
    assert hardware.nodes[1].intra.rate == pytest.approx(120e9)
    assert {node.inter for node in hardware.nodes} == {Link(3.125e9, 9.6e-6)}
    assert hardware.nodes[0].price == 1.5


def test_devices_and_links_may_be_given_as_they_are():
    npu = Device("npu", {"float32": 1e12}, 1e9, 1e9)
    hardware = from_hosts(["a"], 2, npu, intra=Link(5e9), host="pcie4")
    assert hardware.nodes[0].devices == (npu, npu)
    assert (hardware.nodes[0].intra, hardware.nodes[0].host) == (Link(5e9), catalogue.named_links()["pcie4"])


def test_made_up_cluster_fills_nodes_and_leaves_the_rest_to_the_last():
    hardware = simulated({"V100-32GB": 20, "T4": 3}, per_node={"V100-32GB": 8, "T4": 2}, inter="50 Gb/s")
    assert [(node.name, len(node.devices)) for node in hardware.nodes] == [
        ("V100-32GB-0", 8), ("V100-32GB-1", 8), ("V100-32GB-2", 4), ("T4-0", 2), ("T4-1", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "function, arguments, options, expected",
    [
        (from_hosts, ("", 1, "T4"), {}, "hosts is empty; expected addresses such as '10.0.0.1:8000'"),
        (from_hosts, ("a:1,b:1", 1, "T4"), {}, "inter is not given, but there are 2 nodes; give their link to the network, such as '50 Gb/s'"),
        (from_hosts, ("a:1,b:1", [1], "T4"), {}, "devices_per_host is [1]; expected one for all 2 workers, or a list with one for each"),
        (from_hosts, ("a:1", 0, "T4"), {}, "devices_per_host is 0 for a:1; expected a number of at least 1"),
        (from_hosts, ("a:1", 1, ["T4", "T4"]), {}, "kinds is ['T4', 'T4']; expected one for all 1 workers, or a list with one for each"),
        (from_hosts, ("a:1", 1, "T4"), {"intra": "fast"}, "intra is 'fast'; expected " + LINK),
        (from_hosts, ("a:1", 1, "T4"), {"inter": "9"}, "inter is '9', which has no unit; expected " + RATE),
        (simulated, ({},), {}, "kind_counts is empty; expected numbers of devices such as {'V100-32GB': 16}"),
        (simulated, ({"T4": 0},), {}, "kind_counts['T4'] is 0; expected a number of at least 1"),
        (simulated, ({"T4": 4}, 0), {}, "per_node is 0; expected a number of at least 1"),
        (simulated, ({"V1000": 4},), {}, "there is no device 'V1000' in the catalogue; did you mean 'V100-16GB'?"),
    ],
)
def test_mistakes(function, arguments, options, expected):
    with pytest.raises(ClusterError) as caught:
        function(*arguments, **options)
    assert str(caught.value) == expected
