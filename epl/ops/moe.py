"""A layer of experts, of which each token sees a few: a mixture of experts.

Sources: Shazeer et al., arXiv 1701.06538; GShard (Lepikhin et al., arXiv 2006.16668), whose
einsums these are; Switch Transformer (Fedus et al., arXiv 2101.03961).
"""

from typing import Any, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from epl.errors import ConfigError
from epl.ops import initializers
from epl.ops.gating import Gating, expert_capacity, top_k_gating, whole_number


class MixtureOfExperts(tf.layers.Layer):
    """Experts of two matrices each, `activation(tokens @ inner) @ outer`, and a gate before them.

    It builds plain ops, in any scope and without EPL. In a `split` scope each device holds
    some of the experts; tokens travel to the devices of their experts and back, by an
    all-to-all each.

    Tokens are gated in groups (`epl.ops.gating`). A group is a sample [tokens, columns], or
    `group_size` tokens in the order of the batch. What a device trains on its batch is what
    one device trains on the batches of all, as long as groups do not cross from one batch
    into the next: a batch must have whole groups.

    Args:
      experts: how many.
      hidden_units: columns of `inner`.
      k: experts of a token; 1 is the Switch Transformer, 2 is GShard.
      capacity_factor: places of an expert, in terms of those of an even load. capacity_multiple:
        they are rounded up to a multiple of it. See `epl.ops.expert_capacity`.
      group_size: tokens of a group. None makes each sample a group; then inputs have three
        dimensions or more.
      activation: between the two matrices.
      use_bias: whether both matrices have a bias.
      kernel_initializer: of the experts' matrices; its fans are those of one expert. None is Glorot uniform.
      gate_initializer: of the gate's matrix. None is Glorot uniform.
      jitter: in training, the gate sees its inputs times random numbers from 1 - jitter to 1 + jitter.
      random_second: in training, see `epl.ops.top_k_gating`.
      seed: of these random numbers; must be given with either. Without them training does not
        depend on the layout; with them each lane and micro-batch draws its own, the same in each run.

    Attributes:
      gate [columns, experts], inner_kernel [experts, columns, hidden], inner_bias [experts, hidden],
      outer_kernel [experts, hidden, columns], outer_bias [experts, columns]: its variables.
      gating: a `Gating`, of the last call.

    Raises ConfigError for an argument out of range.
    """

    def __init__(
        self,
        experts: int,
        hidden_units: int,
        k: int = 2,
        capacity_factor: float = 1.25,
        capacity_multiple: int = 1,
        group_size: Optional[int] = None,
        activation: Any = tf.nn.relu,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        gate_initializer: Any = None,
        jitter: float = 0.0,
        random_second: bool = False,
        seed: Optional[int] = None,
        trainable: bool = True,
        name: Optional[str] = None,
        **kwargs: Any
    ):
        super().__init__(trainable=trainable, name=name, **kwargs)
        self.experts = whole_number("experts", experts)
        self.hidden_units = whole_number("hidden_units", hidden_units)
        self.k = whole_number("k", k)
        expert_capacity(1, self.experts, self.k, capacity_factor, capacity_multiple)
        self.capacity_factor, self.capacity_multiple = capacity_factor, capacity_multiple
        self.group_size = None if group_size is None else whole_number("group_size", group_size)
        if self.k > self.experts:
            raise ConfigError("k=%d: there are %d experts to choose from" % (self.k, self.experts))
        if not 0 <= jitter < 1:
            raise ConfigError("jitter=%r: expected a number from 0 to below 1" % (jitter,))
        if seed is None and (jitter or random_second):
            raise ConfigError("jitter=%r, random_second=%r: random numbers need a seed; give one" % (jitter, random_second))
        self.activation = activation
        self.use_bias = use_bias
        self.kernel_initializer, self.gate_initializer = kernel_initializer, gate_initializer
        self.jitter, self.random_second, self.seed = jitter, random_second, seed
        self.gating: Optional[Gating] = None

    def build(self, shape: Any) -> None:  # noqa: D102
        columns = int(tf.TensorShape(shape)[-1])
        hidden, make = self.hidden_units, self.kernel_initializer
        self.gate = self.add_weight("gate", [columns, self.experts], initializer=initializers.get(self.gate_initializer))
        # The fans of a matrix: those of the whole variable would count the experts as a window.
        inner = initializers.get(make, fan_in=columns, fan_out=hidden)
        outer = initializers.get(make, fan_in=hidden, fan_out=columns)
        self.inner_kernel = self.add_weight("inner_kernel", [self.experts, columns, hidden], initializer=inner)
        self.outer_kernel = self.add_weight("outer_kernel", [self.experts, hidden, columns], initializer=outer)
        if self.use_bias:
            self.inner_bias = self.add_weight("inner_bias", [self.experts, hidden], initializer=tf.zeros_initializer())
            self.outer_bias = self.add_weight("outer_bias", [self.experts, columns], initializer=tf.zeros_initializer())
        super().build(shape)

    def __call__(self, inputs: Any, training: bool = True, **kwargs: Any) -> Tuple[tf.Tensor, tf.Tensor]:
        """What the experts make of tokens.

        Args:
          inputs: [samples, ..., columns], or [tokens, columns] with a group size; floating point.
          training: whether random numbers are drawn, where there are any.

        Returns:
          (what the experts give, of the shape of the inputs, 0 for a token without a place;
          the load-balancing loss, to be added to the model's with a factor such as 0.01).

        Raises ConfigError for inputs that can't be divided into groups.
        """
        tensor = tf.convert_to_tensor(inputs)
        self._check(tensor)
        return super().__call__(tensor, training=training, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: tf.Tensor, training: bool = True) -> Tuple[tf.Tensor, tf.Tensor]:  # noqa: D102
        shape = inputs.shape.as_list()
        tokens = self._group_size(shape)
        x = inputs if shape[1:-1] == [tokens] else tf.reshape(inputs, [-1, tokens, shape[-1]])
        capacity = expert_capacity(tokens, self.experts, self.k, self.capacity_factor, self.capacity_multiple)
        logits = self._logits(x, training)
        random = self.random_second and training
        self.gating = found = top_k_gating(logits, self.k, capacity=capacity, random_second=random, seed=self.seed if random else None)
        # E experts, G groups, S tokens of each, C places, M columns, H hidden units.
        seen = tf.einsum("GSEC,GSM->EGCM", tf.cast(found.dispatch, x.dtype), x)
        hidden = tf.einsum("EGCM,EMH->EGCH", seen, self.inner_kernel)
        if self.use_bias:
            hidden += tf.reshape(self.inner_bias, [self.experts, 1, 1, self.hidden_units])
        if self.activation is not None:
            hidden = self.activation(hidden)
        given = tf.einsum("EGCH,EHM->EGCM", hidden, self.outer_kernel)
        if self.use_bias:
            given += tf.reshape(self.outer_bias, [self.experts, 1, 1, int(x.shape[2])])
        outputs = tf.einsum("GSEC,EGCM->GSM", tf.cast(found.combine, x.dtype), given)
        if x is not inputs:
            outputs = tf.reshape(outputs, [-1] + shape[1:])
            outputs.set_shape(inputs.shape)
        return outputs, tf.cast(found.loss, x.dtype)

    def _logits(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        """[groups, tokens, experts]; in single precision at least, as small differences decide."""
        wide = tf.float64 if x.dtype == tf.float64 else tf.float32
        x = tf.cast(x, wide)
        if self.jitter and training:
            x *= tf.random.uniform(tf.shape(x), 1.0 - self.jitter, 1.0 + self.jitter, dtype=wide, seed=self.seed)
        return tf.einsum("GSM,ME->GSE", x, tf.cast(self.gate, wide))

    def _group_size(self, shape: List[Optional[int]]) -> int:
        return self.group_size or _product(shape[1:-1])

    def _check(self, inputs: tf.Tensor) -> None:
        """Raise ConfigError for inputs that have no groups."""
        shape = inputs.shape.as_list() if inputs.shape.rank is not None else []
        flat = len(shape) == 2 and self.group_size is None
        if len(shape) < 2 or None in shape[1:] or not inputs.dtype.is_floating or flat:
            raise ConfigError(
                "Layer '%s' has inputs %s of type %s and shape %s: expected floating point, [samples, tokens, columns], or [tokens, columns] and "
                "a group_size, where all but the first are known" % (self.name, inputs.name, inputs.dtype.name, inputs.shape)
            )
        inside, size = _product(shape[1:-1]), self._group_size(shape)
        if inside % size and size % inside or shape[0] is not None and shape[0] * inside % size:
            raise ConfigError(
                "Layer '%s' has a group_size of %d and inputs of shape %s: expected a group of whole samples or samples of whole groups, and a "
                "batch of whole groups" % (self.name, size, inputs.shape)
            )


MoE = MixtureOfExperts
"""The short name of the layer."""


def _product(lengths: Sequence[Optional[int]]) -> int:
    total = 1
    for length in lengths:
        total *= length or 1
    return total


def mixture_of_experts(inputs: tf.Tensor, experts: int, hidden_units: int, training: bool = True, **options: Any) -> Tuple[tf.Tensor, tf.Tensor]:
    """A `MixtureOfExperts` layer, applied once.

    Args:
      inputs: see the layer. options: of the layer.

    Returns:
      (outputs, load-balancing loss).

    Raises ConfigError, see the class.
    """
    name = options.get("name")
    return MixtureOfExperts(experts, hidden_units, _scope=name, **options)(inputs, training=training)
