"""A model as the planner sees it: a row of layers with their work, weights and activations.

A layer is what is not cut further: a repeated block of the graph, or an op between two
cheap cuts. Whatever grows with the batch is given for one sample.
"""

import dataclasses
from typing import Mapping, Sequence, Tuple

from epl.cluster.hardware.spec import Device


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes moved of one sample, in ops of which there are `ops`."""

    flops: float = 0.0
    moved: float = 0.0
    ops: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.moved + other.moved, self.ops + other.ops)

    def seconds(self, device: Device, samples: float, dtype: str = "float32") -> float:
        """On one device, by the roofline, and its overhead for each op."""
        return device.seconds(self.flops * samples, self.moved * samples, dtype) + self.ops * device.overhead


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
      name: of its scope or its first op.
      forward: work of the forward pass.
      backward: work of the whole backward pass; twice the forward pass where it is not known.
      weight_gradients: the part of `backward` that only weights need (W of zero-bubble schedules).
      parameters: number of weights.
      activation: bytes of one sample that are kept from the forward to the backward pass.
      output: bytes of one sample that the next layer reads.
      workspace: bytes of one sample that live only while the layer runs.
      seconds: kind of device -> measured (forward, backward) seconds of one sample; it wins over the roofline.
      tied: weights with the same name in several layers are one variable; "" for weights of its own.
      split_by: the largest number of parts that its weights can be divided into; 1 where that is not possible.
      divided: the part of its work that is divided with its weights; each of the parts does the rest as a whole.
      exchanged: bytes of one sample that each of the parts exchanges for that in the forward pass (and again in the backward pass).
    """

    name: str
    forward: Work
    backward: Work
    weight_gradients: Work = Work()
    parameters: float = 0.0
    activation: float = 0.0
    output: float = 0.0
    workspace: float = 0.0
    seconds: Mapping[str, Tuple[float, float]] = dataclasses.field(default_factory=dict)
    tied: str = ""
    split_by: int = 1
    divided: float = 1.0
    exchanged: float = 0.0

    def forward_seconds(self, device: Device, samples: float, dtype: str = "float32") -> float:
        if device.kind in self.seconds:
            return self.seconds[device.kind][0] * samples
        return self.forward.seconds(device, samples, dtype)

    def backward_seconds(self, device: Device, samples: float, dtype: str = "float32") -> float:
        """Of the whole backward pass."""
        if device.kind in self.seconds:
            return self.seconds[device.kind][1] * samples
        return self.backward.seconds(device, samples, dtype)

    def weight_share(self) -> float:
        """The part of the backward pass that is W."""
        return self.weight_gradients.flops / self.backward.flops if self.backward.flops else 0.0


@dataclasses.dataclass(frozen=True)
class Skip:
    """A tensor that a later layer than the next one reads too: it crosses every cut between the two."""

    source: int
    target: int
    bytes: float
    """Of one sample."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and how it is trained.

    Attributes:
      layers: in their order.
      skips: what is read beyond the next layer.
      weight_bytes, gradient_bytes: of one parameter.
      state_bytes: of one parameter in the optimizer, with a master copy if there is one (Adam in mixed precision: 12).
      dtype: of the products.
    """

    layers: Tuple[Layer, ...]
    skips: Tuple[Skip, ...] = ()
    weight_bytes: float = 4.0
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    dtype: str = "float32"

    @property
    def parameters(self) -> float:
        """All weights, tied ones once."""
        return distinct_parameters(self.layers)

    @property
    def bytes_per_parameter(self) -> float:
        """Weights, gradients and optimizer state: 16 for Adam in mixed precision. Source: ZeRO, SC'20, section 3.1."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    def crossing(self, cut: int) -> float:
        """Bytes of one sample between layer `cut - 1` and layer `cut`."""
        return self.layers[cut - 1].output + sum(s.bytes for s in self.skips if s.source < cut - 1 and s.target >= cut)


def distinct_parameters(layers: Sequence[Layer]) -> float:
    """The weights of some layers; those of a tied variable count once."""
    tied = {layer.tied: layer.parameters for layer in layers if layer.tied}
    return sum(layer.parameters for layer in layers if not layer.tied) + sum(tied.values())
