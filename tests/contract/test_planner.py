import pytest
import tensorflow.compat.v1 as tf

import epl
from epl.parallel.planner import AutoStageGenerator
from epl.utils import constant
from tests.contract.models import data, dense


@pytest.mark.parametrize("stages, sizes", [(2, [23, 23]), (3, [16, 16, 14])])
def test_balance_op_num(gpus, stages, sizes):
    gpus(1)
    epl.init()
    with epl.replicate(1):
        x, _ = data()
        tf.reduce_mean(dense(dense(x, 16), 10))
    found = AutoStageGenerator(policy=constant.AUTO_STAGE_POLICY_BALANCE_OP_NUM, num_stages=stages).search()
    assert [len(ops) for ops in found] == sizes
    assert [op.name for ops in found for op in ops] == [op.name for op in tf.get_default_graph().get_operations()]


def test_unknown_policy():
    with pytest.raises(ValueError, match="policy"):
        AutoStageGenerator(policy="flops", num_stages=2)
    with pytest.raises(ValueError, match="num_stages"):
        AutoStageGenerator(num_stages=0)
