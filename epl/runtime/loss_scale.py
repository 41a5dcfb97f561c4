"""The state of a dynamic loss scale, the same on all ranks because they see the same flags."""

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from epl.env import Env
from epl.passes.amp import STATE

KEY = "AMP_LOSS_SCALE"
"""Where `Env.parallel_information` has it."""
INITIAL, PERIOD, FACTOR = 2.0**15, 2000, 2.0
_LEAST, _MOST = 1.0, 2.0**126


class LossScale:
    """Doubles after 2000 good steps, halves after one whose gradients are not finite (Micikevicius et al., 2018, section 3.2)."""

    def __init__(self) -> None:
        self._current_loss_scale = INITIAL
        self._num_good_steps = 0

    @property
    def value(self) -> np.float32:
        """The factor, a float32 scalar."""
        return np.float32(self._current_loss_scale)

    @property
    def state(self) -> np.ndarray:
        """What a checkpoint has of it: the factor and the good steps, float32 of shape [2]."""
        return np.array([self._current_loss_scale, self._num_good_steps], np.float32)

    def update(self, finite: bool) -> None:
        """Take note of a step."""
        before = self._current_loss_scale
        if not finite:
            self._current_loss_scale = max(_LEAST, before / FACTOR)
            self._num_good_steps = 0
            logging.log_if(logging.INFO, "Gradients were not finite: the step was skipped, the loss scale is %g", _logs(), self._current_loss_scale)
            return
        self._num_good_steps += 1
        if self._num_good_steps >= PERIOD:
            self._current_loss_scale = min(before * FACTOR, _MOST)
            self._num_good_steps = 0
            logging.log_if(logging.INFO, "After %d good steps the loss scale is %g", _logs(), PERIOD, self._current_loss_scale)

    def load(self, checkpoint: Any) -> None:
        """Go on with the state that a checkpoint has; one that was written without a dynamic scale changes nothing."""
        reader = tf.train.load_checkpoint(checkpoint)
        if reader.has_tensor(STATE):
            scale, steps = reader.get_tensor(STATE)
            self._current_loss_scale, self._num_good_steps = float(scale), int(steps)


def _logs() -> bool:
    return bool(Env.get().config.amp.debug_log) and Env.get().cluster.worker_index == 0


def is_dynamic() -> bool:
    """Whether the configuration asks for a dynamic loss scale."""
    config = Env.get().config
    return bool(config is not None and config.amp.level and config.amp.loss_scale == "dynamic")


def current() -> LossScale:
    """The scale of this process's training."""
    return Env.get().parallel_information.setdefault(KEY, LossScale())
