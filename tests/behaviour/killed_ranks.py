"""Jobs of which one rank is killed, for test_kill_rank: python killed_ranks.py FOLDER CASE...

A case is PHASE-VICTIM, PHASE-VICTIM-RANKS or PHASE-VICTIM-RANKS-SEED. Its ranks are forks of this process,
which has loaded TensorFlow, EPL and Horovod once. They are connected by TF_CONFIG, as under a cluster manager:
nobody but EPL ends them. The victim stays in its phase until it is killed; with a seed, it goes on and
is killed at a random moment after. In the phase "frozen", where Horovod starts, it is stopped instead.
Prints a line of JSON for each case.
"""

import json
import os
import random
import signal
import socket
import sys
import time

STALL_TIMEOUT = 10
RENDEZVOUS_TIMEOUT = (4, 15)
"""Of a job whose victim never comes, and of one whose ranks have to meet."""

STEPS = 40
PATIENCE = 60


class Victim:
    """Where the rank that is killed stays."""

    def __init__(self, phase, waits):
        self._phase = phase
        self._waits = waits

    def reach(self, phase):
        """Every rank tells its phase; the victim stays in the one where it is killed."""
        print("\nphase %s;" % phase, flush=True)
        if phase == self._phase and self._waits:
            time.sleep(2 * PATIENCE)


def train(folder, rank, phase, victim):
    """A rank from its start to its end."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow.compat.v1 as tf

    import epl
    from epl.runtime import session as sessions

    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    if phase in ("horovod", "frozen"):
        start = hvd.init
        hvd.init = lambda: (victim.reach(phase), start())
    compile_program = sessions.compile_program

    def compiles(whole, signature, traits, *args, **kwargs):
        if traits.trains:
            victim.reach("compile")
        return compile_program(whole, signature, traits, *args, **kwargs)

    sessions.compile_program = compiles

    class AtTheEnd(tf.train.SessionRunHook):
        def end(self, session):
            victim.reach("close")

    def evaluate():
        """Something of its own that rank 0 does for long."""
        with tf.Graph().as_default(), tf.Session() as session:
            slow = tf.py_func(lambda: time.sleep(0.2) or np.float32(1), [], tf.float32)
            victim.reach("evaluate")
            for _ in range(10 * PATIENCE):
                session.run(slow)

    victim.reach("start")
    epl.init(epl.Config({"cluster.stall_timeout": STALL_TIMEOUT}))
    epl.set_default_strategy(epl.replicate(1))
    data = tf.data.Dataset.from_tensor_slices(np.ones([64, 32], np.float32)).repeat().batch(8)
    x = tf.data.make_one_shot_iterator(data).get_next()
    w = tf.get_variable("w", [32, 32], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.0))
    update = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder if rank == 0 else None, save_checkpoint_steps=20, hooks=[AtTheEnd()]) as session:
        last = time.monotonic() + PATIENCE
        for number in range(STEPS if phase in ("close", "end") else sys.maxsize):
            session.run(update)
            if number == STEPS // 2:
                victim.reach("train")
                if rank == 0 and phase.startswith("evaluate"):
                    evaluate()
            if time.monotonic() > last:
                sys.exit("nobody was killed")
    victim.reach("end")


class Ranks:
    """The forked ranks of one case."""

    def __init__(self, folder, count):
        self.folder = folder
        self.children = []
        self.codes = [None] * count
        self.ended = [None] * count

    def fork(self, role):
        """True in the parent; False in a rank that is through with its role, and has to end like any script."""
        hosts = free_addresses(len(self.codes))
        for rank in range(len(self.codes)):
            child = os.fork()
            if child == 0:
                os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
                log = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                role(rank)
                return False
            self.children.append(child)
        return True

    def log(self, rank):
        return os.path.join(self.folder, "rank%d.log" % rank)

    def all_reached(self, phase, victim, stays):
        """Whether all who will are in the phase, and the others where they wait for the victim."""
        texts = {rank: self.text(rank) for rank in range(len(self.codes))}
        if phase == "evaluate":
            return "phase evaluate;" in texts[0] and all("phase train;" in text for text in texts.values())
        if phase == "start" and stays:
            return all("phase start;" in text if rank == victim else "rendezvous of" in text for rank, text in texts.items())
        return all("phase %s;" % phase in text for rank, text in texts.items() if rank == victim or not stays)

    def text(self, rank):
        path = self.log(rank)
        if not os.path.exists(path):
            return ""
        with open(path, errors="replace") as log:
            return log.read()

    def wait(self, seconds, condition):
        """Until the condition holds or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for rank, child in enumerate(self.children):
                pid, status = os.waitpid(child, os.WNOHANG) if self.codes[rank] is None else (0, 0)
                if pid:
                    self.codes[rank] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                    self.ended[rank] = time.monotonic()
            if condition():
                return True
            time.sleep(0.02)
        return False

    def kill_all(self):
        for rank, child in enumerate(self.children):
            if self.codes[rank] is None:
                os.kill(child, signal.SIGKILL)
        self.wait(PATIENCE, lambda: None not in self.codes)


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    hosts = ["127.0.0.1:%d" % item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return hosts


def parts_of(case):
    """Phase, victim, number of ranks, and the seed or None."""
    phase, victim, *more = case.split("-")
    return phase, int(victim), int(more[0]) if more else 2, int(more[1]) if len(more) > 1 else None


def run(folder, case):
    """What became of the case; None in a rank."""
    phase, victim, count, seed = parts_of(case)
    mine = os.path.join(folder, case)
    os.mkdir(mine)
    # The ranks of other cases may take their time to meet.
    os.environ["EPL_RENDEZVOUS_TIMEOUT"] = str(RENDEZVOUS_TIMEOUT[seed is not None] if phase == "start" else PATIENCE)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(2 * PATIENCE)
    stays, goes_on = Victim(phase, seed is None), Victim(phase, False)
    ranks = Ranks(mine, count)
    if not ranks.fork(lambda rank: train(os.path.join(mine, "checkpoints"), rank, phase, stays if rank == victim else goes_on)):
        return None
    others = [rank for rank in range(count) if rank != victim]
    try:
        there = ranks.wait(PATIENCE, lambda: ranks.all_reached(phase, victim, seed is None))
        time.sleep(0.5 if seed is None else random.Random(seed).uniform(0, 3))
        os.kill(ranks.children[victim], signal.SIGSTOP if phase == "frozen" else signal.SIGKILL)
        killed = time.monotonic()
        ranks.wait(PATIENCE, lambda: all(ranks.codes[rank] is not None for rank in others))
        survivors = [
            {"rank": rank, "code": ranks.codes[rank], "seconds": ranks.ended[rank] and ranks.ended[rank] - killed, "log": ranks.log(rank)}
            for rank in others
        ]
        return {"reached": there, "survivors": survivors}
    finally:
        ranks.kill_all()


def main(folder, cases):
    import horovod.tensorflow  # noqa: F401
    import tensorflow.compat.v1  # noqa: F401

    import epl  # noqa: F401

    for case in cases:
        found = run(folder, case)
        if found is None:
            return
        print(json.dumps(dict(found, case=case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
