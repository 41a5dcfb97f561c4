"""AMP's models, clusters and plans as the simulator wants them.

Two numbers of the T4 are fitted, to every fourth trial of the homogeneous cluster (13 trials, least
squares of the logarithms): what a transformer block moves in memory (its kernels are not fused,
so memory bounds it), and the overhead of a block. All else is from data sheets and from AMP.
"""

from epl.cluster.hardware import Device, Link, Node
from epl.planner.cost.model import Layer, Model, Work
from epl.planner.simulate import Candidate
from epl.planner.simulate.closed_forms import transformer_activation
from tests.unit.planner.amp_trials import MIXED_MODEL_SECONDS

GBIT = 1e9 / 8
HIDDEN, SEQUENCE, VOCABULARY, HEADS = 1024, 1024, 52256, 16  # of GPT-2, from the files of results

BLOCK_BYTES, T4_OVERHEAD = 1.307e9, 0.909e-3

# AMP's cost of 16 replicas on the mixed cluster (2.7789 s) is twice its mean forward and backward time of a sample on the 16
# GPUs, and the all-reduce of 355.5e6 numbers of 4 bytes at 10 Gb/s (cost_het_cluster.py): 2 * 15 / 16 * 355.5e6 * 4 / 1.25e9 = 2.133 s.
# On the T4 alone it is 1.2443 s with 50 Gb/s (0.4266 s). So a V100 takes ((2.7789 - 2.133) / 2 - (1.2443 - 0.4266) / 8) / 0.75.
V100_SAMPLE = ((2.7789 - 2.133) / 2 - (1.2443 - 0.4266) / 8) / 0.75
PRODUCT = 2 * SEQUENCE * HIDDEN * VOCABULARY
"""FLOPs of the logits of a sample."""
V100_OVERHEAD = (V100_SAMPLE - 24 * 3 * BLOCK_BYTES / 900e9 - 3 * PRODUCT / 125e12) / (24 * 3)
"""What 24 blocks, forward once and backward twice as much, leave of that time beside memory and logits."""


def t4():
    return Device("T4", {"float32": 8.1e12, "float16": 65e12}, 16e9, 320e9, overhead=T4_OVERHEAD, source="NVIDIA T4 data sheet")


def v100():
    return Device("V100", {"float32": 15.7e12, "float16": 125e12}, 16e9, 900e9, overhead=V100_OVERHEAD, source="NVIDIA V100 data sheet (SXM2)")


def p3(count):
    """p3.8xlarge: 170 Gb/s of NVLink, 10 Gb/s of network."""
    return tuple(Node("p3-%d" % n, (v100(),) * 4, Link(170 * GBIT), Link(10 * GBIT)) for n in range(count))


def g4dn(count):
    """g4dn.12xlarge: 50 Gb/s of PCIe, which the four GPUs share, and of network."""
    return tuple(Node("g4dn-%d" % n, (t4(),) * 4, Link(50 * GBIT), Link(50 * GBIT)) for n in range(count))


def gpt2():
    """GPT-2 as AMP counts its 30 layers: embedding, 1 that does nothing, 24 blocks, 2 that do nothing, logits, 1 that does nothing."""
    # FLOPs and the part of a block that tensor parallelism does not divide (10 of 34 + 5 a s / h): Korthikanti et al., MLSys 2023, section 4.
    flops = SEQUENCE * HIDDEN * (24 * HIDDEN + 4 * SEQUENCE)
    block = Layer(
        "block",
        Work(flops, BLOCK_BYTES, 1),
        Work(2 * flops, 2 * BLOCK_BYTES, 2),
        parameters=12 * HIDDEN**2,
        activation=transformer_activation(SEQUENCE, HIDDEN, HEADS),
        output=2 * SEQUENCE * HIDDEN,
        split_by=HEADS,
        divided=1 - 10 / (34 + 5 * HEADS * SEQUENCE / HIDDEN),
        exchanged=2 * 2 * SEQUENCE * HIDDEN,
    )
    words = dict(parameters=VOCABULARY * HIDDEN, tied="words", split_by=HEADS, exchanged=2 * SEQUENCE * HIDDEN)
    embedding = Layer("embedding", Work(), Work(), output=2 * SEQUENCE * HIDDEN, activation=2 * SEQUENCE * HIDDEN, **words)
    nothing = Layer("nothing", Work(), Work(), output=2 * SEQUENCE * HIDDEN)
    logits = Layer("logits", Work(PRODUCT), Work(2 * PRODUCT), output=2 * SEQUENCE * VOCABULARY, activation=2 * SEQUENCE * VOCABULARY, **words)
    # DeepSpeed's configuration: 16-bit weights, gradients summed in 32 bits (fp32_allreduce), Adam with a master copy.
    layers = (embedding, nothing) + (block,) * 24 + (nothing, nothing, logits, nothing)
    return Model(layers, weight_bytes=2, gradient_bytes=4, state_bytes=12, dtype="float16")


def transgan(degree):
    """TransGAN with 56 layers: 12 blocks 1024 wide, 12 blocks 16 wide on 256 times as many positions; times measured by AMP at that degree.

    The times hold what the parts exchange. Forward : backward is 1 : 2, as AMP has it (cost_het_model.py).
    """
    layers = []
    for number, seconds in enumerate(map(float, MIXED_MODEL_SECONDS[degree].split())):
        width = 1024 if 3 <= number < 15 else 16 if 41 <= number < 53 else 0
        moved = 2 * 81 * 1024 * (1 if number < 15 else 16)
        times = {"V100": (seconds / 3 * degree, 2 * seconds / 3 * degree)}
        layers.append(Layer("layer", Work(), Work(), parameters=12 * width**2, output=moved, seconds=times, split_by=16))
    return Model(tuple(layers), weight_bytes=2, gradient_bytes=4, state_bytes=12, dtype="float16")


def candidate(trial, batch, hardware, model):
    micro_batch, tensor, data, pipeline, bounds, _ = trial
    ranks = hardware.places
    places = tuple(
        tuple(tuple(ranks[(stage * data + replica) * tensor + part] for part in range(tensor)) for stage in range(pipeline))
        for replica in range(data)
    )
    split = tuple(tensor if layer.split_by > 1 else 1 for layer in model.layers) if tensor > 1 else ()
    return Candidate(bounds, places, (float(micro_batch),) * data, batch // (micro_batch * data), split=split)
