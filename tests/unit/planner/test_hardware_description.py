"""Clusters described in YAML: what comes out, and the way back."""

import pathlib
import random
import re
import textwrap

import pytest

from epl.cluster.hardware import (
    Device,
    Hardware,
    Link,
    Node,
    catalogue,
    from_data,
    parse_description,
    read_description,
    simulated,
    to_data,
    to_yaml,
)
from epl.errors import ClusterError

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "en" / "hardware.md"


def parse(text):
    return parse_description(textwrap.dedent(text), "cluster.yaml")


def message(function, *args, **options):
    with pytest.raises(ClusterError) as caught:
        function(*args, **options)
    return str(caught.value)


def examples(language):
    return re.findall("```%s\n(.*?)```" % language, PAGE.read_text(encoding="utf-8"), re.S)


class TestExample:
    def test_of_the_page(self):
        hardware = parse_description(examples("yaml")[0])
        assert [node.name for node in hardware.nodes] == ["v100-0", "v100-1", "old-a", "old-b", "mixed"]
        assert hardware.counts() == {"V100-32GB": 16, "P100-16GB": 8, "T4": 2, "lent": 1}
        first, old, mixed = hardware.nodes[0], hardware.nodes[2], hardware.nodes[4]
        assert first.devices == (catalogue.device("V100-32GB"),) * 8
        assert (first.inter, first.inter.rate) == (Link(6.25e9, 30e-6, 0.8), 5e9)
        assert first.intra == catalogue.entry("V100-32GB").nvlink
        assert first.host == catalogue.named_links()["pcie3"]
        assert old.inter == Link(3.125e9, 9.6e-6)
        assert (old.price, old.devices[0].price, old.devices[0].memory) == (0.5, 0.9, 16e9)
        lent = mixed.devices[2]
        assert (lent.memory, lent.rate(), lent.rate("float16"), lent.overhead) == (14e9, 14e12 * 0.85, 56e12, 8e-6)
        assert mixed.intra == mixed.host == catalogue.named_links()["pcie3"]
        # 16 V100 at 3.9015; 8 P100 at 0.90 and twice 0.50; two T4 at 0.526; V100-16GB-PCIe has no price.
        assert hardware.price() is None
        assert hardware.price(hardware.places[:24]) == pytest.approx(16 * 3.9015 + 8 * 0.9 + 2 * 0.5)

    def test_of_the_page_with_its_profile(self, tmp_path):
        description, profile = examples("yaml")
        (tmp_path / "measured.yaml").write_text(profile, encoding="utf-8")
        (tmp_path / "cluster.yaml").write_text("profile: measured.yaml\n" + description, encoding="utf-8")
        hardware = read_description(tmp_path / "cluster.yaml")
        v100 = hardware.nodes[0].devices[0]
        assert v100.rate() == pytest.approx(13.9e12) and v100.flops["float32"] == 15.7e12
        assert v100.bandwidth == 790e9
        assert [node.inter.rate for node in hardware.nodes] == pytest.approx([4.9e9, 2.4e9, 4.9e9, 4.9e9, 4.9e9])
        assert hardware.nodes[2].devices[0].rate() == 9.3e12

    def test_programs_of_the_page_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "cluster.yaml").write_text(examples("yaml")[0], encoding="utf-8")
        names = {}
        for code in examples("python"):
            exec(code, names)
        assert names["job"].counts() == {"V100-32GB": 8, "T4": 8}
        assert names["made_up"].counts() == {"A100-80GB": 64, "V100-32GB": 32}


class TestMeaning:
    def test_one_node_needs_no_network(self):
        hardware = parse("nodes: [{devices: V100-32GB}]")
        assert [node.name for node in hardware.nodes] == ["node-0"]
        assert len(hardware.places) == 1

    def test_nodes_without_a_name_are_numbered_through(self):
        hardware = parse(
            """
            inter: 25 Gb/s
            nodes:
              - {devices: T4, count: 2}
              - {devices: T4, name: a}
              - {devices: T4}
              - {devices: T4, name: b, count: 1}
            """
        )
        assert [node.name for node in hardware.nodes] == ["node-0", "node-1", "a", "node-2", "b-0"]

    def test_anchors_and_merged_keys_work(self):
        hardware = parse(
            """
            inter: &net {bandwidth: 100 Gb/s, latency: 5 us}
            nodes:
              - &one {name: a, devices: {kind: A100-40GB, count: 8}, inter: *net}
              - {<<: *one, name: b, price: 3}
            """
        )
        assert hardware.nodes[1].devices == hardware.nodes[0].devices
        assert (hardware.nodes[1].name, hardware.nodes[1].price, hardware.nodes[1].inter) == ("b", 3.0, Link(12.5e9, 5e-6))

    def test_slowest_link_counts_where_kinds_meet(self):
        mixed = parse("nodes: [{devices: [A100-40GB, V100-32GB]}]").nodes[0]
        assert mixed.intra == Link(120e9, 3.4e-6)
        assert mixed.host == Link(12e9, 5.7e-6)
        # A T4 has no NVLink, so PCI Express is what all have.
        assert parse("nodes: [{devices: [T4, V100-32GB]}]").nodes[0].intra == Link(12e9, 5.7e-6)

    def test_bridge_is_used_only_where_it_is_named(self):
        plain = parse("nodes: [{devices: {kind: RTX-3090, count: 2}}]").nodes[0]
        bridged = parse("nodes: [{devices: {kind: RTX-3090, count: 2}, intra: nvlink}]").nodes[0]
        assert plain.intra == catalogue.named_links()["pcie4"]
        assert bridged.intra.bandwidth == 56.25e9 and bridged.intra.rate == pytest.approx(48e9)

    def test_named_link_with_other_numbers(self):
        host, intra = "{link: pcie4, efficiency: 0.5, latency: 0 us}", "{bandwidth: 10 GB/s, reached: 4 GB/s}"
        node = parse("nodes: [{devices: T4, host: %s, intra: %s}]" % (host, intra)).nodes[0]
        assert node.host == Link(31.508e9, 0.0, 0.5)
        assert node.intra == Link(10e9, 5.7e-6, 0.4)

    def test_kind_of_its_own_inherits_links_from_its_base(self):
        hardware = parse("{kinds: {mine: {base: V100-32GB, memory: 30 GB}}, nodes: [{devices: {kind: mine, count: 2}}]}")
        assert hardware.nodes[0].intra == catalogue.entry("V100-32GB").nvlink
        assert hardware.nodes[0].devices[0].memory == 30e9

    def test_kind_in_the_file_hides_the_one_of_the_catalogue(self):
        hardware = parse("{kinds: {t4: {price: 9}}, nodes: [{devices: Tesla T4}]}")
        assert (hardware.devices[0].kind, hardware.devices[0].price, hardware.devices[0].memory) == ("t4", 9.0, 16e9)

    def test_full_numbers_need_no_catalogue(self):
        hardware = parse(
            """
            kinds:
              npu: {flops: {float32: 10 TFLOP/s}, memory: 32 GiB, bandwidth: 1.2 TB/s}
            nodes:
              - {devices: {kind: npu, count: 2}, intra: 56 GB/s, host: 32 GB/s}
            """
        )
        assert hardware.devices[0] == Device("npu", {"float32": 10e12}, 2.0**35, 1.2e12)

    def test_node_may_have_no_device(self):
        hardware = parse("{inter: 10 Gb/s, nodes: [{devices: T4}, {name: store, devices: [], host: pcie3, intra: pcie3}]}")
        assert [len(node.devices) for node in hardware.nodes] == [1, 0]


