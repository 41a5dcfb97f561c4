"""Which cases of the matrix run: a small set that covers all pairs of values, and the full matrix."""

import itertools
import random
from typing import Dict, Iterator, List, Tuple

from tests.harness.layouts import Layout
from tests.harness.models import MODELS
from tests.harness.optimizers import OPTIMIZERS
from tests.harness.runner import Case

SPREADS = ("1x2", "1x4", "2x1", "4x1", "2x2")
MICRO_BATCHES = ("", "-m2", "-m2run", "-m4", "-m4run")
AXES: Dict[str, Tuple] = {
    "model": tuple(MODELS),
    "optimizer": OPTIMIZERS,
    "spread": SPREADS,
    "micro": MICRO_BATCHES,
    "input": ("feed", "dataset"),
    "annotate": ("default", "scope", "none"),
    "session": ("session", "monitored"),
    "variables": ("resource", "ref"),
    "merged": (True, False),
}
FULL_OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")
TRIES = 60

Pair = Tuple[Tuple[str, object], Tuple[str, object]]


def full_matrix() -> Iterator[Case]:
    """Every model, optimizer of TensorFlow, layout and input, and a transformer with a custom optimizer that clips, in the plain style."""
    for model, optimizer, spread, micro, source in itertools.product(MODELS, FULL_OPTIMIZERS, SPREADS, MICRO_BATCHES, AXES["input"]):
        yield Case(model, optimizer, Layout.parse(spread + micro), source)
    for spread, micro, source in itertools.product(SPREADS, MICRO_BATCHES, AXES["input"]):
        yield Case("transformer", "bert", Layout.parse(spread + micro), source)


def pairwise_cover(seed: int = 1) -> List[Case]:
    """Cases in which every two values of different axes meet, as far as they may; the same ones every time."""
    rng = random.Random(seed)
    left = {pair for pair in _all_pairs() if _allowed(dict(pair))}
    order = sorted(left, key=repr)
    rng.shuffle(order)
    cases = []
    for pair in order:
        if pair not in left:
            continue
        tries = [row for row in (_row(rng, dict(pair)) for _ in range(TRIES)) if _allowed(row)]
        best = max(tries, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        cases.append(_case(best))
    return cases


def _allowed(row: Dict[str, object]) -> bool:
    """With several local devices a fetch of a loss that is not merged has the value of one replica."""
    return row.get("merged", True) is True or row.get("spread", "2x1") in ("2x1", "4x1")


def _row(rng: random.Random, fixed: Dict[str, object]) -> Dict[str, object]:
    return {axis: fixed[axis] if axis in fixed else rng.choice(values) for axis, values in AXES.items()}


def _pairs(row: Dict[str, object]) -> set:
    return set(itertools.combinations(row.items(), 2))


def _all_pairs() -> Iterator[Pair]:
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            yield ((one, pair[0]), (other, pair[1]))


def _case(row: Dict[str, object]) -> Case:
    fields = {name: value for name, value in row.items() if name not in ("spread", "micro")}
    return Case(layout=Layout.parse("%s%s" % (row["spread"], row["micro"])), **fields)
