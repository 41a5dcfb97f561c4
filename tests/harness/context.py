"""How a case runs in this process: plainly, or as one rank of a layout under EPL."""

import contextlib
import json
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from tests.harness import data
from tests.harness.layouts import Layout
from tests.harness.stages import cut_into

STALL_TIMEOUT = 30


class Run:
    """One case on one rank. A case is a function of a `Run`; it must make all its choices from it.

    plain:  no EPL; this process is alone and consumes the whole global batch
    layout: the layout under EPL, also when `plain` (it says how many user batches a step has)
    rank:   number of this process, `ranks` how many there are
    folder: a folder of this case that all ranks share
    """

    def __init__(self, layout: Layout, rank: int, plain: bool, folder: str):
        self.layout = layout
        self.rank = 0 if plain else rank
        self.ranks = 1 if plain else layout.ranks
        self.plain = plain
        self.folder = folder

    @property
    def runs(self) -> int:
        """Runs of the training op per step."""
        return 1 if self.plain else self.layout.runs

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # --- programs -------------------------------------------------------------------------

    @contextlib.contextmanager
    def program(
        self,
        config: Optional[Dict[str, Any]] = None,
        annotate: str = "default",
        seed: int = 1,
        resource: bool = True,
        control_flow_v2: bool = False,
    ) -> Iterator[tf.Graph]:
        """A fresh graph, under EPL with a fresh configuration.

        config: options of the case, after those that the variable TESTS_CONFIG has as JSON for all cases.
        annotate: "default" sets a default strategy, "scope" leaves it to `scope()`, "none" annotates nothing.
        With several stages it is always left to `scope()` or `stage()`.
        """
        (tf.enable_resource_variables if resource else tf.disable_resource_variables)()
        (tf.enable_control_flow_v2 if control_flow_v2 else tf.disable_control_flow_v2)()
        self._annotate = annotate if self.layout.stages == 1 else "scope"
        if self.layout.together and annotate == "default":
            self._annotate = "none"
        self._stages: Dict[int, Any] = {}
        with tf.Graph().as_default() as graph:
            if not self.plain:
                self._init(config or {})
            if seed:
                tf.set_random_seed(seed)
            yield graph

    def _init(self, config: Dict[str, Any]) -> None:
        import epl

        values = {
            "cluster.devices_per_worker": self.layout.devices,
            "cluster.stall_timeout": STALL_TIMEOUT,
            "pipeline.num_micro_batch": self.layout.m,
            "pipeline.accumulate_in_run": self.layout.accumulate_in_run,
            "pipeline.stages_per_device": self.layout.chunks,
            "cluster.colocate_split_and_replicate": self.layout.lanes > 1 and self.layout.stages == 1 and not self.layout.together,
        }
        values.update(json.loads(os.environ.get("TESTS_CONFIG", "{}")))
        values.update(config)
        epl.init(epl.Config(values))
        if self._annotate == "default":
            epl.set_default_strategy(epl.replicate(self.layout.lanes))

    def scope(self) -> Any:
        """The scope of the model when the program is annotated by scopes, else nothing. Several stages begin where the model says `at(...)`."""
        if self.plain or self._annotate != "scope":
            return contextlib.nullcontext()
        return cut_into(self.layout.stages, self.stage) if self.layout.stages > 1 else self.stage(0)

    def stage(self, number: int) -> Any:
        """The scope of one stage of the layout; it may be entered several times."""
        if self.plain or self._annotate != "scope":
            return contextlib.nullcontext()
        import epl

        if number not in self._stages:
            self._stages[number] = epl.replicate(device_count=1)
        return self._stages[number]

    def split(self) -> Any:
        """The scope of what the lanes of the layout share, if they share anything."""
        if self.plain or self.layout.lanes == 1:
            return contextlib.nullcontext()
        import epl

        return epl.split(device_count=self.layout.lanes)

    def merge(self, tensor: tf.Tensor, how: str = "GLOBAL_MEAN_OBJECTS") -> tf.Tensor:
        """Let fetches of the tensor be merged over micro-batches and all replicas."""
        if not self.plain:
            import epl

            epl.add_to_collection(tensor, getattr(epl.GraphKeys, how))
        return tensor

    def session(self, initialize: bool = True, threads: int = 0) -> tf.Session:
        """A `tf.Session` on the default graph with variables, tables and iterators initialised; with so many threads of its own, if any."""
        session = tf.Session(config=tf.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=threads) if threads else None)
        if initialize:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer(), tf.tables_initializer()])
        return session

    # --- inputs ---------------------------------------------------------------------------

    @property
    def feeds(self) -> bool:
        """Whether this process holds a first stage, so that what it is fed and draws is used."""
        return self.plain or bool(self.layout.replicas_of(self.rank))

    def local(self, array: Any, run: int = 0, rubbish: bool = False) -> np.ndarray:
        """This process's part of a global array in the `run`-th run of a step.

        Without a first stage it is what its replica's first stage gets, or `rubbish`.
        """
        array = np.asarray(array)
        if self.plain:
            return array
        part = data.local_part(array, self.layout, self.rank, run)
        return data.rubbish_like(part) if rubbish and not self.feeds else part

    def dataset(self, steps: Sequence[data.Arrays], missing: int = 0) -> tf.data.Dataset:
        """The user's batches of this process over all steps (a list of global batches); empty in a process without a first stage.

        missing: so many rows of the last batch of the last step, which some rank draws, are not there.
        """
        if self.plain:
            stream, size = data.local_stream(steps, Layout(), 0)
        else:
            stream, size = data.local_stream(steps, self.layout, self.rank)
        rows = len(next(iter(stream.values())))
        if not self.feeds:
            rows = 0
        elif self.plain or self.layout.batches - 1 in self.layout.batches_of(self.rank, self.runs - 1):
            rows -= missing
        return tf.data.Dataset.from_tensor_slices({name: array[:rows] for name, array in stream.items()}).batch(size)

    def next_batch(self, dataset: tf.data.Dataset) -> Any:
        """The next element of a dataset whose iterator is initialised with the tables."""
        iterator = tf.data.make_initializable_iterator(dataset)
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        return iterator.get_next()

    # --- training -------------------------------------------------------------------------

    def step(self, session: Any, fetches: Any, feeds: Optional[Dict[tf.Tensor, Any]] = None, rubbish: bool = False) -> List[Any]:
        """One training step on a global batch: the fetched values of each of its runs. `rubbish`: see `local`."""
        return [session.run(fetches, {key: self.local(value, run, rubbish) for key, value in (feeds or {}).items()}) for run in range(self.runs)]

    def train(self, session: Any, loss: tf.Tensor, train: Any, steps: Sequence[Dict[tf.Tensor, Any]]) -> List[float]:
        """Steps on global batches: the loss of each step, averaged over the runs of the step."""
        return [float(np.mean([values[0] for values in self.step(session, [loss, train], feeds)])) for feeds in steps]


def variables(session: Any) -> Dict[str, np.ndarray]:
    """The values of all global variables by name."""
    tensors = tf.global_variables()
    return {variable.op.name: np.asarray(value) for variable, value in zip(tensors, session.run(tensors))}
