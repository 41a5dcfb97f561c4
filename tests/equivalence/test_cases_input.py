"""Data input: rows 92 to 95, 98 to 102."""

import contextlib
import logging
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.equivalence.scripts import X, judge_variables, raises, scalar
from tests.harness.context import variables
from tests.harness.parametrize import cases


def model(run, x, start=0.0):
    """y = 3x with Momentum on the inputs x: (w, loss, train, step)."""
    w = scalar("w", start)
    loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
    run.merge(loss)
    step = tf.train.get_or_create_global_step()
    return w, loss, tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, global_step=step), step


@contextlib.contextmanager
def logged():
    """The lines that are written to the log of `absl`, at level info too."""
    lines, logger, handler = [], logging.getLogger("absl"), logging.Handler()
    handler.emit = lambda record: lines.append("%s: %s" % (record.levelname, record.getMessage()))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def judge_log(lines, *expected):
    """Each of the texts is in one line of level info."""
    for text in expected:
        assert sum(text in line for line in lines if line.startswith("INFO: ")) == 1, (text, lines)


def until_end(session, fetches, limit=20):
    """Run until the data ends: (number of runs, type of the error)."""
    for count in range(limit):
        try:
            session.run(fetches)
        except tf.errors.OutOfRangeError:
            return count, "OutOfRangeError"
    return limit, "no end"


def my_batches(run, batches):
    """The batches that this process reads when they are dealt to the ranks in turn; pairs of them when plain."""
    if run.plain:
        count = len(batches) - len(batches) % run.layout.batches
        return [np.concatenate(batches[at : at + run.layout.batches]) for at in range(0, count, run.layout.batches)]
    return batches[run.rank :: run.ranks]


def uneven(run, monitored=False):
    """Five batches for two per step: some read three, some two."""
    batches = [np.float32([number + 1, -number]) for number in range(5)]
    mine = my_batches(run, batches)
    with run.program(), logged() as lines:
        x = run.next_batch(tf.data.Dataset.from_tensor_slices(np.concatenate(mine)).batch(len(mine[0])))
        w, loss, train, step = model(run, x)
        if not monitored:
            with run.session() as session:
                ends = [until_end(session, [loss, train])[1] for _ in range(2)]
                values = {name: value for name, value in variables(session).items() if "accum" not in name}
                return {"end": ends[-1], "values": values, "lines": lines}
        seen = []
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            while not session.should_stop():
                seen.append(session.run([train, w, step])[2])
        return {"end": "should_stop", "values": {"runs": len(seen)}}


@cases(uneven, "2x1", "1x2", "1x1-m2run", "1x1-m2", compare=True)
def test_row_92_all_ranks_end_together(outcome):
    for rank in outcome.ranks:
        assert rank["end"] == "OutOfRangeError"
        assert rank["values"]["global_step"] == 2
        for name, value in outcome.plain["values"].items():
            np.testing.assert_allclose(rank["values"][name], value, rtol=1e-5, err_msg=name)
    first, last = outcome.ranks[0]["lines"], outcome.ranks[-1]["lines"]
    if len(outcome.ranks) == 2:
        judge_log(first, "Not rank 0, but another rank has come to the end of its input, as its own log says")
        judge_log(last, "The input of rank 1 has ended, and with it the epoch of all 2 ranks; nothing of this step is applied")
        assert not [line for line in first if "The input of rank" in line] + [line for line in last if "Not rank" in line]
    else:
        judge_log(first, "The input of rank 0 has ended; nothing of this step is applied")


@cases(uneven, "2x1", "1x2", monitored=True)
def test_row_92_a_monitored_session_ends_cleanly(outcome):
    for rank in outcome.ranks:
        assert rank == {"end": "should_stop", "values": {"runs": 2}}


