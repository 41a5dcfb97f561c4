"""Which cases with options run: each option alone, and all pairs that go together."""

import itertools
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from tests.harness.layouts import Layout
from tests.harness.models import MODELS
from tests.harness.runner import Case
from tests.harness.stage_cover import SCHEDULES

OPTIONS: Dict[str, Dict[str, Any]] = {
    "recompute": {"gradient_checkpoint.type": "auto"},
    "zero-v0": {"zero.level": "v0"},
    "zero-v1": {"zero.level": "v1"},
    "zero-v2": {"zero.level": "v2"},
    "offload": {"offload.level": "v0"},
    "offload-v2": {"offload.level": "v2"},
    "groups": {"optimizer.num_apply_group": 3},
    "dense": {"communication.sparse_as_dense": True},
    "single": {"communication.max_splits": 1},
}
LAYOUTS = ("1x2", "2x1", "1x4-m4", "2x2-m4run", "1x2-s2-m4", "2x1-s2", "2x2-s2-m4", "4x1-s2-m4", "4x1", "1x4-s2")
OPTIMIZERS = ("adam", "momentum", "bert", "adagrad", "sgd")
INPUTS = ("feed", "dataset")
_SCHEDULES = tuple(name for name in SCHEDULES if name not in ("Interleaved", "ZeroBubbleV"))


def choices() -> List[Tuple[str, ...]]:
    """Each option alone, and the pairs of which none says the opposite of the other."""
    alone = [(name,) for name in OPTIONS]
    pairs = [pair for pair in itertools.combinations(OPTIONS, 2) if not set(OPTIONS[pair[0]]) & set(OPTIONS[pair[1]])]
    return alone + pairs


def full_matrix() -> Iterator[Case]:
    """Every choice, layout and model; the other values take turns."""
    for number, (names, layout, model) in enumerate(itertools.product(choices(), LAYOUTS, MODELS)):
        yield _case(names, layout, model, number)


def few() -> List[Case]:
    """Every choice once, in layouts and with models that take turns."""
    models = tuple(MODELS)
    return [_case(names, LAYOUTS[n % len(LAYOUTS)], models[(n + n // len(LAYOUTS)) % len(models)], n) for n, names in enumerate(choices())]


def _case(names: Sequence[str], layout: str, model: str, number: int) -> Case:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    schedule = _SCHEDULES[number // 3 % len(_SCHEDULES)] if "-s" in layout else ""
    return Case(
        model, OPTIMIZERS[number % len(OPTIMIZERS)], Layout.parse(layout), INPUTS[number // 5 % 2], schedule=schedule,
        annotate="scope" if "-s" in layout else "default", options=tuple(sorted(options.items())),
        variables=("resource", "ref")[number // 7 % 2],
    )  # fmt: skip
