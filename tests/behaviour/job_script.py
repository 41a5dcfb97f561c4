"""A rank of the jobs in test_job_faults and test_launcher: connects, trains three steps, then does what it is told.

Usage: job_script.py MODE; the fault, if any, happens on rank 1.
"""

import os
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf  # noqa: E402

tf.compat.v1.disable_eager_execution()

from epl.config import Config  # noqa: E402
from epl.runtime.job import connect_job, disconnect_job  # noqa: E402


def main(mode):
    backend, control = connect_job(Config())
    import horovod.tensorflow as hvd

    graph = tf.Graph()
    with graph.as_default():
        value = tf.compat.v1.placeholder(tf.float32, [None])
        total = hvd.allreduce(value, name="total", op=hvd.Sum)
    session = tf.compat.v1.Session(graph=graph)

    def train(steps):
        for step in steps:
            control.enter("train", step)
            try:
                assert session.run(total, {value: [1.0, 2.0]}).tolist() == [2.0, 4.0]
            finally:
                control.leave()

    train(range(3))
    if mode == "busy":
        check_bytes(backend, control)
    if backend.rank == 1:
        time.sleep(0.5)
        print("fault at %.3f" % time.time(), flush=True)
        fail(mode, control)
    elif mode == "busy":
        time.sleep(1.7 * float(os.environ["EPL_CLUSTER_STALL_TIMEOUT"]))
    train(range(3, 6))
    # Leaving and joining again, as `epl.shutdown` and a second `epl.init` do.
    disconnect_job()
    again, channel = connect_job(Config())
    assert again is backend and channel is not control
    assert again.allgather_bytes(b"%d" % again.rank) == [b"0", b"1"]
    assert channel.agree("again", {}) == [{}, {}]
    print("rank %d is done" % backend.rank, flush=True)


def fail(mode, control):
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif mode == "raise":
        raise ValueError("the data of rank 1 is bad")
    elif mode == "exit":
        sys.exit(3)
    elif mode == "leave":
        sys.exit(0)
    elif mode == "diverge":
        control.agree("save", {})


def check_bytes(backend, control):
    """The backend's own collectives, in graph mode."""
    rank = backend.rank
    assert backend.allgather_bytes(b"\x00" * rank + b"x") == [b"x", b"\x00x"]
    assert backend.allgather_bytes(b"") == [b"", b""]
    big = bytes(range(256)) * 4096
    assert backend.broadcast_bytes(big if rank == 1 else b"ignored", 1) == big
    assert backend.process_set([1, 0]) == 0
    sets = [backend.process_set(ranks) for ranks in ([1], [0], [1])]
    assert sets[0] == sets[2] != sets[1] and 0 not in sets
    import horovod.tensorflow as hvd

    assert backend.process_set([1]) == sets[0] and hvd.size() == 2
    backend.barrier()
    start = time.perf_counter()
    for number in range(100):
        assert control.agree("time", {"number": number}) == [{"number": number}] * 2
    print("agree takes %.2f ms" % ((time.perf_counter() - start) * 10), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