def sliced(run, files, config=None):
    """The lines of text files that each rank reads with `io.slicing`, until the end of its data."""
    names = [run.path("part%d.txt" % number) for number in range(files)]
    for number, name in enumerate(names):
        own = "%s.%d" % (name, run.rank)
        with open(own, "w") as file:
            file.write("".join("%d\n" % (10 * number + line) for line in range(4)))
        os.replace(own, name)
    with run.program(dict({"io.slicing": True}, **(config or {}))), logged() as lines:
        with raises() as caught:
            line = run.next_batch(tf.data.TextLineDataset(names).batch(2))
            x = tf.strings.to_number(line)
            _, _, train, _ = model(run, x)
            read = []
            with run.session() as session:
                for _ in range(20):
                    try:
                        read += session.run([x, train])[0].tolist()
                    except tf.errors.OutOfRangeError:
                        break
            return {"read": read, "lines": lines}
    return {"error": caught[0]}


@cases(sliced, "2x1", files=4)
def test_row_93_files_are_dealt_to_ranks(outcome):
    assert sorted(outcome.ranks[0]["read"]) == [0, 1, 2, 3, 20, 21, 22, 23]
    assert sorted(outcome.ranks[1]["read"]) == [10, 11, 12, 13, 30, 31, 32, 33]
    judge_log(outcome.ranks[0]["lines"], "io.slicing has dealt the input files to the 2 processes: the script must not divide these files again")
    assert not [line for rank in outcome.ranks for line in rank["lines"] if line.startswith("WARNING")]


@cases(sliced, "2x1", files=1)
def test_row_93_fewer_files_than_ranks(outcome):
    for rank in outcome.ranks:
        assert sorted(rank["read"]) == [0, 1, 2, 3]
        (warning,) = (line for line in rank["lines"] if line.startswith("WARNING"))
        for text in ("1 files do not fill rounds of 2", "every worker reads all of them", "io.unbalanced_io_slicing", "io.drop_last_files"):
            assert text in warning


