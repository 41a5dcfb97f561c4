"""Shares of a batch or a dimension: compared with all possible ones."""

import itertools

import numpy as np
import pytest

from epl.errors import PlanError
from epl.planner.balance import Linear, Measured, Segment, Worker, divide, even, replica, shard_ratios, shard_seconds, step_seconds, whole_shards
from epl.planner.cost.model import Model
from tests.unit.planner.balance_models import INFINITE, device, layer


def all_shares(total, workers, step=1):
    """Every division that the workers allow."""
    for shares in itertools.product(range(0, total + 1, step), repeat=len(workers)):
        if sum(shares) == total and all(allowed(worker, share) for worker, share in zip(workers, shares)):
            yield shares


def allowed(worker, share):
    if share < worker.least:
        return False
    return share == 0 or worker.fixed_bytes + worker.sample_bytes * share <= worker.capacity


def brute(total, workers, step=1, sync=None, gather=None):
    return min((step_seconds(shares, workers, sync, gather) for shares in all_shares(total, workers, step)), default=None)


def random_worker(random, total, monotone=True):
    times = random.integers(0 if monotone else 1, 20, total + 1).astype(float)
    if monotone:
        times = np.cumsum(times)
    # Whole numbers: sums and comparisons are exact.
    capacity = float(random.integers(0, 30)) if random.random() < 0.6 else INFINITE
    return Worker(tuple(times).__getitem__, capacity, float(random.integers(0, 6)), float(random.integers(0, 5)), int(random.integers(0, 3)))


def check(total, workers, step=1, sync=None, gather=None):
    wanted = brute(total, workers, step, sync, gather)
    if wanted is None:
        with pytest.raises(PlanError, match="can't be shared"):
            divide(total, workers, step, sync, gather)
        return False
    found = divide(total, workers, step, sync, gather)
    assert found.shares in set(all_shares(total, workers, step))
    assert found.seconds == step_seconds(found.shares, workers, sync, gather) == wanted
    return True


def test_divide_equals_brute_force():
    random = np.random.default_rng(0)
    solved = 0
    for _ in range(300):
        total = int(random.integers(1, 11))
        workers = [random_worker(random, total) for _ in range(random.integers(1, 4))]
        workers += workers[:1] * int(random.integers(0, 2))  # a kind with two members
        solved += check(total, workers)
    assert 100 < solved < 300  # both outcomes occur


def test_divide_equals_brute_force_when_more_samples_may_be_faster():
    random = np.random.default_rng(1)
    solved = 0
    for _ in range(200):
        total = int(random.integers(1, 11))
        workers = [random_worker(random, total, monotone=False) for _ in range(random.integers(1, 4))]
        sync = [None, lambda members: 3.0 * members][int(random.integers(0, 2))]
        solved += check(total, workers, sync=sync)
    assert 60 < solved < 200


def test_divide_equals_brute_force_with_communication():
    random = np.random.default_rng(2)
    solved = 0
    for _ in range(300):
        total = int(random.integers(1, 10))
        workers = [random_worker(random, total) for _ in range(random.integers(1, 5))][:4]
        each, part = float(random.integers(0, 9)), float(random.integers(0, 9))
        solved += check(total, workers, sync=lambda members, each=each: each * (members - 1), gather=lambda share, part=part: part * share)
    assert solved > 60


def test_divide_equals_brute_force_in_steps():
    random = np.random.default_rng(3)
    solved = 0
    for _ in range(100):
        step = int(random.integers(2, 5))
        total = step * int(random.integers(1, 6))
        workers = [random_worker(random, total) for _ in range(random.integers(1, 4))]
        solved += check(total, workers, step)
    assert solved > 20


def test_a_share_needs_whole_memory():
    # The case of test_balance_whale: 10 bytes for any share and 1 per sample in 16 bytes leave room for 6 each.
    workers = [Worker(Linear(0.0, 1.0), 16.0, 10.0, 1.0)] * 2
    with pytest.raises(PlanError, match="has room for 12"):
        divide(20, workers)
    assert divide(12, workers).shares == (6, 6)


