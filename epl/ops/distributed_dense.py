"""A fully connected layer whose weights the devices of a `split` scope hold together."""

import numbers
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from epl.errors import ConfigError


class DistributedDense(tf.layers.Dense):
    """A `tf.layers.Dense` for `split` scopes: `activation(inputs @ kernel + bias)`.

    It builds the ops and variables of the plain layer, in any scope and without EPL. In a
    `split` scope the columns of the kernel, or its rows, are divided over the devices, as
    the plan finds cheaper; any number of units will do. The initial values are those of the
    plain layer, drawn for the whole kernel.

    Args:
      units: columns of the kernel, from 1.
      Others, and attributes, are those of `tf.layers.Dense`.

    Raises ConfigError for a bad number of units.

    Source: the operator split of Whale (Jia et al., USENIX ATC 2022, section 3.2).
    """

    def __init__(self, units: int, *args: Any, **kwargs: Any):
        if isinstance(units, bool) or not isinstance(units, numbers.Integral) or units < 1:
            raise ConfigError("DistributedDense(units=%r): expected a whole number of columns, 1 or more" % (units,))
        super().__init__(int(units), *args, **kwargs)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs, of shape [..., units], of inputs of shape [..., columns].

        Raises ConfigError for inputs that are not of floating point, have fewer than two
        dimensions, or whose last one is not known.
        """
        tensor = tf.convert_to_tensor(inputs)
        if not tensor.dtype.is_floating:
            raise ConfigError("Layer '%s' has inputs %s of type %s: expected floating point; cast them" % (self.name, tensor.name, tensor.dtype.name))
        if tensor.shape.rank is None or tensor.shape.rank < 2 or tensor.shape[-1] is None:
            raise ConfigError(
                "Layer '%s' has inputs %s of shape %s: expected [batch, ..., columns] with a known number of columns; set the shape"
                % (self.name, tensor.name, tensor.shape)
            )
        return super().__call__(tensor, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: tf.Tensor) -> tf.Tensor:  # noqa: D102
        columns, inner = int(inputs.shape[-1]), inputs.shape.as_list()[1:-1]
        # A product of matrices, whose shapes are constants but for the batch: the plan can divide it wherever it is.
        rows = inputs if inputs.shape.rank == 2 else tf.reshape(inputs, [-1, columns])
        outputs = tf.matmul(rows, self.kernel)
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, self.bias)
        if inputs.shape.rank > 2:
            known = None not in inner
            outputs = tf.reshape(outputs, [-1] + inner + [self.units] if known else tf.concat([tf.shape(inputs)[:-1], [self.units]], 0))
        return outputs if self.activation is None else self.activation(outputs)


def distributed_dense(
    inputs: tf.Tensor,
    units: int,
    activation: Any = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = tf.zeros_initializer(),  # noqa: B008  that of `tf.layers.dense`
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    activity_regularizer: Any = None,
    kernel_constraint: Any = None,
    bias_constraint: Any = None,
    trainable: bool = True,
    name: Optional[str] = None,
    reuse: Optional[bool] = None,
) -> tf.Tensor:
    """A `DistributedDense` layer, applied once: `tf.layers.dense` with the checks of the class.

    Args:
      inputs: [..., columns], floating point. Others are those of `tf.layers.dense`; variables
        are `name`/kernel and `name`/bias, whole ones, whatever the layout.

    Returns:
      [..., units].

    Raises ConfigError, see the class.
    """
    layer = DistributedDense(
        units,
        activation=activation,
        use_bias=use_bias,
        kernel_initializer=kernel_initializer,
        bias_initializer=bias_initializer,
        kernel_regularizer=kernel_regularizer,
        bias_regularizer=bias_regularizer,
        activity_regularizer=activity_regularizer,
        kernel_constraint=kernel_constraint,
        bias_constraint=bias_constraint,
        trainable=trainable,
        name=name,
        _scope=name,
        _reuse=reuse,
    )
    return layer(inputs)