class TestWayBack:
    def random_hardware(self, seed):
        source = random.Random(seed)

        def link():
            return Link(10 ** source.uniform(8, 12), source.choice([0.0, 10 ** source.uniform(-7, -3)]), source.choice([1.0, source.random() + 0.01]))

        def device(kind):
            known = source.random() < 0.5
            if known:
                return catalogue.device(source.choice(catalogue.kinds()))
            dtypes = source.sample(["float16", "bfloat16", "tf32"], source.randint(0, 3)) + ["float32"]
            flops = {dtype: 10 ** source.uniform(11, 15) for dtype in dtypes}
            efficiency = {dtype: source.random() + 0.001 for dtype in flops if source.random() < 0.5}
            price = source.choice([None, 0.0, source.random() * 9])
            memory, bandwidth, overhead = 10 ** source.uniform(9, 11), 10 ** source.uniform(10, 13), source.random() * 1e-5
            return Device(kind, flops, memory, bandwidth, price, efficiency, overhead, source.choice(["", "x: y"]))

        kinds = [device("kind %d" % index) for index in range(4)]
        nodes = []
        for group in range(source.randint(1, 4)):
            devices = tuple(sorted(source.choices(kinds, k=source.randint(1, 4)), key=lambda one: one.kind)) * source.randint(1, 3)
            one = Node("", devices, link(), link(), link(), source.choice([0.0, 1.25]))
            form = source.choice(["g%d-%d", "g%d.%d", "10.0.%d.%d"])
            nodes += [Node(form % (group, k), one.devices, one.intra, one.inter, one.host, one.price) for k in range(source.randint(1, 4))]
        return Hardware(tuple(nodes))

    @pytest.mark.parametrize("seed", range(40))
    def test_description_of_a_cluster_describes_that_cluster(self, seed):
        hardware = self.random_hardware(seed)
        assert from_data(to_data(hardware)) == hardware
        assert parse_description(to_yaml(hardware)) == hardware

    def test_known_devices_are_written_by_name_and_equal_nodes_once(self):
        hardware = simulated({"V100-32GB": 24}, per_node=8, inter=Link(6.25e9, 30e-6))
        assert to_data(hardware) == {
            "nodes": [
                {
                    "name": "V100-32GB",
                    "count": 3,
                    "devices": {"kind": "V100-32GB", "count": 8},
                    "intra": {"bandwidth": "150 GB/s", "latency": "3.4 us", "efficiency": 0.8},
                    "inter": {"bandwidth": "6.25 GB/s", "latency": "30 us"},
                    "host": {"bandwidth": "15.754 GB/s", "latency": "5.7 us", "efficiency": 12e9 / 15.754e9},
                }
            ]
        }

    @pytest.mark.parametrize("names", ["a-0 a-2", "a-1 a-2", "a-0 b-1", "a-00 a-01", "0 1", "-0 -1", "yes 1e3", "\u00e9 e"])
    def test_any_names_survive(self, names):
        one = simulated({"T4": 1}, inter="1 Gb/s").nodes[0]
        hardware = Hardware(tuple(Node(name, one.devices, one.intra, one.inter, one.host) for name in names.split(" ")))
        assert parse_description(to_yaml(hardware)) == hardware

    def test_device_with_the_name_of_a_known_one_keeps_its_own_numbers(self):
        device = Device("A100-40GB", {"float32": 1e12}, 1e9, 1e9)
        hardware = Hardware((Node("a", (device,), Link(1e9), Link(1e9)),))
        assert from_data(to_data(hardware)) == hardware

    def test_two_devices_of_one_name_are_refused(self):
        one, other = Device("x", {"float32": 1e12}, 1e9, 1e9), Device("X", {"float32": 2e12}, 1e9, 1e9)
        hardware = Hardware((Node("a", (one, other), Link(1e9), Link(1e9)),))
        assert message(to_data, hardware) == "the cluster has two different devices of the kind 'X'; give each kind a name of its own"
