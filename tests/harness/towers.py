"""Data parallelism written by hand in plain TensorFlow: shows that the models meet the tolerances at all."""

from typing import Any, Dict

import numpy as np
import tensorflow.compat.v1 as tf

from tests.harness import data
from tests.harness.context import Run, variables
from tests.harness.models import MODELS, trainable
from tests.harness.optimizers import train_op
from tests.harness.runner import GLOBAL_BATCH, STEPS


def run_towers(run: Run, model: str, optimizer: str, towers: int) -> Dict[str, Any]:
    """Train with `towers` copies of the model on parts of the batch that share the variables, on their mean loss."""
    spec = MODELS[model]
    size = GLOBAL_BATCH // towers
    with run.program(control_flow_v2=spec.control_flow_v2):
        feeds = {name: tf.placeholder(field.dtype, (None,) + field.shape, name) for name, field in spec.fields.items()}
        copies = []
        for tower in range(towers):
            del tf.get_collection_ref(tf.GraphKeys.LOSSES)[:]
            with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
                copies.append(spec.forward({name: feed[tower * size : (tower + 1) * size] for name, feed in feeds.items()}).parts)
        losses, ops = [], []
        for parts in zip(*copies):
            losses.append(tf.add_n([part.loss for part in parts]) / towers)
            ops.append(train_op(optimizer, losses[-1], trainable(parts[0].scope), count=len(losses) == len(copies[0])))
        history = []
        with run.session() as session:
            for step in range(STEPS):
                history.append([])
                for number, (loss, op) in enumerate(zip(losses, ops)):
                    batch = data.global_batch(spec.fields, step * len(losses) + number, GLOBAL_BATCH)
                    history[-1].append([session.run([loss, op], {feeds[name]: batch[name] for name in feeds})[0]])
            final = variables(session)
    return {"losses": np.array(history), "variables": final}
