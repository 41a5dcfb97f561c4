"""Measured profiles: read, written, merged, and applied to a cluster."""

import dataclasses

import pytest

from epl.cluster.hardware import Device, Hardware, Link, Node, Profile, apply_profile, catalogue, simulated
from epl.cluster.hardware.profile import MeasuredDevice, MeasuredLink, merge_profiles, parse_profile, profile_data, profile_yaml, read_profile
from epl.errors import ClusterError

TEXT = """
source: here and now
devices:
  Tesla V100-SXM2-32GB:
    flops: {float32: 14 TFLOP/s, bfloat16: 13 TFLOP/s}
    bandwidth: 800 GB/s
    overhead: 6 us
    intra: {bandwidth: 100 GB/s}
    host: {latency: 12 us}
  unheard-of: {overhead: 1 us}
inter: {bandwidth: 4 GB/s, latency: 60 us}
nodes:
  V100-32GB-1: {inter: {bandwidth: 2 GB/s}, intra: {latency: 0 s}}
"""


@pytest.fixture
def cluster():
    return simulated({"V100-32GB": 16, "T4": 4}, inter=Link(6.25e9, 1e-6))


def message(function, *args):
    with pytest.raises(ClusterError) as caught:
        function(*args)
    return str(caught.value)


class TestText:
    def test_reads(self):
        profile = parse_profile(TEXT)
        v100 = profile.devices["Tesla V100-SXM2-32GB"]
        assert v100.flops == {"float32": 14e12, "bfloat16": 13e12}
        assert (v100.bandwidth, v100.overhead, v100.intra, v100.host) == (800e9, 6e-6, MeasuredLink(100e9), MeasuredLink(None, 12e-6))
        assert profile.inter == MeasuredLink(4e9, 60e-6)
        assert profile.nodes == {"V100-32GB-1": {"inter": MeasuredLink(2e9), "intra": MeasuredLink(None, 0.0)}}
        assert profile.source == "here and now"

    def test_what_was_written_is_read_as_the_same_profile(self, tmp_path):
        profile = parse_profile(TEXT)
        assert parse_profile(profile_yaml(profile)) == profile
        file = tmp_path / "measured.yaml"
        file.write_text(profile_yaml(profile), encoding="utf-8")
        assert read_profile(file) == profile
        assert profile_data(Profile()) == {}
        assert parse_profile("{}") == Profile()

    @pytest.mark.parametrize(
        "text, expected",
        [
            ("", "m.yaml is None; expected a mapping: a profile's source, devices, inter, nodes"),
            ("links: {}", "m.yaml, line 1: links: there is no such key; there are: source, devices, inter, nodes"),
            ("devices: {T4: 3}", "m.yaml, line 1: devices.T4 is 3; expected a mapping: flops, bandwidth, overhead, intra, host"),
            (
                "devices:\n  T4:\n    memory: 16 GB",
                "m.yaml, line 3: devices.T4.memory: there is no such key; there are: flops, bandwidth, overhead, intra, host",
            ),
            (
                "devices: {T4: {flops: 8 TFLOP/s}}",
                "m.yaml, line 1: devices.T4.flops is '8 TFLOP/s'; expected a mapping: dtype to FLOP/s, such as {float32: 15.7 TFLOP/s}",
            ),
            ("inter: 4 GB/s", "m.yaml, line 1: inter is '4 GB/s'; expected a mapping: bandwidth and latency"),
            ("inter: {efficiency: 1}", "m.yaml, line 1: inter.efficiency: there is no such key; there are: bandwidth, latency"),
            (
                "inter: {bandwidth: 0 GB/s}",
                "m.yaml, line 1: inter.bandwidth is '0 GB/s', which must be greater than 0; "
                "expected bytes or bits a second with a unit, such as '50 Gb/s' or '300 GB/s'",
            ),
            ("nodes: {a: {outer: {}}}", "m.yaml, line 1: nodes.a.outer: there is no such key; did you mean 'inter'?"),
        ],
    )
    def test_mistakes(self, text, expected):
        assert message(parse_profile, text, "m.yaml") == expected