def test_measured_seconds_beat_peaks():
    # V100 and P100 peaks are 15.7 : 9.3 FP32 TFLOP/s (NVIDIA data sheets), the speed of BertLarge about 1.9 : 1 (Whale,
    # figure 17: see test_balance_published). Shares by peak leave the P100 too much.
    from epl.planner.balance import whale

    pair = [device("V100", 1.9, peak=15.7), device("P100", 1.0, peak=9.3)]
    by_peak = whale.balance_replicas(pair, 1.0, 1.0, 290).loads
    workers = [Worker(Linear(0.0, 1 / 1.9)), Worker(Linear(0.0, 1.0))]
    found = divide(290, workers)
    assert by_peak == (182, 108)
    assert found.shares == (190, 100) and found.seconds == pytest.approx(100.0)
    assert step_seconds(by_peak, workers) == 108.0


def test_slow_device_is_left_out_where_that_is_allowed():
    slow = Worker(Linear(10.0, 1.0), least=0)
    fast = Worker(Linear(0.0, 1.0))
    assert divide(8, [fast, slow]).shares == (8, 0)
    assert divide(8, [fast, Worker(Linear(10.0, 1.0))]).shares == (7, 1)


def test_sync_of_one_member_more_may_not_pay():
    workers = [Worker(Linear(0.0, 1.0), least=0)] * 4
    # 12 / n + 2 (n - 1): 12, 8, 8, 9.
    assert divide(12, workers, sync=lambda members: 2.0 * (members - 1)).seconds == 8.0
    assert divide(12, workers).seconds == 3.0


def test_free_samples_are_spread():
    workers = [Worker(Linear(1.0, 0.0))] * 3 + [Worker(Linear(2.0, 0.0), least=1)]
    assert divide(10, workers).shares == (3, 3, 3, 1)


def test_measured_points_are_joined_by_lines():
    seconds = Measured(((2, 1.0), (4, 2.0), (8, 3.0)))
    assert [seconds(n) for n in (1, 2, 3, 4, 6, 8, 12)] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert Measured(((4, 2.0),))(6) == 3.0
    # The first line would reach zero at 2 samples.
    assert Measured(((4, 1.0), (6, 2.0)))(2) == 0.5
    with pytest.raises(PlanError, match="ascending"):
        Measured(((4, 1.0), (4, 2.0)))


def test_replica_counts_weights_once_and_activations_by_sample():
    model = Model((layer(3.0, 10.0, 2.0, workspace=1.0, tied="e"), layer(6.0, 10.0, 4.0, workspace=3.0, tied="e")))
    worker = replica(model, device("d", 3.0, 300.0))
    assert worker.seconds(4) == pytest.approx(12.0)  # 9 FLOP of 4 samples at 3 FLOP/s
    assert worker.fixed_bytes == 160.0 and worker.sample_bytes == 9.0
    assert worker.most(100) == 15  # (300 - 160) / 9


def test_a_thousand_devices_of_four_kinds_take_their_shares_at_once():
    workers = [Worker(Linear(0.1, 1.0 / rate)) for rate in (4.0, 3.0, 2.0, 1.0) for _ in range(256)]
    found = divide(65536, workers)
    by_kind = [set(found.shares[i : i + 256]) for i in range(0, 1024, 256)]
    # 25.6 samples per unit of rate.
    assert all(max(shares) - min(shares) <= 1 for shares in by_kind)
    assert found.seconds == pytest.approx(0.1 + 26.0, abs=0.5)


def test_divide_refuses_what_can_not_be():
    with pytest.raises(PlanError, match="positive numbers that divide"):
        divide(10, [Worker(Linear(0.0, 1.0))], step=3)
    with pytest.raises(PlanError, match="worker 0 has no memory"):
        divide(10, [Worker(Linear(0.0, 1.0), 1.0, 2.0)])
    with pytest.raises(PlanError, match="smallest shares alone are 3"):
        divide(2, [Worker(Linear(0.0, 1.0))] * 3)
    assert even(10, 4) == (3, 3, 2, 2)