def sharded(run):
    """The script divides the data itself."""
    with run.program(), logged() as lines:
        number = run.next_batch(tf.data.Dataset.range(8).shard(run.ranks, run.rank).batch(1))
        _, _, train, _ = model(run, tf.cast(number, tf.float32))
        with run.session() as session:
            return {"read": [session.run([number, train])[0].tolist() for _ in range(8 // run.ranks)], "lines": lines}


@cases(sharded, "2x1", "4x1")
def test_row_94_data_is_not_divided_twice(outcome):
    assert sorted(np.ravel([rank["read"] for rank in outcome.ranks])) == list(range(8))
    judge_log(outcome.ranks[0]["lines"],
              "Each of %d replicas draws its own batches from the input of its process. io.slicing is off" % len(outcome.ranks),
              "read the same data unless the script divides it, as dataset.shard(cluster.worker_num, cluster.worker_index) does")  # fmt: skip
    assert not [line for rank in outcome.ranks[1:] for line in rank["lines"] if "draws its own batches" in line]


def short_batch(run, samples):
    """The last of the batches of four samples is shorter."""
    numbers = np.arange(1, samples + 1, dtype=np.float32)
    if run.plain:
        mine, size = numbers[: samples - (samples % 8 if 0 < samples % 8 < 5 else 0)], 8
    else:
        mine, size = np.concatenate([numbers[at : at + 4] for at in range(0, samples, 4)][run.rank :: run.ranks]), 4
    with run.program():
        x = run.next_batch(tf.data.Dataset.from_tensor_slices(mine).batch(size))
        w, loss, train, _ = model(run, x)
        with run.session() as session:
            end = until_end(session, [loss, train])[1]
            return {"end": end, "w": float(session.run(w)), "step": int(session.run(tf.train.get_global_step()))}


@cases(short_batch, "2x1", "1x2", "1x1-m2", "1x1-m2run", compare=True, samples=5)
def test_row_95_a_short_batch_weighs_its_samples(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 1 and rank["end"] == "OutOfRangeError"
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


@cases(short_batch, "2x1", "1x2", "1x1-m2run", compare=True, samples=10)
def test_row_95_no_step_with_an_empty_replica(outcome):
    for rank in outcome.ranks:
        assert rank["step"] == 1 and rank["end"] == "OutOfRangeError"
        assert rank["w"] == pytest.approx(outcome.plain["w"], rel=1e-5)


def evaluation(run):
    """Train on batches of four, evaluate the same graph on seven samples."""
    with run.program():
        x = tf.placeholder(tf.float32, [None])
        w = scalar("w", 1)
        loss = tf.reduce_mean(tf.square(w * x - 3.0 * x))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            run.step(session, train, {x: np.tile(X, run.layout.batches)})
            return float(session.run(loss, {x: np.arange(7, dtype=np.float32)}))


@cases(evaluation, "1x1", "2x1", "1x1-m2", "1x1-m2run", "2x1-m2run")
def test_row_98_evaluation_has_its_own_batch(outcome):
    w = 1 + 0.01 * 4 * 7.5
    for rank in outcome.ranks:
        assert rank == pytest.approx((w - 3) ** 2 * np.mean(np.arange(7) ** 2), rel=1e-5)


def fixed_size(run, source):
    """The script reshapes to the batch size that it knows."""
    size = 4 * run.layout.batches if run.plain else 4
    steps = [{"x": np.random.RandomState(step).randn(4 * run.layout.batches, 6).astype(np.float32)} for step in range(3)]
    with run.program():
        x = tf.placeholder(tf.float32, [None, 6]) if source == "feed" else run.next_batch(run.dataset(steps))["x"]
        h = tf.layers.dense(tf.reshape(x, [size, 2, 3]), 2, kernel_initializer=tf.glorot_uniform_initializer(seed=1), name="dense")
        state = tf.zeros([size, 2, 2])
        loss = tf.reduce_mean(tf.square(h + state - 1.0))
        run.merge(loss)
        train = tf.train.AdamOptimizer(0.01).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{x: step["x"]} if source == "feed" else {} for step in steps])
            return dict(variables(session), losses=losses)


@cases(fixed_size, "1x2", "2x1", "1x1-m2run", "2x2-m2", compare=True, source="feed")
def test_row_99_fixed_batch_size_with_feeds(outcome):
    judge_variables(outcome)


@cases(fixed_size, "1x2", "2x1", "1x1-m2run", "2x2-m2", compare=True, source="dataset")
def test_row_99_fixed_batch_size_with_a_dataset(outcome):
    judge_variables(outcome)


def initialised(run, how):
    """An iterator over data that is fed to its initializer, and the ways to run that initializer."""
    steps = [{"x": X}, {"x": X + 1}]
    stream = np.concatenate([step["x"] for step in steps])
    with run.program():
        data = tf.placeholder(tf.float32, [None]) if how in ("scaffold", "manual") else tf.constant(stream)
        dataset = tf.data.Dataset.from_tensor_slices(data).shard(run.ranks, run.rank)
        iterator = tf.data.make_initializable_iterator(dataset.batch(len(X) if run.plain else len(X) // run.layout.batches))
        w, _, train, _ = model(run, iterator.get_next())
        scaffold = None
        if how == "tables":
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        elif how == "scaffold":
            init = tf.group(tf.global_variables_initializer(), iterator.initializer)
            scaffold = tf.train.Scaffold(init_op=init, init_feed_dict={data: stream})
        elif how == "local_init":
            scaffold = tf.train.Scaffold(local_init_op=tf.group(tf.local_variables_initializer(), iterator.initializer))
        if how == "manual":
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(iterator.initializer, {data: stream})
                for _ in range(2):
                    run.step(session, train)
                return float(session.run(w))
        with tf.train.MonitoredTrainingSession(scaffold=scaffold, log_step_count_steps=None) as session:
            found = []
            for _ in range(2 * run.runs):
                session.run(train)
                found.append(float(session.run(w)))
            return found[-1]


@cases(initialised, "1x2", "2x1", "1x1-m2", compare=True, how="tables")
def test_row_100_table_initializers(outcome):
    assert outcome.ranks == pytest.approx([outcome.plain] * len(outcome.ranks), rel=1e-5)


@cases(initialised, "1x2", "2x1", "1x1-m2", compare=True, how="scaffold")
def test_row_100_scaffold_with_init_feed_dict(outcome):
    assert outcome.ranks == pytest.approx([outcome.plain] * len(outcome.ranks), rel=1e-5)


@cases(initialised, "1x2", "2x1", "1x1-m2", compare=True, how="local_init")
def test_row_100_local_init_op(outcome):
    assert outcome.ranks == pytest.approx([outcome.plain] * len(outcome.ranks), rel=1e-5)


@cases(initialised, "1x2", "2x1", "1x1-m2", "1x1-m2run", compare=True, how="manual")
def test_row_100_initializer_with_a_feed(outcome):
    assert outcome.ranks == pytest.approx([outcome.plain] * len(outcome.ranks), rel=1e-5)


HEIGHTS = ((3, 5), (1, 4), (6, 2))


def varying_height(run):
    """One sample of another height per rank and step."""
    with run.program():
        x = tf.placeholder(tf.float32, [1, None, 2])
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * w, [1, 2]) - 1.0))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with run.session() as session:
            for step, heights in enumerate(HEIGHTS):
                session.run([loss, train], {x: sample(step, heights[run.rank])})
            return session.run(w)


def sample(step, height):
    return np.random.RandomState(10 * step + height).randn(1, height, 2).astype(np.float32)


@cases(varying_height, "2x1")
def test_row_101_samples_of_any_shape(outcome):
    w = np.ones(2)
    for step, heights in enumerate(HEIGHTS):
        sums = [sample(step, height)[0].sum(0) for height in heights]
        w = w - 0.1 * np.mean([2 * (np.dot(one, w) - 1) * one for one in sums], 0)
    for rank in outcome.ranks:
        np.testing.assert_allclose(rank, w, rtol=1e-5)


def python_functions(run):
    """Python in the dataset and in the model, and strings on the way."""
    steps = [{"text": np.array(["%d" % number for number in range(8 * step, 8 * step + 8)])} for step in range(3)]

    def parse(row):
        number = tf.py_function(lambda text: float(text.numpy().decode()) / 10.0, [row["text"]], tf.float32)
        number.set_shape([])
        return number, tf.strings.join([row["text"], "!"])

    with run.program():
        dataset = run.dataset(steps).unbatch().map(parse).batch(8 if run.plain else 8 // run.layout.batches)
        x, text = run.next_batch(dataset)
        doubled = tf.py_func(lambda value: 2 * value, [x], tf.float32)
        doubled.set_shape([None])
        length = tf.cast(tf.strings.length(text), tf.float32)
        w = scalar("w", 0)
        loss = tf.reduce_mean(tf.square(w * doubled - length))
        run.merge(loss)
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        with run.session() as session:
            losses = run.train(session, loss, train, [{}] * 3)
            return {"w": np.float32(session.run(w)), "losses": np.float32(losses)}


@cases(python_functions, "1x2", "2x1", "1x1-m2run", compare=True)
def test_row_102_python_functions_and_strings(outcome):
    judge_variables(outcome)


def own_data(run, how):
    """Each process gets its samples neither from a feed nor from a dataset."""
    batches = [np.float32([4 * step + 1, -1, 2, step]) for step in range(3)]
    mine = [np.split(run.local(batch, part), run.layout.devices if not run.plain else 1) for batch in batches for part in range(run.runs)]
    queue = [batch for step in mine for batch in step]
    with run.program():
        if how == "python":
            x = tf.py_func(lambda: queue.pop(0), [], tf.float32, stateful=True)
            x.set_shape([None])
        elif how == "constant":
            x = tf.constant(run.local(X))
        else:
            fifo = tf.FIFOQueue(10, tf.float32, name="samples")
            filled = fifo.enqueue_many(tf.constant(np.stack(queue)))
            x = fifo.dequeue()
            x.set_shape([None])
        w, loss, train, _ = model(run, x)
        with run.session() as session:
            if how == "queue":
                session.run(filled)
            losses = run.train(session, loss, train, [{}] * 3)
            return {"w": np.float32(session.run(w)), "losses": np.float32(losses)}


@cases(own_data, "1x2", "2x1", "2x1-m2", compare=True, how="python")
def test_row_102_samples_from_python(outcome):
    judge_variables(outcome)


@cases(own_data, "1x2", "2x1", "2x1-m2", compare=True, how="queue")
def test_row_92_samples_from_a_queue(outcome):
    judge_variables(outcome)


@cases(own_data, "2x1", "4x1", compare=True, how="constant")
def test_row_94_samples_in_the_graph(outcome):
    judge_variables(outcome)
