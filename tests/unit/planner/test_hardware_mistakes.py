"""Wrong descriptions of clusters: each mistake by its text, which names the file and the place."""

import pytest

from epl.cluster.hardware import catalogue, from_data, parse_description, read_description
from epl.errors import ClusterError


def message(function, *args):
    with pytest.raises(ClusterError) as caught:
        function(*args)
    return str(caught.value)


NET = "inter: 50 Gb/s\n"
RATE = "bytes or bits a second with a unit, such as '50 Gb/s' or '300 GB/s'"
MISTAKES = [
    # The whole.
    ("", "cluster.yaml is None; expected a mapping: a cluster's kinds, nodes, intra, inter, host, price, profile"),
    ("- a\n", "cluster.yaml is ['a']; expected a mapping: a cluster's kinds, nodes, intra, inter, host, price, profile"),
    (NET, "cluster.yaml has no 'nodes'; expected a list of nodes with their devices"),
    ("nodes: []\n", "cluster.yaml, line 1: nodes is []; expected a list of nodes with their devices"),
    ("node: []\n", "cluster.yaml, line 1: node: there is no such key; did you mean 'nodes'?"),
    (
        "7: []\n",
        "cluster.yaml is {7: []}, which has the key 7; "
        "expected a mapping of names: a cluster's kinds, nodes, intra, inter, host, price, profile",
    ),
    ("nodes: [\n", "cluster.yaml, line 2: this is not valid YAML: expected the node content, but found '<stream end>'"),
    ("nodes: \x07\n", "cluster.yaml, line 1: this is not valid YAML: special characters are not allowed"),
    ("a: 1\nb: 2\na: 3\n", "cluster.yaml, line 3: 'a' is already set in line 1; keep one"),
    (
        "nodes: !!python/object/apply:os.getcwd []\n",
        "cluster.yaml, line 1: this is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
    ("nodes: 2026-13-45\n", "cluster.yaml: a value is not valid: month must be in 1..12"),
    ("[" * 600, "cluster.yaml: this is nested too deeply"),
    # Nodes.
    (
        "nodes:\n  - T4\n",
        "cluster.yaml, line 2: nodes[0] is 'T4'; expected a mapping: a node's name, names, count, devices, intra, inter, host, price",
    ),
    ("nodes:\n  - {name: a}\n", "cluster.yaml, line 2: nodes[0] has no 'devices'; expected such as {kind: V100-32GB, count: 8}"),
    ("nodes:\n  - devices: T4\n    nmae: a\n", "cluster.yaml, line 3: nodes[0].nmae: there is no such key; did you mean 'name'?"),
    (
        "nodes:\n  - {devices: T4, names: [a], count: 2}\n",
        "cluster.yaml, line 2: nodes[0] is {'devices': 'T4', 'names': ['a'], 'count': 2}, which has both; "
        "expected either 'names', or 'name' and 'count'",
    ),
    ("nodes:\n  - {devices: T4, count: 0}\n", "cluster.yaml, line 2: nodes[0].count is 0; expected a whole number from 1 to 100000"),
    ("nodes:\n  - {devices: T4, count: true}\n", "cluster.yaml, line 2: nodes[0].count is True; expected a whole number from 1 to 100000"),
    ("nodes:\n  - {devices: T4, name: 7}\n", "cluster.yaml, line 2: nodes[0].name is 7; expected the name of a node"),
    (
        NET + "nodes:\n  - {devices: T4, name: a}\n  - {devices: T4, name: a}\n",
        "cluster.yaml, line 4: nodes[1] is {'devices': 'T4', 'name': 'a'}, which is a node named 'a' as is cluster.yaml, line 3: nodes[0]; "
        "expected another name",
    ),
    (
        "nodes:\n  - {devices: T4, count: 2}\n",
        "cluster.yaml, line 2: nodes[0] has no 'inter'; "
        "expected the link of each node to the network, such as '50 Gb/s', here or for the whole cluster",
    ),
    (
        "nodes:\n  - {devices: T4, price: -1}\n",
        "cluster.yaml, line 2: nodes[0].price is -1; expected US dollars an hour of a node besides its devices",
    ),
    (
        "nodes:\n  - {devices: T4, price: .inf}\n",
        "cluster.yaml, line 2: nodes[0].price is inf; expected US dollars an hour of a node besides its devices",
    ),
    (
        NET + "nodes:\n  - {devices: {kind: T4, count: 4096}, count: 100000}\n",
        "cluster.yaml, line 2: nodes: there are 100000 nodes with 409600000 devices; expected at most 100000 with 1000000",
    ),
    # Devices.
    (
        "nodes:\n  - devices: T5\n",
        "cluster.yaml, line 2: nodes[0].devices is 'T5'; expected a device of the catalogue or of 'kinds'; "
        "there are: " + ", ".join(catalogue.kinds()),
    ),
    (
        "nodes:\n  - devices:\n      - T4\n      - V10\n",
        "cluster.yaml, line 4: nodes[0].devices[1] is 'V10'; expected a device of the catalogue or of 'kinds'; did you mean 'V100-16GB'?",
    ),
    ("nodes:\n  - devices: {count: 2}\n", "cluster.yaml, line 2: nodes[0].devices has no 'kind'; expected the name of a device, such as 'V100-32GB'"),
    ("nodes:\n  - devices: {kind: T4, count: 2.5}\n", "cluster.yaml, line 2: nodes[0].devices.count is 2.5; expected a whole number from 1 to 4096"),
    (
        "nodes:\n  - devices: {kind: T4, memory: 8 GB}\n",
        "cluster.yaml, line 2: nodes[0].devices.memory: there is no such key; there are: kind, count",
    ),
    (
        "nodes:\n  - devices: 4\n",
        "cluster.yaml, line 2: nodes[0].devices is 4; expected a mapping: kind and count of devices; write other numbers under 'kinds'",
    ),
    # Kinds.
    ("kinds: [a]\n" + "nodes: []\n", "cluster.yaml, line 1: kinds is ['a']; expected a mapping: names of kinds to their numbers"),
    (
        "kinds:\n  x: {memory: 8 GB}\nnodes: [{devices: x}]\n",
        "cluster.yaml, line 2: kinds.x has no 'flops'; expected such as {float32: 15.7 TFLOP/s}",
    ),
    (
        "kinds:\n  x: {flops: {float16: 1 TFLOP/s}}\nnodes: [{devices: x}]\n",
        "cluster.yaml, line 2: kinds.x.flops has no 'float32'; expected such as {float32: 15.7 TFLOP/s}",
    ),
    (
        "kinds:\n  x: {flops: {float32: 1 TFLOP/s}}\nnodes: [{devices: x}]\n",
        "cluster.yaml, line 2: kinds.x has no 'memory'; expected one such as '16 GB'",
    ),
    (
        "kinds:\n  x: {base: V100X}\nnodes: [{devices: x}]\n",
        "cluster.yaml, line 2: kinds.x.base is 'V100X'; expected a device of the catalogue, or 'none'; did you mean 'V100-16GB'?",
    ),
    (
        "kinds:\n  T4: {memory: 15}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.memory is 15, which has no unit; expected bytes with a unit, such as '16 GB'",
    ),
    (
        "kinds:\n  T4: {memory: 15 XB}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.memory is '15 XB', which has the unit 'XB', which is none of bytes; "
        "expected bytes with a unit, such as '16 GB'",
    ),
    (
        "kinds:\n  T4: {memory: 0 GB}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.memory is '0 GB', which must be greater than 0; expected bytes with a unit, such as '16 GB'",
    ),
    (
        "kinds:\n  T4: {flops: {float32: fast}}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.flops.float32 is 'fast', which has no number in front; "
        "expected floating-point operations a second with a unit, such as '15.7 TFLOP/s'",
    ),
    (
        "kinds:\n  T4: {efficiency: {int8: 0.5}}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.efficiency.int8 is 0.5, which is of another dtype; "
        "expected an efficiency of a dtype that has FLOP/s: float32, float16",
    ),
    (
        "kinds:\n  T4: {efficiency: {float32: 0}}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.efficiency.float32 is 0; expected a number greater than 0, such as 0.8",
    ),
    (
        "kinds:\n  T4: {overhead: -1 us}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 2: kinds.T4.overhead is '-1 us', which must be at least 0; expected a time with a unit, such as '10 us'",
    ),
    (
        "kinds:\n  T4: {}\n  t-4: {}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 3: kinds.t-4 is {}, which is a second kind of that name; expected another name",
    ),
    # Links.
    (
        "inter: 50\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 1: inter is 50; expected a mapping: a link's link, bandwidth, latency, efficiency, reached",
    ),
    ("inter: '50'\nnodes: [{devices: T4}]\n", "cluster.yaml, line 1: inter is '50', which has no unit; expected " + RATE),
    (
        "inter: 50 Gb\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 1: inter is '50 Gb', which has the unit 'Gb', which is none of bytes or bits a second; expected " + RATE,
    ),
    ("inter: ethernet\nnodes: [{devices: T4}]\n", "cluster.yaml, line 1: inter is 'ethernet'; expected a bandwidth such as '50 Gb/s'"),
    (
        "nodes: [{devices: T4, intra: pcie9}]\n",
        "cluster.yaml, line 1: nodes[0].intra is 'pcie9'; expected the name of a link (pcie3, pcie4, pcie5), or a bandwidth such as '50 Gb/s'",
    ),
    (
        "nodes: [{devices: [V100, T4], intra: nvlink}]\n",
        "cluster.yaml, line 1: nodes[0].intra is 'nvlink', which the catalogue does not know for T4; "
        "expected one of: pcie3, pcie4, pcie5, or a bandwidth such as '300 GB/s'",
    ),
    ("inter: {latency: 5 us}\nnodes: [{devices: T4}]\n", "cluster.yaml, line 1: inter has no 'bandwidth'; expected one such as '50 Gb/s'"),
    (
        "inter: {bandwidth: 1 GB/s, latency: 5}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 1: inter.latency is 5, which has no unit; expected a time with a unit, such as '10 us'",
    ),
    (
        "inter: {bandwidth: 1 GB/s, efficiency: x}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 1: inter.efficiency is 'x'; expected a number greater than 0, such as 0.8",
    ),
    (
        "host: {link: pcie3, efficiency: 1, reached: 1 GB/s}\nnodes: [{devices: T4}]\n",
        "cluster.yaml, line 1: host is {'link': 'pcie3', 'efficiency': 1, 'reached': '1 GB/s'}, which has both; "
        "expected either its 'efficiency' or its 'reached' rate",
    ),
    (
        "kinds: {x: {flops: {float32: 1 TFLOP/s}, memory: 1 GB, bandwidth: 1 GB/s}}\nnodes:\n  - {devices: x}\n",
        "cluster.yaml, line 3: nodes[0]: node 'node-0' needs 'host', because 'x' is not in the catalogue; give a link such as 'pcie3'",
    ),
    (
        "kinds: {x: {flops: {float32: 1 TFLOP/s}, memory: 1 GB, bandwidth: 1 GB/s}}\nnodes:\n  - {devices: [x, x], host: pcie3}\n",
        "cluster.yaml, line 3: nodes[0]: node 'node-0' needs 'intra', because 'x' is not in the catalogue; "
        "give a link such as 'pcie3' or '300 GB/s'",
    ),
    (
        "nodes: [{devices: []}]\n",
        "cluster.yaml, line 1: nodes[0]: node 'node-0' needs 'host', because it has no devices; give a link such as 'pcie3'",
    ),
    ("nodes: [{devices: [], host: pcie3, intra: pcie3}]\n", "the cluster has no device; give each node at least one"),
]


class TestMistakes:
    @pytest.mark.parametrize("text, expected", MISTAKES)
    def test_is_named_with_its_place(self, text, expected):
        assert message(parse_description, text, "cluster.yaml") == expected

    def test_place_in_data_that_is_no_file(self):
        data = {"nodes": [{"devices": {"kind": "T4", "count": "two"}}]}
        assert message(from_data, data, "the argument") == "the argument: nodes[0].devices.count is 'two'; expected a whole number from 1 to 4096"

    def test_files(self, tmp_path):
        missing = tmp_path / "none.yaml"
        unread = "%s can't be read: No such file or directory; expected %s in YAML"
        assert message(read_description, missing) == unread % (missing, "the description of a cluster")
        binary = tmp_path / "binary.yaml"
        binary.write_bytes(b"\xff\xfe\x00")
        assert message(read_description, binary) == "%s is not UTF-8 text; expected the description of a cluster in YAML" % binary
        file = tmp_path / "cluster.yaml"
        file.write_text("nodes:\n  - devices: T4\n    count: no\n")
        assert message(read_description, file) == "%s, line 3: nodes[0].count is False; expected a whole number from 1 to 100000" % file
        file.write_text("profile: none.yaml\nnodes: [{devices: T4}]\n")
        assert message(read_description, file) == unread % (missing, "a profile")

    def test_many_aliases_cost_no_time(self):
        bomb = "a: &a [x, x]\n" + "".join("%s: &%s [*%s, *%s]\n" % (chr(98 + i), chr(98 + i), chr(97 + i), chr(97 + i)) for i in range(24))
        assert "there is no such key" in message(parse_description, bomb, "cluster.yaml")
