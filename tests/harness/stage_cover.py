"""Which cases with pipeline stages run: a small set that covers pairs of values, and a full matrix."""

import itertools
import random
from typing import Dict, Iterator, List, Set, Tuple

from tests.harness.layouts import Layout
from tests.harness.optimizers import OPTIMIZERS
from tests.harness.runner import GLOBAL_BATCH, Case
from tests.harness.staged import STAGED

SPREADS = ("1x2-s2", "2x1-s2", "1x4-s4", "4x1-s4", "2x2-s4", "4x1-s2", "2x2-s2", "1x4-s2")
SCHEDULES = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer", "ZeroBubbleH1", "ZeroBubbleH2", "Interleaved", "ZeroBubbleV")
CHUNKED = ("Interleaved", "ZeroBubbleV")
"""Schedules for which each device holds two stages: their replicas have half as many devices as stages."""

AXES: Dict[str, Tuple] = {
    "model": tuple(STAGED),
    "optimizer": OPTIMIZERS,
    "spread": SPREADS,
    "schedule": SCHEDULES,
    "m": (1, 2, 4, 8),
    "input": ("feed", "dataset", "uneven"),
    "variables": ("resource", "ref"),
    "annotate": ("scope", "inside"),
    "session": ("session", "monitored"),
    "merged": (True, False),
    "rubbish": (True, False),
}
FULL_OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad", "bert")
"""As many as have no common factor with the numbers of micro-batches, which change as often."""
FEW = 36
"""Cases of the small set."""
TRIES = 60

Row = Dict[str, object]
Target = Tuple[str, object, str, object]


def full_matrix() -> Iterator[Case]:
    """Every model, layout, schedule and number of micro-batches; the other values take turns, at steps that have no common factor."""
    names = ("model", "spread", "schedule", "m")
    turns = {"optimizer": FULL_OPTIMIZERS, "input": AXES["input"], "variables": AXES["variables"], "annotate": AXES["annotate"]}
    for number, values in enumerate(itertools.product(*(AXES[name] for name in names))):
        row = dict(zip(names, values), session="session", merged=True, rubbish=False)
        row.update((name, turn[number // pace % len(turn)]) for (name, turn), pace in zip(turns.items(), (1, 5, 7, 11)))
        if not _allowed(row):
            row["input"] = "feed"
        if _allowed(row):
            yield _case(row)


def few(seed: int = 1) -> List[Case]:
    """`FEW` cases, the same ones every time, in which as many targets as possible are met."""
    rng = random.Random(seed)
    cases: List[Case] = []
    met: Set[Target] = set()
    while len(cases) < FEW:
        rows = []
        while len(rows) < TRIES:
            row = {axis: rng.choice(values) for axis, values in AXES.items()}
            if _allowed(row):
                rows.append(row)
        best = max(rows, key=lambda row: len(targets(row) - met))
        met |= targets(best)
        cases.append(_case(best))
    return cases


def targets(row: Row) -> Set[Target]:
    """The pairs of values of a row that the small set shall have. Models are too many to meet every single layout, schedule and optimizer."""
    found = set()
    for (one, value), (other, second) in itertools.combinations(row.items(), 2):
        if one == "model":
            if other == "optimizer":
                continue
            second = _kind(other, second)
        found.add((one, value, other, second))
    return found


def all_targets() -> Set[Target]:
    """All targets that an allowed row may meet."""
    found = set()
    rest = {"m": 1, "input": "feed", "merged": True, "rubbish": False, "spread": "2x1-s2", "schedule": "PreferBackward", "model": "mlp"}
    for one, other in itertools.combinations(AXES, 2):
        for value, second in itertools.product(AXES[one], AXES[other]):
            row = dict({axis: values[0] for axis, values in AXES.items()}, **rest)
            row.update({one: value, other: second})
            if _allowed(row):
                found |= {target for target in targets(row) if target[0] == one and target[2] == other}
    return found


def _kind(axis: str, value: object) -> object:
    if axis == "spread":
        layout = Layout.parse(str(value))
        return "one process" if layout.ranks == 1 else "whole replicas" if layout.devices >= layout.width else "replicas over ranks"
    if axis == "schedule":
        return "chunks" if value in CHUNKED else "split backward" if str(value).startswith("Zero") else "classic"
    if axis == "m":
        return value == 1
    return value


def _layout(row: Row) -> Layout:
    layout = Layout.parse("%s-m%d" % (row["spread"], row["m"]))
    return layout._replace(stages=2 * layout.stages, chunks=2) if row["schedule"] in CHUNKED else layout


def _allowed(row: Row) -> bool:
    """Whether a row makes sense.

    A model has at most four stages. A loss that is not merged has the value of one replica:
    there must be no other one in the process, and their mean is that of equal batches.
    Batches of one row have no statistics, and can't be smaller. Only ranks without a first stage can be fed rubbish.
    """
    layout = _layout(row)
    rows = GLOBAL_BATCH // layout.batches
    if layout.stages > 4 or (not row["merged"] and (len(layout.replicas_of(0)) > 1 or row["input"] == "uneven")):
        return False
    if row["rubbish"] and all(layout.replicas_of(rank) for rank in range(layout.ranks)):
        return False
    return not (row["input"] == "uneven" and rows < 2) and not (row["model"] == "batch_norm" and rows < (4 if row["input"] == "uneven" else 2))


def _case(row: Row) -> Case:
    layout = _layout(row)
    fields = {name: value for name, value in row.items() if name not in ("spread", "m")}
    missing = GLOBAL_BATCH // layout.batches // 2 if row["input"] == "uneven" else 0
    return Case(layout=layout, last=GLOBAL_BATCH - missing, **fields)
