"""Data for pipelines of two stages: rows 89, 92, 94, 95, 99, 100, 102. Only processes with a first stage read."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, scalar
from tests.equivalence.test_cases_accumulation import SIZES, judge_uneven
from tests.equivalence.test_cases_input import until_end
from tests.equivalence.test_cases_stages import REPLICAS, STAGES
from tests.harness.context import variables
from tests.harness.parametrize import cases


def model(run, x):
    """y = v w x against 3x, with Momentum: (variables, loss, train, step)."""
    with run.stage(0):
        w = scalar("w", 1)
        h = w * x
    with run.stage(1):
        v = scalar("v", 0.5)
        loss = run.merge(tf.reduce_mean(tf.square(v * h - 3.0 * x)))
    step = tf.train.get_or_create_global_step()
    return [w, v], loss, tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, global_step=step), step


def dealt(run, batches):
    """What this process reads of the batches of all, which are dealt to the replicas in turn; the batches of a step at once when plain."""
    if run.plain:
        count = len(batches) - len(batches) % run.layout.batches
        return [np.concatenate(batches[at : at + run.layout.batches]) for at in range(0, count, run.layout.batches)]
    mine = run.layout.replicas_of(run.rank)
    return [batch for at in range(0, len(batches), run.layout.replicas) for batch in batches[at : at + run.layout.replicas][slice_of(mine)]]


def slice_of(numbers):
    return slice(numbers[0], numbers[-1] + 1) if numbers else slice(0, 0)


def joined(batches, width=()):
    return np.concatenate(batches) if batches else np.zeros((0,) + width, np.float32)


def uneven_batches(run, sizes, optimizer):
    """Row 89: a dataset whose batches have the given sizes: per step the loss, the gradients, their norm and the variables."""
    batches = run.layout.batches
    data = np.split(np.random.RandomState(3).randn(sum(SIZES[sizes]), 2).astype(np.float32), np.cumsum(SIZES[sizes])[:-1])
    steps = [data[at : at + batches] for at in range(0, len(data), batches)]
    mine = [np.concatenate(step) for step in steps] if run.plain else [step[number] for step in steps for number in run.layout.batches_of(run.rank)]
    with run.program():
        rows, counts = tf.constant(joined(mine, (2,))), np.array([len(batch) for batch in mine], np.int64)
        if sizes == "uneven":
            parts = tf.data.Dataset.from_tensor_slices((np.cumsum(counts) - counts, counts))
            dataset = parts.flat_map(lambda start, count: tf.data.Dataset.from_tensor_slices(rows[start : start + count]).batch(100))
        else:
            dataset = tf.data.Dataset.from_tensor_slices(rows).batch(len(mine[0]) if mine else 4)
        x = run.next_batch(dataset)
        with run.stage(0):
            w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
            h = tf.reduce_sum(w * x, 1)
        with run.stage(1):
            b = scalar("b", 0)
            loss = run.merge(tf.reduce_mean(tf.square(h + b - 3.0 * x[:, 0])))
        rule = tf.train.GradientDescentOptimizer(0.1) if optimizer == "sgd" else tf.train.AdamOptimizer(0.1)
        gradients = tf.gradients(loss, [w, b])
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        train = rule.apply_gradients(zip(clipped, [w, b]), tf.train.get_or_create_global_step())
        history = {"losses": [], "gradients": [], "norms": [], "variables": []}
        with run.session() as session:
            for _ in steps:
                value, found, size, _ = session.run([loss, gradients, norm, train])
                history["losses"].append([float(value)])
                history["gradients"].append(np.concatenate([np.ravel(one) for one in found]))
                history["norms"].append(float(size))
                history["variables"].append(np.concatenate([np.ravel(one) for one in session.run([w, b])]))
    return history


@cases(uneven_batches, "2x1-s2-m2", "4x1-s2", compare=True, sizes="last", optimizer="sgd")
def test_row_89_a_short_last_batch_weighs_its_samples(outcome):
    judge_uneven(outcome, "last")


@cases(uneven_batches, "2x1-s2-m2", "1x2-s2-m2", "4x1-s2-m2", "2x2-s2", compare=True, sizes="uneven", optimizer="adam")
def test_row_89_every_batch_weighs_its_samples(outcome):
    judge_uneven(outcome, "uneven")


@cases(uneven_batches, "2x1-s2-m2", compare=True, sizes="full", optimizer="sgd")
def test_row_89_the_reported_loss_is_the_mean_over_micro_batches(outcome):
    judge_uneven(outcome, "full")


def uneven(run, monitored=False):
    """Row 92: five batches for two per step: some replicas read three, some two."""
    mine = dealt(run, [np.float32([number + 1, -number]) for number in range(5)])
    with run.program():
        x = run.next_batch(tf.data.Dataset.from_tensor_slices(joined(mine)).batch(len(mine[0]) if mine else 2))
        trained, loss, train, step = model(run, x)
        if not monitored:
            with run.session() as session:
                end = until_end(session, [loss, train])[1]
                return {"end": end, "values": variables(session)}
        seen = []
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            while not session.should_stop():
                seen.append(session.run([train, trained, step])[2])
        return {"end": "should_stop", "values": {"runs": len(seen)}}


@cases(uneven, "2x1-s2-m2", "1x2-s2-m2", *REPLICAS, compare=True)
def test_row_92_all_ranks_end_together(outcome):
    for rank in outcome.ranks:
        assert rank["end"] == "OutOfRangeError" and rank["values"]["global_step"] == 2
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, err_msg=name)


@cases(uneven, "2x1-s2-m2", "4x1-s2", monitored=True)
def test_row_92_a_monitored_session_ends_cleanly(outcome):
    for rank in outcome.ranks:
        assert rank == {"end": "should_stop", "values": {"runs": 2}}


def sharded(run):
    """Row 94: the script divides the data itself, by replicas as the documentation says."""
    with run.program():
        first = run.layout.replicas_of(run.rank)
        readers = sum(bool(run.layout.replicas_of(rank)) for rank in range(run.ranks))
        records = tf.data.Dataset.range(8).shard(readers, first[0] * readers // run.layout.replicas if first else 0)
        number = run.next_batch(records.batch(1))
        _, _, train, _ = model(run, tf.cast(number, tf.float32))
        run.merge(number, "GLOBAL_CONCAT_OBJECTS")
        with run.session() as session:
            return [session.run([number, train])[0].tolist() for _ in range(8 // run.layout.batches)]


@cases(sharded, "2x1-s2", "2x1-s2-m2", *REPLICAS)
def test_row_94_data_is_not_divided_twice(outcome):
    for rank in outcome.ranks:
        assert sorted(np.ravel(rank)) == list(range(8))


def short_batch(run, samples):
    """Row 95: the last of the batches of four samples is shorter."""
    numbers = np.arange(1, samples + 1, dtype=np.float32)
    if run.plain:
        mine = [numbers[: samples - (samples % 8 if 0 < samples % 8 < 5 else 0)]]
    else:
        mine = dealt(run, [numbers[at : at + 4] for at in range(0, samples, 4)])
    with run.program():
        x = run.next_batch(tf.data.Dataset.from_tensor_slices(joined(mine)).batch(8 if run.plain else 4))
        trained, loss, train, step = model(run, x)
        with run.session() as session:
            end = until_end(session, [loss, train])[1]
            return {"end": end, "values": [float(one) for one in session.run(trained)], "step": int(session.run(step))}


@cases(short_batch, "2x1-s2-m2", "4x1-s2", compare=True, samples=5)
def test_row_95_a_short_batch_weighs_its_samples(outcome):
    judge_short(outcome)


@cases(short_batch, "2x1-s2-m2", "2x2-s2", compare=True, samples=10)
def test_row_95_no_step_with_an_empty_micro_batch(outcome):
    judge_short(outcome)


def judge_short(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 1 and rank["end"] == "OutOfRangeError"
        assert rank["values"] == pytest.approx(outcome.plain["values"], rel=1e-5)


def fixed_size(run, source):
    """Row 99: the script reshapes to the batch size that it knows, in both stages."""
    size = 4 * run.layout.batches if run.plain else 4
    steps = [{"x": np.random.RandomState(step).randn(4 * run.layout.batches, 6).astype(np.float32)} for step in range(3)]
    with run.program():
        x = tf.placeholder(tf.float32, [None, 6]) if source == "feed" else run.next_batch(run.dataset(steps))["x"]
        with run.stage(0):
            h = tf.layers.dense(tf.reshape(x, [size, 2, 3]), 2, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="first")
        with run.stage(1):
            h = tf.layers.dense(tf.reshape(h, [size, 4]), 2, kernel_initializer=tf.glorot_uniform_initializer(seed=2), name="second")
            loss = run.merge(tf.reduce_mean(tf.square(h + tf.zeros([size, 2]) - 1.0)))
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: step["x"]} if source == "feed" else {} for step in steps])
            return dict(variables(session), losses=losses)


@cases(fixed_size, *STAGES, "4x1-s2", compare=True, source="feed")
def test_row_99_fixed_batch_size_with_feeds(outcome):
    judge_variables(outcome)


@cases(fixed_size, "2x1-s2-m2", "4x1-s2", compare=True, source="dataset")
def test_row_99_fixed_batch_size_with_a_dataset(outcome):
    judge_variables(outcome)


def initialised(run, how):
    """Row 100: an iterator over data that may be fed to its initializer, and the ways to run that initializer."""
    stream = np.concatenate([X, X + 1])
    with run.program():
        data = tf.placeholder(tf.float32, [None]) if how in ("scaffold", "manual") else tf.constant(stream)
        readers, mine = run.layout.replicas // max(1, len(run.layout.replicas_of(0))), run.layout.replicas_of(run.rank)
        dataset = tf.data.Dataset.from_tensor_slices(data)
        if not run.plain and readers > 1:
            dataset = dataset.shard(readers, mine[0] if mine else 0)
        iterator = tf.data.make_initializable_iterator(dataset.batch(len(X) if run.plain else len(X) // run.layout.batches))
        trained, _, train, _ = model(run, iterator.get_next())
        scaffold = None
        if how == "tables":
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        elif how == "scaffold":
            init = tf.group(tf.global_variables_initializer(), iterator.initializer)
            scaffold = tf.train.Scaffold(init_op=init, init_feed_dict={data: stream})
        elif how == "local_init":
            scaffold = tf.train.Scaffold(local_init_op=tf.group(tf.local_variables_initializer(), iterator.initializer))
        if how == "manual":
            session = tf.Session()
            session.run(tf.global_variables_initializer())
            session.run(iterator.initializer, {data: stream})
        else:
            session = tf.train.MonitoredTrainingSession(scaffold=scaffold, log_step_count_steps=None)
        with session:
            for _ in range(2):
                session.run(train)
                found = [float(one) for one in session.run(trained)]
            return found


INITIALISED = ("2x1-s2-m2", "1x2-s2-m2", "4x1-s2")


@cases(initialised, *INITIALISED, compare=True, how="tables")
def test_row_100_table_initializers(outcome):
    judge_initialised(outcome)


@cases(initialised, *INITIALISED, compare=True, how="scaffold")
def test_row_100_scaffold_with_init_feed_dict(outcome):
    judge_initialised(outcome)


@cases(initialised, *INITIALISED, compare=True, how="local_init")
def test_row_100_local_init_op(outcome):
    judge_initialised(outcome)


@cases(initialised, *INITIALISED, compare=True, how="manual")
def test_row_100_initializer_with_a_feed(outcome):
    judge_initialised(outcome)


def judge_initialised(outcome):
    for rank in outcome.ranks:
        assert rank == pytest.approx(outcome.plain, rel=1e-5)


def python_functions(run):
    """Row 102: Python in the dataset and in both stages, and strings on the way."""
    steps = [{"text": np.array(["%d" % number for number in range(8 * step, 8 * step + 8)])} for step in range(3)]

    def parse(row):
        number = tf.py_function(lambda text: float(text.numpy().decode()) / 10.0, [row["text"]], tf.float32)
        number.set_shape([])
        return number, tf.strings.join([row["text"], "!"])

    def doubled(value):
        result = tf.py_func(lambda given: 2 * given, [value], tf.float32)
        result.set_shape([None])
        return result

    with run.program():
        x, text = run.next_batch(run.dataset(steps).unbatch().map(parse).batch(8 if run.plain else 8 // run.layout.batches))
        with run.stage(0):
            length = tf.cast(tf.strings.length(text), tf.float32)
            y = scalar("w", 0) * doubled(x)
        with run.stage(1):
            loss = run.merge(tf.reduce_mean(tf.square(y + scalar("v", 1) * doubled(x) - length)))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{}] * 3)
            return dict(variables(session), losses=np.float32(losses))


@cases(python_functions, *STAGES, "4x1-s2", compare=True)
def test_row_102_python_functions_and_strings(outcome):
    judge_variables(outcome)
