"""Variables: their handles, reads, assignments and updates. A handle counts as the value behind it."""

from typing import Iterable

from epl.planner.sharding.op import Axis, Op, Saying, Special, rule, same_dims
from epl.planner.sharding.spec import R, S


@rule("VarHandleOp", "VariableV2", "Variable")
def variable(op: Op) -> Iterable[Saying]:
    for dim in range(op.outputs[0].rank):
        yield Axis((), (dim,))


@rule("ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized")
def read(op: Op) -> Iterable[Saying]:
    if op.type == "ReadVariableOp":
        yield from same_dims(op, op.inputs[0].rank)
    else:
        for dim in range(op.inputs[0].rank):
            yield Axis((dim,), (None,))


@rule(
    "Assign", "AssignAdd", "AssignSub", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"
)  # fmt: skip
def assign(op: Op) -> Iterable[Saying]:
    yield from same_dims(op, op.inputs[0].rank)


DENSE_UPDATES = tuple(
    prefix + name
    for prefix in ("Apply", "ResourceApply")
    for name in (
        "AdaMax Adadelta Adagrad AdagradDA AdagradV2 Adam AddSign CenteredRMSProp Ftrl FtrlV2 GradientDescent Momentum PowerSign "
        "ProximalAdagrad ProximalGradientDescent RMSProp KerasMomentum AdamWithAmsgrad"
    ).split()
)
SPARSE_UPDATES = tuple(
    prefix + name
    for prefix in ("SparseApply", "ResourceSparseApply")
    for name in (
        "Adadelta Adagrad AdagradDA AdagradV2 CenteredRMSProp Ftrl FtrlV2 Momentum ProximalAdagrad ProximalGradientDescent RMSProp KerasMomentum"
    ).split()
)
SCATTERS = tuple(prefix + name for prefix in ("Scatter", "ResourceScatter") for name in "Update Add Sub Mul Div Min Max".split())


@rule(*DENSE_UPDATES)
def update(op: Op) -> Iterable[Saying]:
    """The variable, its slots and the gradient have one shape and are divided alike; rates are whole."""
    shape = op.inputs[0].shape
    for dim in range(op.inputs[0].rank):
        at = tuple(dim if t.shape == shape else None for t in op.inputs)
        yield Axis(at, (dim,) * len(op.outputs))


@rule(*SPARSE_UPDATES)
def sparse_update(op: Op) -> Iterable[Saying]:
    """The last two inputs but for `ProximalAdagrad` and the like are rows and their indices: columns are mapped, rows picked."""
    shape = op.inputs[0].shape
    rows = [i for i, t in enumerate(op.inputs) if t.rank == op.inputs[0].rank and t.shape != shape]
    whole = [i for i, t in enumerate(op.inputs) if t.shape == shape]
    if len(rows) != 1 or shape is None:
        return
    for dim in range(1, op.inputs[0].rank):
        at = tuple(dim if i in rows or i in whole else None for i in range(len(op.inputs)))
        yield Axis(at, (dim,) * len(op.outputs))
    yield Special(tuple(S(0) if i in whole else R for i in range(len(op.inputs))), (S(0),) * len(op.outputs), "sparse_update")


@rule(*SCATTERS)
def scatter(op: Op) -> Iterable[Saying]:
    """Variable, indices, updates."""
    skipped = op.inputs[2].rank - op.inputs[0].rank
    for dim in range(1, op.inputs[0].rank):
        yield Axis((dim, None, dim + skipped), (dim,) * len(op.outputs))
    yield Special((S(0), R, R), (S(0),) * len(op.outputs), "sparse_update")
