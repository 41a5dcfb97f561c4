"""Which experts of a mixture see which tokens.

Tokens come in groups, and each group is dealt with by itself: an expert has so many places
for each group. Tokens that find their expert full are dropped: they get nothing from it.
Since the groups are part of the model, a batch that is divided among devices between groups
is computed as it was whole.

Sources: GShard (Lepikhin et al., arXiv 2006.16668, section 2.2 and algorithm 1); Switch
Transformer (Fedus et al., arXiv 2101.03961, sections 2.1 and 2.2).
"""

import math
import numbers
from typing import Any, List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf

from epl.errors import ConfigError


class Gating(NamedTuple):
    """What a gate decided; S tokens in each of G groups, E experts with C places for each group.

    Attributes:
      combine: [G, S, E, C], what the result of a place counts for a token; 0 elsewhere.
      dispatch: [G, S, E, C], 1 where a token takes a place, 0 elsewhere; no gradient flows through it.
      loss: a number, E times the sum over experts of the share of tokens whose first choice
        they are by their mean probability, in the mean over groups: 1 for an even load, up to E.
      dropped: a number, the share of all choices that found no place.
    """

    combine: tf.Tensor
    dispatch: tf.Tensor
    loss: tf.Tensor
    dropped: tf.Tensor


def expert_capacity(tokens: int, experts: int, k: int = 1, capacity_factor: float = 1.25, multiple: int = 1) -> int:
    """The places of an expert for a group: `capacity_factor` times those that an even load takes, rounded up.

    Args:
      tokens: in a group. experts: among which they are dealt. k: choices of a token.
      capacity_factor: above 0. multiple: the result is rounded up to one of it.

    Returns:
      At least `multiple`, unless there are fewer tokens: an expert can't get more than all of them.

    Raises ConfigError for an argument out of range.
    """
    for name, value in (("tokens", tokens), ("experts", experts), ("k", k), ("multiple", multiple)):
        whole_number(name, value)
    if not isinstance(capacity_factor, numbers.Real) or not 0 < float(capacity_factor) < math.inf:
        raise ConfigError("capacity_factor=%r: expected a number above 0" % (capacity_factor,))
    # A hair less, so that what is whole but for rounding errors stays as it is.
    places = math.ceil(float(capacity_factor) * k * tokens / experts - 1e-6)
    return min(tokens, multiple * max(1, -(-places // multiple)))


def top_k_gating(
    logits: tf.Tensor,
    k: int = 2,
    capacity_factor: float = 1.25,
    capacity: Optional[int] = None,
    normalize: Optional[bool] = None,
    random_second: bool = False,
    seed: Optional[int] = None,
    name: str = "gating",
) -> Gating:
    """Each token goes to the `k` experts that it likes best: with k = 1 the gate of Switch, with k = 2 that of GShard.

    First choices take places first, in the order of the tokens; second choices come after
    all first ones. Of equal experts the first is taken. Computed in float32, or float64 if the
    logits are.

    Args:
      logits: [groups, tokens, experts]; only the number of groups may be unknown.
      k: choices of each token, from 1 to the number of experts.
      capacity_factor: see `expert_capacity`. capacity: places, in its stead.
      normalize: whether the probabilities of a token's choices are divided by their sum;
        None does so for more than one choice.
      random_second: with k = 2, take the second choice only with a probability of twice its
        share of both. Off, so that training does not depend on the layout.
      seed: of these random numbers; must be given with `random_second`.

    Raises ConfigError for logits of another shape, or an argument out of range.
    """
    logits = tf.convert_to_tensor(logits)
    tokens, experts = _sizes(logits)
    if whole_number("k", k) > experts:
        raise ConfigError("k=%d: there are %d experts to choose from" % (k, experts))
    if capacity is None:
        capacity = expert_capacity(tokens, experts, k, capacity_factor)
    whole_number("capacity", capacity)
    if random_second and (k != 2 or seed is None):
        raise ConfigError("random_second with k=%d, seed=%r: expected two choices and a seed" % (k, seed))
    with tf.name_scope(name):
        gates = tf.nn.softmax(logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32))
        masks, shares = _choices(gates, k, k > 1 if normalize is None else normalize)
        loss = _balance(gates, masks[0], experts)
        if random_second:
            # Without a gradient: whether a token goes is no function of the weights.
            chance = tf.random.uniform(tf.shape(shares[1]), dtype=shares[1].dtype, seed=seed)
            masks[1] *= tf.expand_dims(tf.cast(2.0 * shares[1] > chance, masks[1].dtype), -1)
        places, kept = _places(masks, capacity)
        dispatch = tf.add_n([tf.einsum("GSE,GSC->GSEC", mask, place) for mask, place in zip(masks, places)])
        weighted = [mask * tf.expand_dims(share, -1) for mask, share in zip(masks, shares)]
        combine = tf.add_n([tf.einsum("GSE,GSC->GSEC", weight, place) for weight, place in zip(weighted, places)])
        return Gating(combine, tf.stop_gradient(dispatch), loss, 1.0 - kept / float(k))


def _sizes(logits: tf.Tensor) -> Tuple[int, int]:
    if logits.shape.rank != 3 or None in logits.shape.as_list()[1:] or not logits.dtype.is_floating:
        raise ConfigError(
            "logits %s of type %s and shape %s: expected floating point, [groups, tokens, experts] with known numbers of tokens and experts"
            % (logits.name, logits.dtype.name, logits.shape)
        )
    return int(logits.shape[1]), int(logits.shape[2])


def _choices(gates: tf.Tensor, k: int, normalize: bool) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
    """([G, S, E] with a 1 at the expert, [G, S] the probability) of each choice."""
    left, masks, shares = gates, [], []
    for _ in range(k):
        mask = tf.one_hot(tf.argmax(left, -1), int(gates.shape[-1]), dtype=gates.dtype)
        # Below all others, also below those whose probability is 0.
        left -= 2.0 * mask
        masks.append(mask)
        shares.append(tf.reduce_sum(gates * mask, -1))
    if normalize:
        total = tf.add_n(shares)
        shares = [share / total for share in shares]
    return masks, shares


def _places(masks: List[tf.Tensor], capacity: int) -> Tuple[List[tf.Tensor], tf.Tensor]:
    """([G, S, C] with a 1 at the place of each choice, or without one, choices per token that found a place)."""
    places, found = [], []
    before: Any = 0.0
    for mask in masks:
        queue = tf.cumsum(mask, 1, exclusive=True) + before
        before += tf.reduce_sum(mask, 1, keepdims=True)
        position = tf.cast(tf.reduce_sum(queue * mask, -1), tf.int32)
        # A position behind the last place gives a row of zeros.
        places.append(tf.one_hot(position, capacity, dtype=mask.dtype))
        found.append(tf.reduce_sum(mask, -1) * tf.reduce_sum(places[-1], -1))
    return places, tf.reduce_mean(tf.add_n(found))


def _balance(gates: tf.Tensor, first: tf.Tensor, experts: int) -> tf.Tensor:
    """See `Gating.loss`; the shares of first choices are counts, so that gradients flow through the probabilities alone."""
    share, probability = tf.reduce_mean(first, 1), tf.reduce_mean(gates, 1)
    return float(experts) * tf.reduce_mean(tf.reduce_sum(share * probability, -1))


def whole_number(name: str, value: Any) -> int:
    """The value. Raises ConfigError unless it is a whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError("%s=%r: expected a whole number, 1 or more" % (name, value))
    return int(value)
