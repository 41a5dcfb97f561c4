"""The simulation against published measurements and calculations: Zero Bubble's table 5, AMP's trials, Whale's figures 13 and 16."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from epl.cluster.hardware import Device, Hardware, Link, Node
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.schedules import make_schedule
from epl.planner.simulate import Candidate, simulate
from tests.unit.planner.amp_models import candidate, g4dn, gpt2, p3, transgan
from tests.unit.planner.amp_trials import HOMOGENEOUS, MIXED_CLUSTER, MIXED_MODEL
from tests.unit.planner.ring_network import Hierarchical, Ring

# Zero Bubble.

BUBBLES = """
1.5B   8  24 18.522 18.086  9.337 0.601  3  0.2431 0.1055 0.1585 0.1083
1.5B   8  32 18.513 18.086  9.331 0.626  3  0.1985 0.0818 0.1242 0.0837
1.5B   8  64 18.546 18.097  9.321 0.762  3  0.1240 0.0443 0.0674 0.0444
6.2B   8  24 29.718 29.444 19.927 0.527  4  0.2347 0.0808 0.1323 0.0698
6.2B   8  32 29.802 29.428 19.530 0.577  4  0.1898 0.0628 0.1045 0.0559
6.2B   8  64 29.935 29.621 19.388 0.535  4  0.1091 0.0320 0.0554 0.0294
14.6B 16  48 11.347 11.248  8.132 0.377  3  0.2552 0.1104 0.1397 0.0672
14.6B 16  64 11.307 11.254  8.101 0.379  3  0.2082 0.0852 0.1088 0.0516
14.6B 16 128 11.325 11.308  8.109 0.378  3  0.1251 0.0445 0.0576 0.0266
28.3B 32  96 10.419 10.207  7.715 0.408  2  0.2646 0.1493 0.1421 0.0641
28.3B 32 128 10.408 10.204  7.703 0.408  2  0.2168 0.1164 0.1106 0.0490
28.3B 32 256 10.402 10.248  7.698 0.460  2  0.1352 0.0624 0.0594 0.0257
"""
"""Model, p, m; tF, tB, tW and the time of a transfer in ms; chunks of 1F1B-I; bubble rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, tables 5 (rates), 9 (profiled times) and 3
(layers: those of 1F1B-I's chunks are one each, and the first and the last stage have one less).
"""
SETTINGS = [line.split() for line in BUBBLES.strip().splitlines()]


class Fixed(Ring):
    """Every transfer takes the same time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def together(self, messages):
        return [self.seconds] * len(messages)


def is_small(setting):
    return int(setting[1]) * int(setting[2]) < 1000


@pytest.mark.parametrize(
    "setting", [pytest.param(row, marks=() if is_small(row) else pytest.mark.slow, id=row[0] + "-" + row[2]) for row in SETTINGS]
)
def test_bubble_rates_of_zero_bubble(setting):
    """1F1B, ZB-H1 and ZB-H2 to the four digits that are printed: the paper computed them from the same times.

    1F1B-I is up to 0.004 above: Megatron sends and receives in pairs, which saves some transfers'
    time. ZB-1p and ZB-2p are searched for, which this repository does not do.
    """
    devices, micro_batches, chunks = int(setting[1]), int(setting[2]), int(setting[7])
    forward, backward, weights, transfer = map(float, setting[3:7])
    gpu = Device("gpu", {"float32": 1.0}, 1e12, 1e12)
    hardware = Hardware((Node("n", (gpu,) * devices, Link(1.0), Link(1.0)),))
    for name, per_device, published in zip(("1F1B", "Interleaved", "ZB-H1", "ZB-H2"), (1, chunks, 1, 1), map(float, setting[8:12])):
        times = [time / per_device for time in (forward, backward, weights)]
        layer = Layer("l", Work(times[0]), Work(times[1] + times[2]), Work(times[2]), output=1.0)
        stages = devices * per_device
        order = [make_schedule(name, stages, 1, devices).device_of(stage) for stage in range(stages)]
        places = tuple((hardware.places[row],) for row in order)
        plan = Candidate(tuple(range(stages + 1)), (places,), (1.0,), micro_batches, name)
        found = simulate(plan, Model((layer,) * stages), hardware, Fixed(transfer))
        rate = 1 - found.compute_share
        if per_device > 1:
            assert 0 <= rate - published < 0.004
        else:
            assert rate == pytest.approx(published, abs=0.00006)


# AMP.


def predictions(trials, batch, hardware, model_of, shared=()):
    """Of the trials that ran: predicted seconds, measured seconds, the iterations."""
    network, ran = Ring(hardware, shared), [trial for trial in trials if trial[-1] is not None]
    found = [simulate(candidate(trial, batch, hardware, model_of(trial[1])), model_of(trial[1]), hardware, network) for trial in ran]
    return np.array([iteration.seconds for iteration in found]), np.array([trial[-1] for trial in ran]), found


def rank_of_best(predicted, measured):
    """Which place the plan that was the fastest has among the predictions."""
    return int((predicted < predicted[measured.argmin()]).sum()) + 1


def correlation(predicted, measured):
    return spearmanr(predicted, measured)[0]


def own_correlation(trials):
    """That of AMP's cost model, in whose order the trials are listed."""
    measured = [trial[-1] for trial in trials if trial[-1] is not None]
    return spearmanr(range(len(measured)), measured)[0]


def test_amp_on_equal_devices():
    """16 T4: two numbers are fitted to every fourth trial; the other 34 are predicted within 17 %, 8 % in the mean.

    AMP's own model has a rank correlation of 0.93; it expects 8.3 s of the last trial that ran, which took 3.7 s.
    """
    model = gpt2()
    rest = [trial for number, trial in enumerate(HOMOGENEOUS) if number % 4]
    predicted, measured, _ = predictions(rest, 32, Hardware(g4dn(4)), lambda degree: model, range(4))
    errors = np.abs(predicted - measured) / measured
    assert len(measured) == 34
    assert errors.max() < 0.17 and errors.mean() < 0.08
    assert correlation(predicted, measured) > 0.95
    predicted, measured, found = predictions(HOMOGENEOUS, 32, Hardware(g4dn(4)), lambda degree: model, range(4))
    assert correlation(predicted, measured) > own_correlation(HOMOGENEOUS) > 0.93
    assert rank_of_best(predicted, measured) <= 3
    assert all(iteration.fits for iteration in found), "what ran had enough memory"


def test_amp_on_a_mixed_cluster():
    """12 V100 and 4 T4 with 10 Gb/s: nothing is fitted to these trials, and the fastest plan is the one predicted.

    Over all 43 trials the rank correlation is 0.66 (AMP's model: 0.39), not the 0.8 that was wished for. The
    misses are eight pipelines of split layers with micro-batches of 1 or 2 samples, which took up to twice what
    the same plans took with 4; another two of this kind did not run. On the T4 cluster they behave,
    so it is something of that installation. Without them it is 0.93, and without split layers 0.97.
    """
    model, hardware = gpt2(), Hardware(p3(3) + g4dn(1))
    predicted, measured, _ = predictions(MIXED_CLUSTER, 32, hardware, lambda degree: model, (3,))
    assert len(measured) == 43 and rank_of_best(predicted, measured) == 1
    assert correlation(predicted, measured) > 0.65 and own_correlation(MIXED_CLUSTER) < 0.4
    tame = [trial for trial in MIXED_CLUSTER if not (trial[1] > 1 and trial[3] > 1 and trial[0] < 4)]
    predicted, measured, _ = predictions(tame, 32, hardware, lambda degree: model, (3,))
    assert len(measured) == 35 and correlation(predicted, measured) > 0.9
    assert np.mean(np.abs(predicted - measured) / measured) < 0.15
    whole = [trial for trial in MIXED_CLUSTER if trial[1] == 1]
    predicted, measured, _ = predictions(whole, 32, hardware, lambda degree: model, (3,))
    assert correlation(predicted, measured) > 0.95 and np.mean(np.abs(predicted - measured) / measured) < 0.10


def test_amp_on_unequal_layers():
    """TransGAN on 16 V100, with AMP's layer times, nothing fitted. They are of one sample, so larger micro-batches come out too slow."""
    models = {degree: transgan(degree) for degree in (1, 2, 4)}
    predicted, measured, _ = predictions(MIXED_MODEL, 64, Hardware(p3(4)), models.__getitem__)
    assert len(measured) == 19 and rank_of_best(predicted, measured) == 1
    assert correlation(predicted, measured) > 0.9 > own_correlation(MIXED_MODEL)


# Whale.

MEGABYTE = 2**20
SINGLE = 319.0
"""Samples/s of one GPU, figure 13."""
BATCH = 64
"""Of each GPU. The paper does not say."""
NVLINK = 59e9
"""Bytes/s within a node, fitted to data parallelism on 8 GPUs. The paper does not say."""


def whale(devices, split):
    """ResNet50 (90 MB) and its 100,000 classes (782 MB) on nodes of 8 V100 with 50 Gb/s; `split` divides the classes over all GPUs.

    FP32; the time of one GPU has its optimizer in it. The classes' part of it is that of their
    FLOPs: 2 * 2048 * 100,000 of a sample, against 2 * 3.8e9 of the backbone (He et al., CVPR 2016, table 1: 3.8e9 multiply-adds).
    """
    v100 = Device("V100", {"float32": 15.7e12}, 32e9, float("inf"))
    hardware = Hardware(tuple(Node("n%d" % n, (v100,) * 8, Link(NVLINK), Link(50e9 / 8)) for n in range(devices // 8)))
    classes = 2 * 2048 * 1e5 / (2 * 2048 * 1e5 + 2 * 3.8e9)
    seconds = [{"V100": (part / SINGLE / 3, part / SINGLE * 2 / 3)} for part in (1 - classes, classes)]
    model = Model((
        Layer("backbone", Work(), Work(), parameters=90 * MEGABYTE / 4, output=4 * 2048, seconds=seconds[0]),
        Layer("classes", Work(), Work(), parameters=782 * MEGABYTE / 4, seconds=seconds[1], split_by=1000),
    ))  # fmt: skip
    plan = Candidate((0, 2), ((tuple(hardware.places),),), (float(BATCH * devices),), split=(1, devices) if split else ())
    return simulate(plan, model, hardware, Hierarchical(hardware))


def test_whale_data_parallelism():
    """Figure 16: .119, .442, .646 of the time is communication; figure 13: 2246, 2844, 3611 samples/s.

    Sizes, bandwidth and the speed of one GPU are given, the batch and the links within a node are not; the first ratio is
    fitted. The second is within 7 %, the third within 15 %; the throughputs are within 3 %, 6 % and 27 %: on four nodes
    the real network did worse than a hierarchical all-reduce at full bandwidth.
    """
    found = [whale(devices, split=False) for devices in (8, 16, 32)]
    shares = [iteration.communication_share for iteration in found]
    assert shares == pytest.approx([0.119, 0.442, 0.646], rel=0.15)
    assert shares[1] == pytest.approx(0.442, rel=0.07)
    for iteration, published, tolerance in zip(found, (2246, 2844, 3611), (0.03, 0.06, 0.27)):
        assert iteration.throughput == pytest.approx(published, rel=tolerance)


def test_whale_hybrid_of_data_parallelism_and_split():
    """Figure 13: 2547, 4729, 8789 samples/s, all within 2 %. Figure 16: .067, .079, .099; the shape.

    The ratio grows with the nodes (.079 within 16 %, .099 within 35 %); at 8 GPUs all is NVLink, and what
    the paper counts there is not bandwidth. At 32 GPUs it is at least four times below data parallelism's (text: 6).
    """
    found = [whale(devices, split=True) for devices in (8, 16, 32)]
    for iteration, published in zip(found, (2547, 4729, 8789)):
        assert iteration.throughput == pytest.approx(published, rel=0.02)
    shares = [iteration.communication_share for iteration in found]
    assert shares[0] < shares[1] < shares[2]
    assert shares[1] == pytest.approx(0.079, rel=0.16) and shares[2] == pytest.approx(0.099, rel=0.35)
    plain = [whale(devices, split=False) for devices in (8, 16, 32)]
    assert plain[2].communication_share > 4 * shares[2]
    gains = [hybrid.throughput / data.throughput for hybrid, data in zip(found, plain)]
    assert gains[0] < gains[1] < gains[2], "1.13, 1.66 and 2.43 in the text"
    assert gains[:2] == pytest.approx([1.13, 1.66], rel=0.05) and gains[2] == pytest.approx(2.43, rel=0.21)
