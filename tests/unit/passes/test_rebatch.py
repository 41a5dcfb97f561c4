"""Datasets whose batches are cut anew for unequal shares."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from epl.errors import ProgramError
from epl.passes.extract import extract
from epl.passes.rebatch import Rebatch, with_marked_iterators
from epl.planner.plan import Plan, Task
from tests.unit.machine import user_graph

UNEQUAL = Plan(ranks=2, devices_per_rank=2, batch_shares=(1, 2, 2, 3))


def graph_of(make):
    """The whole graph of a script that trains on a drawn batch; `make` returns what is drawn."""
    with user_graph() as index:
        x = make()
        w = tf.get_variable("w", [1, 1])
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.cast(x, tf.float32), w)))
        tf.identity(tf.gradients(loss, w)[0], name="gradient")
        return index()


def numbers(batch=4, count=64):
    return tf.data.Dataset.from_tensor_slices(np.arange(count).reshape(-1, 1)).batch(batch)


def initializable(dataset):
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.identity(iterator.get_next(), name="evaluated")
    return iterator.get_next(name="drawn")


def drawn(program, draws, initializer="MakeIterator"):
    """What a graph draws: the number of rows of each batch."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(program.to_graph_def(), name="")
        with tf.Session(graph=graph) as session:
            if initializer:
                session.run(initializer)
            return [session.run("drawn:0")[:, 0].tolist() for _ in range(draws)]


def passed(whole, plan, rank):
    marked = with_marked_iterators(whole, plan)
    names = [n for n in ("MakeIterator", "drawn") if n in whole.nodes]
    return Rebatch().run(extract(marked, names, [], []), Task(plan, rank))


@pytest.mark.parametrize("rank,sizes", [(0, [2, 4]), (1, [4, 6])])
def test_each_process_draws_its_shares_in_turn(rank, sizes):
    whole = graph_of(lambda: initializable(numbers().map(lambda v: v + 0).prefetch(1)))
    rows = drawn(passed(whole, UNEQUAL, rank), 4)
    assert [len(r) for r in rows] == sizes * 2
    assert sum(rows, []) == list(range(2 * sum(sizes))), "the samples come in their order"


def test_micro_batches_of_a_run_come_replica_by_replica():
    whole = graph_of(lambda: initializable(numbers()))
    plan = Plan(ranks=1, devices_per_rank=2, batch_shares=(1, 3), micro_batches=2, accumulate_in_run=True)
    assert [len(r) for r in drawn(passed(whole, plan, 0), 4)] == [2, 2, 6, 6]


def test_sizes_are_rounded_so_that_they_add_up():
    whole = graph_of(lambda: initializable(numbers(batch=5)))
    plan = Plan(ranks=3, devices_per_rank=1, batch_shares=(1, 1, 2))
    assert [len(drawn(passed(whole, plan, rank), 1)[0]) for rank in range(3)] == [3, 4, 8]


def test_a_one_shot_iterator_has_a_function_of_its_own():
    whole = graph_of(lambda: tf.data.make_one_shot_iterator(numbers().prefetch(1)).get_next(name="drawn"))
    result = passed(whole, UNEQUAL, 1)
    assert [len(r) for r in drawn(result, 4, initializer=None)] == [4, 6, 4, 6]
    assert len(result.library.function) == len(whole.library.function) + 1, "the old one may be used by others"


def test_other_iterators_and_equal_shares_stay():
    whole = graph_of(lambda: initializable(numbers()))
    assert with_marked_iterators(whole, Plan()) is whole
    marked = with_marked_iterators(whole, UNEQUAL)
    program = extract(whole, ["MakeIterator"], [], [])
    assert Rebatch().run(program, Task(UNEQUAL)) is program, "not marked"
    assert [n.name for n in marked.nodes.values() if n.info] == ["MakeIterator"]


def test_an_iterator_that_training_does_not_use_is_not_marked():
    def make():
        evaluation = tf.data.make_initializable_iterator(numbers())
        evaluation.get_next()
        return initializable(numbers())

    marked = with_marked_iterators(graph_of(make), UNEQUAL)
    assert [n.name for n in marked.nodes.values() if n.info] == ["MakeIterator_1"]


def test_a_process_that_draws_nothing_leaves_it():
    whole = graph_of(lambda: initializable(numbers()))
    plan = Plan(ranks=4, devices_per_rank=0, places=((0, 1), (2, 3)), batch_shares=(1, 3))
    assert "MakeIterator/epl_rebatch" not in passed(whole, plan, 1).nodes
    assert [len(r) for r in drawn(passed(whole, plan, 2), 1)] == [6]


def dequeued():
    queue = tf.FIFOQueue(4, [tf.float32], [[1]])
    return queue.dequeue_many(4)


REFUSED = {
    "fixed": (
        lambda: initializable(numbers().take(2).batch(1, drop_remainder=True)),
        "component 0 is fixed at 1; batch the dataset with drop_remainder=False",
    ),
    "samples": (lambda: tf.reshape(initializable(tf.data.Dataset.range(9)), [1, 1]), "component 0 has no first dimension"),
    "a queue": (dequeued, "it is drawn from 'fifo_queue' of type 'FIFOQueueV2'"),
    "no batches": (
        lambda: initializable(tf.data.Dataset.from_generator(lambda: iter(()), tf.float32, [None, 1])),
        "no batching of its dataset was found in the graph",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, text = REFUSED[case]
    with pytest.raises(ProgramError, match="cluster.batch_shares is '1,2,2,3', but the batches of '.*' can't be cut anew") as error:
        passed(graph_of(make), UNEQUAL, 0)
    assert text in str(error.value)