class TestApplied:
    def test_measured_rates_win_and_peaks_stay(self, cluster):
        v100, t4 = (node.devices[0] for node in (apply_profile(cluster, parse_profile(TEXT)).nodes[i] for i in (0, 2)))
        assert v100.flops == {"float32": 15.7e12, "float16": 125e12, "bfloat16": 13e12}
        # Rates are peaks times ratios; that rounds in the last digit.
        assert [v100.rate(dtype) for dtype in ("float32", "bfloat16")] == pytest.approx([14e12, 13e12], rel=1e-15)
        assert v100.rate("float16") == 125e12
        assert (v100.bandwidth, v100.overhead, v100.memory) == (800e9, 6e-6, 32e9)
        assert t4 == catalogue.device("T4")

    def test_links(self, cluster):
        first, second, last = apply_profile(cluster, parse_profile(TEXT)).nodes
        assert first.inter == Link(6.25e9, 60e-6, 4 / 6.25)
        assert (second.inter.rate, second.inter.latency) == (2e9, 60e-6)
        assert (first.intra.bandwidth, first.intra.rate, first.intra.latency) == (150e9, pytest.approx(100e9), 3.4e-6)
        assert (second.intra.rate, second.intra.latency) == (pytest.approx(100e9), 0.0)
        assert (first.host.rate, first.host.latency) == (cluster.nodes[0].host.rate, 12e-6)
        assert (last.intra, last.host) == (cluster.nodes[2].intra, cluster.nodes[2].host)

    def test_nothing_measured_changes_nothing(self, cluster):
        assert apply_profile(cluster, Profile()) == cluster

    def test_measured_rates_win_over_efficiencies_of_the_description(self, cluster):
        slow = dataclasses.replace(catalogue.device("T4"), efficiency={"float32": 0.1, "float16": 0.2})
        hardware = Hardware((dataclasses.replace(cluster.nodes[2], devices=(slow,)),))
        device = apply_profile(hardware, Profile({"T4": MeasuredDevice({"float32": 6e12})})).devices[0]
        assert device.rate() == pytest.approx(6e12)
        assert device.rate("float16") == pytest.approx(0.2 * 65e12)

    def test_slowest_link_counts_where_kinds_meet(self):
        node = Node("a", (catalogue.device("T4"), catalogue.device("V100-32GB")), Link(12e9, 5e-6), Link(1e9))
        measured = {"T4": MeasuredDevice(intra=MeasuredLink(9e9, 7e-6)), "V100-32GB": MeasuredDevice(intra=MeasuredLink(11e9, 9e-6))}
        intra = apply_profile(Hardware((node,)), Profile(measured)).nodes[0].intra
        assert (intra.rate, intra.latency) == (9e9, 9e-6)

    def test_kinds_that_no_catalogue_knows_are_matched_by_name(self):
        npu = Device("npu", {"float32": 1e12}, 1e9, 1e9)
        hardware = Hardware((Node("a", (npu,), Link(1e9), Link(1e9)),))
        assert apply_profile(hardware, Profile({"npu": MeasuredDevice(bandwidth=5e8)})).devices[0].bandwidth == 5e8

    def test_unknown_node_is_refused(self, cluster):
        profile = Profile(nodes={"gone": {"inter": MeasuredLink(1e9)}})
        assert message(apply_profile, cluster, profile) == (
            "the profile has links of the node 'gone', but the cluster's nodes are V100-32GB-0, V100-32GB-1, T4-0; measure again, or remove it"
        )


class TestMerged:
    def test_newer_numbers_win_one_by_one(self):
        older = parse_profile(TEXT)
        newer = Profile(
            {"Tesla V100-SXM2-32GB": MeasuredDevice({"float32": 15e12}, host=MeasuredLink(11e9)), "T4": MeasuredDevice(overhead=0.0)},
            MeasuredLink(latency=50e-6),
            {"V100-32GB-1": {"inter": MeasuredLink(latency=1e-6)}, "other": {"host": MeasuredLink(1e9)}},
            "later",
        )
        merged = merge_profiles(older, newer)
        assert merged.devices["Tesla V100-SXM2-32GB"] == MeasuredDevice(
            {"float32": 15e12, "bfloat16": 13e12}, 800e9, 6e-6, MeasuredLink(100e9), MeasuredLink(11e9, 12e-6)
        )
        assert merged.devices["T4"].overhead == 0.0
        assert merged.inter == MeasuredLink(4e9, 50e-6)
        assert merged.nodes["V100-32GB-1"] == {"inter": MeasuredLink(2e9, 1e-6), "intra": MeasuredLink(None, 0.0)}
        assert merged.nodes["other"] == {"host": MeasuredLink(1e9)}
        assert merged.source == "later"
        assert older == parse_profile(TEXT)

    def test_nothing_new_changes_nothing(self):
        older = parse_profile(TEXT)
        assert merge_profiles(older, Profile()) == older
        assert merge_profiles(Profile(), older) == older
