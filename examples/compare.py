"""What the examples share: this rank's part of a global batch, and the comparison with a plain run.

Nothing here is needed to use EPL. It exists so that an example can end by proving
that the distributed run trained what the same script trains on one device.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

EARLY_STEPS = 20
"""The comparison's verdict is taken after so many steps; rounding errors grow later on."""

TOLERANCE = 1e-5


def quiet():
    """Leave out TensorFlow's notes on the age of the TF1 API."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings("ignore", "`tf.layers")


class Part:
    """Which part of each global batch this process reads, as rank `rank` of `ranks` with `devices` each.

    A replica of the model takes `replica_devices` neighbouring devices and `micro_batches`
    batches in a step. The process that holds its first device reads them.
    """

    def __init__(self, ranks=1, rank=0, devices=1, replica_devices=1, micro_batches=1):
        self.ranks, self.rank, self.devices = ranks, rank, devices
        self.replica_devices, self.micro_batches = replica_devices, micro_batches
        if ranks * devices % replica_devices or devices % replica_devices and replica_devices % devices:
            raise SystemExit("%d rank(s) x %d device(s) can't be divided into replicas of %d devices" % (ranks, devices, replica_devices))

    @classmethod
    def of(cls, cluster, replica_devices=1, micro_batches=1):
        """The part of this process in an EPL cluster (`epl.Env.get().cluster`)."""
        return cls(cluster.worker_num, cluster.worker_index, len(cluster.available_devices), replica_devices, micro_batches)

    @property
    def replicas(self):
        return self.ranks * self.devices // self.replica_devices

    @property
    def readers(self):
        """Processes that read: as many as there are, or one for each replica."""
        return min(self.ranks, self.replicas)

    @property
    def reader(self):
        """The number of this process, or of the replica that it holds a part of."""
        return self.rank * self.readers // self.ranks

    def __str__(self):
        text = "%d rank(s) x %d device(s)" % (self.ranks, self.devices)
        if self.micro_batches > 1:
            text += ", %d replica(s) on %d device(s) each, %d micro-batches," % (self.replicas, self.replica_devices, self.micro_batches)
        return text


def argument_parser(description, steps, global_batch):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--plain", action="store_true", help="train on one device, without EPL")
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--global-batch", type=int, default=global_batch, help="samples per step over all replicas (default: %(default)s)")
    parser.add_argument("--no-compare", action="store_true", help="leave out the plain run and the comparison at the end")
    parser.add_argument("--save", metavar="FILE", help="write losses and variables to this .npz file")
    return parser


def batches(arrays, global_batch, part, seed):
    """Shuffled, endless batches: those of all replicas together are the global batches of a plain run.

    Batches are dealt out in replica order: each replica gets one for each of its micro-batches.
    """
    if global_batch % (part.replicas * part.micro_batches):
        what = "%d replicas" % part.replicas + (" x %d micro-batches" % part.micro_batches if part.micro_batches > 1 else "")
        raise SystemExit("--global-batch %d can't be divided over %s" % (global_batch, what))
    data = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[0]), seed=seed).repeat()
    data = data.batch(global_batch // part.replicas // part.micro_batches, drop_remainder=True)
    data = data.batch(part.replicas * part.micro_batches // part.readers, drop_remainder=True)
    data = data.shard(part.readers, part.reader).unbatch()
    iterator = tf.data.make_initializable_iterator(data)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


class Record:
    """Losses of all steps; all variables early on and at the end."""

    def __init__(self):
        self.losses, self.early, self.final = [], {}, {}

    def add(self, session, loss):
        self.losses.append(float(loss))
        if len(self.losses) == EARLY_STEPS:
            self.early = self.read_variables(session)

    def finish(self, session):
        self.final = self.read_variables(session)

    @staticmethod
    def read_variables(session):
        variables = tf.global_variables()
        return {v.op.name: value for v, value in zip(variables, session.run(variables))}

    def save(self, path):
        arrays = {"losses": np.array(self.losses)}
        arrays.update({"early/" + name: value for name, value in self.early.items()})
        arrays.update({"final/" + name: value for name, value in self.final.items()})
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path):
        record = cls()
        with np.load(path) as arrays:
            record.losses = list(arrays["losses"])
            record.early = {k[len("early/") :]: arrays[k] for k in arrays.files if k.startswith("early/")}
            record.final = {k[len("final/") :]: arrays[k] for k in arrays.files if k.startswith("final/")}
        return record


def finish(record, args, part, options=(), script=None):
    """Save what was asked for; on the first rank, compare with a plain run of this script, or of another one."""
    if args.save and part.rank == 0:
        record.save(args.save)
    if args.plain or args.no_compare or part.rank != 0:
        return
    name = os.path.basename(script) if script else "The same script"
    print("\n%s on one device, without EPL, on the same global batches:" % name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plain.npz")
        command = [sys.executable, script or sys.argv[0], "--plain", "--save", path]
        command += ["--steps", str(args.steps), "--global-batch", str(args.global_batch)] + list(options)
        subprocess.run(command, check=True, env=plain_environment())
        plain = Record.load(path)
    if not report(record, plain, part):
        sys.exit(1)


def plain_environment():
    """This process's environment without what describes ranks and clusters."""
    ranks = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "EPL_", "TF_CONFIG")
    return {k: v for k, v in os.environ.items() if not k.startswith(ranks)}


def difference(ours, plain):
    """The largest difference of two arrays relative to the largest value of the plain one."""
    ours, plain = np.asarray(ours, np.float64), np.asarray(plain, np.float64)
    if not plain.size:
        return 0.0
    return float(np.max(np.abs(ours - plain)) / max(np.max(np.abs(plain)), 1e-12))


def variables_difference(ours, plain):
    if set(ours) != set(plain):
        raise SystemExit("the two runs have different variables: %s" % sorted(set(ours) ^ set(plain)))
    return max([difference(ours[name], plain[name]) for name in plain] or [0.0])


def report(ours, plain, part):
    """Print both runs side by side; True if they are equal where rounding errors have not grown yet."""
    steps = len(plain.losses)
    relative = np.abs(np.array(ours.losses) - plain.losses) / np.abs(plain.losses)
    early = min(EARLY_STEPS, steps)
    shown = sorted({1, 2, 5, 10, early, steps} | {int(s) for s in np.linspace(early, steps, 6)})
    print("\nComparison: EPL on %s against plain TensorFlow on one device" % part)
    print("   step     loss (EPL)   loss (plain)   relative difference")
    for step in shown:
        if step <= steps:
            print("%7d %14.7f %14.7f   %.1e" % (step, ours.losses[step - 1], plain.losses[step - 1], relative[step - 1]))
    pairs = [("first %d steps" % early, relative[:early], ours.early or ours.final, plain.early or plain.final)]
    pairs.append(("all %d steps" % steps, relative, ours.final, plain.final))
    results = []
    for name, losses, our_variables, plain_variables in pairs:
        results.append((float(np.max(losses)), variables_difference(our_variables, plain_variables)))
        values = (name, results[-1][0], len(plain_variables), results[-1][1])
        print("%s: largest relative difference of the losses %.1e, of the %d variables %.1e" % values)
    equal = max(results[0]) <= TOLERANCE
    print("equal within %g over the first %d steps: %s" % (TOLERANCE, early, "yes" if equal else "NO"), flush=True)
    return equal
