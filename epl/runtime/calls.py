"""The calls of a session: what a user's `run` names, and what it was compiled to."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl import compat
from epl.errors import FeedError
from epl.ir.program import SAME, parse_ref
from epl.runtime.compiler import LOCAL, Executable, Signature, Traits, traits_of
from epl.runtime.feeding import FeedSpec
from epl.runtime.graph_index import GraphIndex
from epl.runtime.store import Loaded


class Ready(NamedTuple):
    """An executable in the store, with the function that runs it."""

    executable: Executable
    loaded: Loaded
    call: Callable[..., List[Any]]
    order: Tuple[int, ...]
    """For each feed of the program its position among the user's feeds; a negative one is a value of EPL."""
    ended: Optional[Callable[..., List[Any]]]
    with_options: Dict[bytes, Callable[..., List[Any]]]
    """The calls with run options (tracing), by the options: making one costs as much as a first run."""


class Call:
    """One distinct (fetches, feeds) of the user's `run`."""

    def __init__(self, mapper: Any, names: Sequence[str], fetches: Tuple[str, ...], feeds: Tuple[FeedSpec, ...], traits: Traits, keep: Any):
        """`names` are the fetches in the order of the mapper, `fetches` those in the order in which they are run."""
        self.mapper = mapper
        self.fetches = fetches
        self.feeds = feeds
        self.traits = traits
        self.ready: Dict[Tuple[str, Tuple[str, ...]], Ready] = {}
        results = [name for name in fetches if ":" in name]
        self.positions = tuple(results.index(name) if ":" in name else None for name in names)
        """For each of `names` its position among the results; None for an operation."""
        self.keep = keep  # the key of a call is made of ids: its objects must live


def new_call(graph: tf.Graph, index: GraphIndex, fetches: Any, feeds: Tuple[str, ...], local: bool) -> Call:
    """Resolve fetches and feeds in the user's graph; nothing is compiled yet.

    Args:
      graph, index: the user's graph.
      fetches: what `run` was given. feeds: names of the fed tensors.
      local: it runs on the first local replica whatever it is.
    """
    with graph.as_default():
        mapper = compat.fetch_mapper(fetches)
    elements = mapper.unique_fetches()
    names = tuple(e.name for e in elements)
    # A dict of fetches may have been made from a set: all ranks take them in the order in which they were built.
    built = index.position_of
    fetches_in_order = tuple(sorted(names, key=lambda name: (built(parse_ref(name)[0]), name)))
    specs = []
    for name in feeds:
        tensor = graph.get_tensor_by_name(name)
        shape = tensor.shape
        specs.append(FeedSpec(name, np.dtype(tensor.dtype.base_dtype.as_numpy_dtype), None if shape.ndims is None else tuple(shape.as_list())))
    traits = LOCAL if local else traits_of(index.whole(), Signature(fetches_in_order, feeds, (SAME,) * len(feeds)))
    return Call(mapper, names, fetches_in_order, tuple(specs), traits, (fetches, elements))


def feed_items(graph: tf.Graph, feed_dict: Optional[Dict[Any, Any]]) -> Tuple[Tuple[str, ...], List[Any]]:
    """Names of the fed tensors, and their values in the same order.

    Raises:
      FeedError: a key is no tensor of the graph.
    """
    if not feed_dict:
        return (), []
    names: List[str] = []
    values: List[Any] = []
    for feed, value in feed_dict.items():
        if isinstance(feed, tf.Tensor):
            names.append(feed.name)
            values.append(value)
            continue
        for tensor, part in compat.expand_feed(feed, value):
            try:
                names.append(graph.as_graph_element(tensor, allow_operation=False).name)
            except (TypeError, ValueError, KeyError) as error:
                raise FeedError("%r can't be fed: %s" % (getattr(tensor, "name", tensor), error)) from error
            values.append(part)
    return tuple(names), values


def fetch_key(fetches: Any) -> Any:
    """A key under which the same nested fetch is found again."""
    if isinstance(fetches, str):
        return fetches
    if isinstance(fetches, (list, tuple)):
        return (type(fetches), tuple(fetch_key(f) for f in fetches))
    if isinstance(fetches, dict):
        return (type(fetches), tuple((k, fetch_key(v)) for k, v in fetches.items()))
    return id(fetches)
