"""What the training step has is computed in other programs of its graph as it is there: the search is made once."""

from typing import List, Mapping, Optional, Sequence, Tuple

from epl.planner.sharding.solve import Item
from epl.planner.sharding.strategy import Strategy, alone


def as_before(items: Sequence[Item], known: Mapping[str, Item], strategies: Mapping[str, Strategy]) -> Optional[List[Item]]:
    """Items of which those that are known have one way left, the one that was chosen for them.

    Args:
      items: of a program. known: those of another one, by name. strategies: what was chosen for these.

    Returns:
      None if there is one that is known but has other lanes here, or can't be computed that way: then all is chosen anew.
    """
    found = []
    for item in items:
        before = known.get(item.name)
        if before is not None:
            way = strategies[item.name]
            if _place(item) != _place(before) or not _allows(item, way):
                return None
            item = item._replace(ways=(way,))
        found.append(item)
    return found


def _place(item: Item) -> Tuple[object, ...]:
    """What decides in which ways an op can be computed, but for constants: these stay."""
    return item.op.type, item.op.inputs, item.op.outputs, item.inputs, item.lanes, item.analysis.lanes, item.analysis.batch


def _allows(item: Item, way: Strategy) -> bool:
    if item.ways:
        return way in item.ways
    if item.fixed is not None:
        return way.outputs[0] == item.fixed
    return item.free or way[:3] == alone(item.lanes, item.analysis.lanes)[:3]