def random_segments(random, count):
    def line():
        return float(random.integers(0, 5)), float(random.integers(0, 20))

    return [Segment(tuple(line() for _ in range(count)), line()) for _ in range(random.integers(1, 4))]


def test_whole_shards_equal_brute_force():
    random = np.random.default_rng(4)
    for _ in range(60):
        count, total = int(random.integers(1, 4)), int(random.integers(1, 13))
        segments = random_segments(random, count)
        limits = [int(random.integers(total // count, total + 1)) + 1 for _ in range(count)]
        found = whole_shards(total, segments, limits)
        assert sum(found) == total and all(share <= limit for share, limit in zip(found, limits))
        possible = (shares for shares in itertools.product(range(total + 1), repeat=count) if sum(shares) == total)
        wanted = min(
            shard_seconds([share / total for share in shares], segments)
            for shares in possible
            if all(share <= limit for share, limit in zip(shares, limits))
        )
        # The solver's tolerance: 1e-6 of a whole number, and of the largest time.
        assert shard_seconds([share / total for share in found], segments) == pytest.approx(wanted, rel=1e-5)


def test_whole_shards_and_divide_agree():
    random = np.random.default_rng(5)
    for _ in range(40):
        count, total = int(random.integers(1, 5)), int(random.integers(4, 30))
        (segment,) = random_segments(random, count)[:1]
        workers = [Worker(Linear(fixed, each / total), least=0) for fixed, each in segment.compute]
        if any(fixed for fixed, _ in segment.compute):
            continue  # `divide` spares a device without a share its fixed seconds
        found = divide(total, workers, gather=lambda share, s=segment, t=total: s.exchange[0] + s.exchange[1] * share / t)
        whole = whole_shards(total, [segment])
        assert shard_seconds([share / total for share in whole], [segment]) == pytest.approx(found.seconds, rel=1e-5)


def test_shares_by_speed_are_wrong_where_gathering_is_slow_and_even_ones_where_computing_is():
    # Two devices, one three times as fast. HAP's lesson, with both extremes and the crossover in closed form:
    # computing c / 3 * B and c * (1 - B), gathering g * B for B >= 1/2. Moving B up from 1/2 costs g and gains c.
    def segments(compute, gather):
        return [Segment(((0.0, compute / 3), (0.0, compute)), (0.0, gather))]

    assert shard_ratios(segments(1.0, 0.0)) == pytest.approx([0.75, 0.25])
    assert shard_ratios(segments(1.0, 0.9)) == pytest.approx([0.75, 0.25])
    assert shard_ratios(segments(1.0, 1.1)) == pytest.approx([0.5, 0.5])
    slow = segments(1.0, 10.0)
    assert shard_seconds([0.75, 0.25], slow) / shard_seconds([0.5, 0.5], slow) == pytest.approx(7.75 / 5.5)


def test_ratios_are_never_worse_than_even_or_proportional_ones():
    random = np.random.default_rng(6)
    for _ in range(50):
        count = int(random.integers(2, 6))
        segments = random_segments(random, count)
        rates = random.integers(1, 9, count)
        best = shard_seconds(shard_ratios(segments), segments)
        assert best <= shard_seconds([1 / count] * count, segments) * (1 + 1e-6)
        assert best <= shard_seconds(list(rates / rates.sum()), segments) * (1 + 1e-6)


def test_shards_need_memory_for_the_whole():
    with pytest.raises(PlanError, match="memory for 0.75"):
        shard_ratios([Segment(((0.0, 1.0), (0.0, 1.0)))], [0.5, 0.25])
    assert shard_ratios([Segment(((0.0, 1.0), (0.0, 1.0)))], [0.25, 0.75]) == pytest.approx([0.25, 0.75])
    with pytest.raises(PlanError, match="same devices"):
        shard_ratios([])
