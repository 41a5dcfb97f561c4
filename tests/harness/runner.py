"""One case of the matrix: trains a model and tells losses, outputs and variables; compares two such results."""

import contextlib
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from tests.harness import data
from tests.harness.context import Run, variables
from tests.harness.layouts import Layout
from tests.harness.models import trainable
from tests.harness.optimizers import train_op
from tests.harness.staged import STAGED

STEPS = 20
GLOBAL_BATCH = 16
KEPT_STEPS = (0, 1, STEPS - 1)
RTOL, ATOL = 1e-5, 1e-6


class Case(NamedTuple):
    """A training run of the matrix.

    input:     feed | dataset | uneven (a dataset whose last batch is smaller)
    annotate:  default | scope | none, see `Run.program`; with stages: scope | inside (inputs are in the first stage)
    session:   session | monitored
    variables: resource | ref; the plain reference always uses resource variables, because
               plain TensorFlow races with reference variables
    merged:    losses and outputs are merged over all replicas (always so with several local replicas)
    schedule:  of the pipeline; "" leaves it to EPL
    rubbish:   ranks without a first stage are fed what must not be used
    last:      rows of the last global batch
    options:   of EPL, beside those of the layout
    """

    model: str
    optimizer: str
    layout: Layout
    input: str = "feed"
    annotate: str = "default"
    session: str = "session"
    variables: str = "resource"
    merged: bool = True
    seed: int = 0
    schedule: str = ""
    rubbish: bool = False
    last: int = GLOBAL_BATCH
    options: Tuple[Tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.model, self.optimizer, self.layout.name, self.input]
        parts += [value for value, usual in zip(self[4:7], ("default", "session", "resource")) if value != usual]
        parts += ["local"] if not self.merged else []
        parts += ["seed%d" % self.seed] if self.seed else []
        parts += [self.schedule] if self.schedule else []
        parts += ["rubbish"] if self.rubbish else []
        parts += ["%s=%s" % option for option in self.options]
        return "-".join(parts)

    @property
    def reference(self) -> "Case":
        """The plain case with the same result, or the data-parallel one; equal for all cases that share it."""
        if self.is_per_batch:
            return Case(self.model, self.optimizer, self.layout.data_parallel, self.input, seed=self.seed, last=self.last)
        return Case(self.model, self.optimizer, Layout(), seed=self.seed, last=self.last)

    @property
    def is_per_batch(self) -> bool:
        """Whether the result depends on how the global batch is divided, so that the reference is no plain case."""
        return not STAGED[self.model].alike and self.layout.batches > 1


class Built(NamedTuple):
    feeds: Dict[str, tf.Tensor]
    losses: List[tf.Tensor]
    train_ops: List[tf.Operation]
    outputs: Dict[str, tf.Tensor]


def build(run: Run, case: Case, batches: List[data.Arrays]) -> Built:
    """The user's script up to the session."""
    model = STAGED[case.model]
    with run.stage(0) if case.annotate == "inside" else contextlib.nullcontext():
        if case.input == "feed":
            inputs = {name: tf.placeholder(field.dtype, (None,) + field.shape, name) for name, field in model.fields.items()}
            feeds = inputs
        else:
            inputs, feeds = run.next_batch(run.dataset(batches, GLOBAL_BATCH - case.last)), {}
    with run.scope():
        parts, outputs = model.forward(inputs)
    ops = []
    racy = not run.plain and case.variables == "resource"
    for part in parts:
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            ops.append(train_op(case.optimizer, part.loss, trainable(part.scope), count=part is parts[-1], racy=racy))
    if case.merged:
        for part in parts:
            run.merge(part.loss)
        for output in outputs.values():
            run.merge(output, "GLOBAL_CONCAT_OBJECTS")
    return Built(feeds, [part.loss for part in parts], ops, outputs)


@contextlib.contextmanager
def open_session(run: Run, case: Case):
    if case.session == "monitored":
        with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
            yield session
    else:
        with run.session() as session:
            yield session


def run_case(run: Run, **fields: Any) -> Dict[str, Any]:
    """Train: losses [step, loss, run], outputs of some steps {name: [step, loss, run]}, variables {name: array}."""
    case = Case(**dict(fields, layout=run.layout))
    model = STAGED[case.model]
    batches = [data.global_batch(model.fields, number, GLOBAL_BATCH, case.seed) for number in range(STEPS * model.num_losses)]
    if case.input == "feed" and case.last < GLOBAL_BATCH:
        batches[-1] = {name: array[: case.last] for name, array in batches[-1].items()}
    resource = run.plain or case.variables == "resource"
    config = dict(case.options, **({"pipeline.strategy": case.schedule} if case.schedule else {}))
    with run.program(config, annotate=case.annotate, resource=resource, control_flow_v2=model.control_flow_v2):
        built = build(run, case, batches)
        values: List[List[Any]] = []
        with open_session(run, case) as session:
            for step in range(STEPS):
                values.append([])
                for number, (loss, op) in enumerate(zip(built.losses, built.train_ops)):
                    batch = batches[step * len(built.losses) + number]
                    feeds = {tensor: batch[name] for name, tensor in built.feeds.items()}
                    values[-1].append(run.step(session, [loss, op, built.outputs], feeds, case.rubbish))
            final = variables(session)
    losses = np.array([[[one[0] for one in runs] for runs in step] for step in values])
    outputs = {name: [[[one[2][name] for one in runs] for runs in values[step]] for step in KEPT_STEPS] for name in built.outputs}
    return {"losses": losses, "outputs": outputs, "variables": final}


def check(case: Case, plain: Dict[str, Any], ranks: List[Dict[str, Any]]) -> None:
    """Raise AssertionError unless training under EPL gave what plain training gives."""
    close(np.mean([rank["losses"].mean(-1) for rank in ranks], 0), plain["losses"][:, :, 0], "mean loss of all ranks")
    for number, rank in enumerate(ranks):
        if case.merged:
            close(rank["losses"].mean(-1), plain["losses"][:, :, 0], "loss on rank %d" % number)
        _check_outputs(case, plain, rank, number)
        _check_variables(case, plain["variables"], rank["variables"], number)


def close(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=RTOL, atol=ATOL, err_msg=what)


def _check_outputs(case: Case, plain: Dict[str, Any], rank: Dict[str, Any], number: int) -> None:
    """Outputs hold the rows that were fed, in order; a dataset gives no promise about who draws which batch."""
    if case.input != "feed":
        return
    for name, steps in plain["outputs"].items():
        for index, losses in enumerate(steps):
            step = KEPT_STEPS[index]
            for loss, (expected,) in enumerate(losses):
                for run, actual in enumerate(rank["outputs"][name][index][loss]):
                    batches = case.layout.batches_of_run(run) if case.merged else case.layout.seen_by(number, run)
                    rows = data.pick(expected, batches, case.layout.batches)
                    assert actual.shape == rows.shape, "output %s of step %d on rank %d has shape %s, not %s" % (
                        name, step, number, actual.shape, rows.shape)  # fmt: skip
                    close(actual, rows, "output %s of step %d, loss %d, run %d on rank %d" % (name, step, loss, run, number))


def _check_variables(case: Case, expected: Dict[str, np.ndarray], actual: Dict[str, np.ndarray], number: int) -> None:
    extra = {name for name in set(actual) - set(expected) if not (case.layout.runs > 1 and "accum" in name)}
    missing = set(expected) - set(actual)
    assert not extra and not missing, "variables of rank %d: missing %s, more than expected %s" % (number, sorted(missing), sorted(extra))
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and actual[name].shape == value.shape, "%s on rank %d" % (name, number)
        close(actual[name], value, "variable %s on rank %d" % (name, number))
