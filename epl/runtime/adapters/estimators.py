"""Adapter of estimators: every rank trains as a local chief, rank 0 evaluates and exports."""

import base64
import contextlib
import functools
import inspect
import io
import json
import os
from typing import Any, Callable, Dict, Iterator, Optional, Set

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

from epl import compat
from epl.env import Env
from epl.ir.graph import Graph
from epl.runtime import chief
from epl.runtime.adapters import Patches

_DISTRIBUTION = ("train_distribute", "eval_distribute", "experimental_distribute", "device_fn")
_OF_TF_CONFIG = ("cluster", "task", "session_master", "eval_session_master", "service")
_FINISHED = "_epl_finished"


def install(patches: Patches) -> None:
    modules = compat.estimator_modules()
    if modules is None:
        return
    estimator, training = modules
    warn = _Once()
    patches.replace(estimator.run_config.RunConfig, "__init__", lambda original: _run_config(original, warn))
    base = estimator.Estimator
    patches.replace(base, "__init__", lambda original: _init(original, warn))
    patches.replace(base, "train", lambda original: _train(original, warn))
    patches.replace(base, "evaluate", _finishing)
    patches.replace(base, "predict", _predict)
    patches.replace(base, "_call_model_fn", _call_model_fn)
    patches.replace(base, "_export_all_saved_models", lambda original: _export(_finishing(original)))
    patches.replace(estimator, "_load_global_step_from_checkpoint_dir", _start_step)
    patches.replace(training._TrainingExecutor._Evaluator, "evaluate_and_export", lambda original: _evaluate_and_export(original, training))


class _Once:
    """Warns once after `epl.init` that a distribution of the Estimator's own is ignored."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, what: str) -> None:
        if not self._said:
            self._said = True
            logging.warning("EPL distributes the training: %s of the Estimator's configuration is ignored", what)


# Configuration.


def _run_config(original: Callable[..., None], warn: _Once) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        ignored = [name for name in _DISTRIBUTION if given.arguments.get(name) is not None]
        for name in ignored:
            del given.arguments[name]
        with _local_tf_config() as cluster:
            if cluster:
                ignored.append("the cluster in TF_CONFIG")
            if ignored:
                warn(", ".join(ignored))
            original(*given.args, **given.kwargs)

    return init


@contextlib.contextmanager
def _local_tf_config() -> Iterator[bool]:
    """Hide what TF_CONFIG says of the cluster; EPL has read it, and every rank is a chief of its own. Yields whether it says so."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        yield False
        return
    found = json.loads(text)
    os.environ["TF_CONFIG"] = json.dumps({name: value for name, value in found.items() if name not in _OF_TF_CONFIG})
    try:
        yield "cluster" in found
    finally:
        os.environ["TF_CONFIG"] = text


def _init(original: Callable[..., None], warn: _Once) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _forget_distribution(self, warn)

    return init


def _forget_distribution(estimator: Any, warn: _Once) -> None:
    """For configurations and estimators that were made before `epl.init`."""
    ignored = compat.drop_distribution(estimator)
    if ignored:
        warn(", ".join(ignored))


# Training.


def _train(original: Callable[..., Any], warn: _Once) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_distribution(self, warn)
        if not chief.several_ranks():
            return _finishing(original)(self, *args, **kwargs)
        control = chief.job_control()
        # A temporary folder is another one on each rank.
        compat.set_model_dir(self, control.decide("model_dir of the estimator", tf.compat.as_str_any(self.model_dir)))
        result = _finishing(original)(self, *args, **kwargs)
        # The chief has written its last checkpoint when this is agreed on, so that all may read it.
        control.agree("the end of Estimator.train", {})
        return result

    return train


def _start_step(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def load_global_step(folder: Any) -> int:
        if not chief.several_ranks():
            return original(folder)
        # All ranks train, or none does because max_steps is reached.
        return int(chief.job_control().decide("first step of the estimator", int(original(folder)) if chief.is_chief() else None))

    return load_global_step


def _call_model_fn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_model_fn(self: Any, features: Any, labels: Any, mode: str, config: Any) -> Any:
        env = Env.get()
        # Each evaluation has a graph of its own, which must not live for ever.
        env.epl_graphs[:] = [g for g in env.epl_graphs if not getattr(g.tf_graph, _FINISHED, False)]
        annotated = Graph.get(may_create=True)
        assert annotated is not None
        annotated.model_mode = mode
        return original(self, features, labels, mode, config)

    return call_model_fn


def _finishing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the graphs that a call makes as done with once it has returned."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = {id(g) for g in Env.get().epl_graphs}
        try:
            return original(self, *args, **kwargs)
        finally:
            _finish(known)

    return wrapper


def _predict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def predict(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        known = {id(g) for g in Env.get().epl_graphs}
        try:
            yield from original(self, *args, **kwargs)
        finally:
            _finish(known)

    return predict


def _finish(known: Set[int]) -> None:
    for graph in Env.get().epl_graphs:
        if id(graph) not in known:
            setattr(graph.tf_graph, _FINISHED, True)


# Evaluation and export during training.


def _evaluate_and_export(original: Callable[..., Any], training: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate_and_export(self: Any) -> Any:
        if not chief.several_ranks():
            return original(self)
        if Env.get().pipelined:
            return original(self)  # no rank has the whole model: all of them evaluate
        control = chief.job_control()
        topic = "evaluation by train_and_evaluate"
        if chief.is_chief():
            result, exports = original(self)
            control.decide(topic, {"status": result.status, "path": _text(result.checkpoint_path), "metrics": _packed(result.metrics),
                                   "exports": [_text(e) for e in exports]})  # fmt: skip
            return result, exports
        # The others wait here, alive, for as long as the chief evaluates.
        said = control.decide(topic)
        return training._EvalResult(said["status"], _unpacked(said["metrics"]), said["path"]), said["exports"]

    return evaluate_and_export


def _export(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def export_all_saved_models(*args: Any, **kwargs: Any) -> Any:
        if not chief.several_ranks():
            return original(*args, **kwargs)
        base = signature.bind(*args, **kwargs).arguments["export_dir_base"]
        topic = "export to %s" % tf.compat.as_str_any(base)
        control = Env.get().control
        if chief.is_chief():
            env = Env.get()
            env.whole_models = True  # the others wait, so no stage can be theirs
            try:
                path = original(*args, **kwargs)
            finally:
                env.whole_models = False
            if control is not None:
                control.decide(topic, _text(path))
            return path
        # Without a connection nobody can say where the chief's export is.
        said = control.decide(topic) if control is not None else None
        return None if said is None else tf.compat.as_bytes(said)

    return export_all_saved_models


def _text(path: Any) -> Optional[str]:
    return None if path is None else tf.compat.as_str_any(path)


def _packed(metrics: Optional[Dict[str, Any]]) -> Optional[Dict[str, str]]:
    """Metrics as JSON: each in NumPy's file format, which keeps the type."""
    if metrics is None:
        return None
    packed = {}
    for name, value in metrics.items():
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(value), allow_pickle=False)
        packed[name] = base64.b64encode(buffer.getvalue()).decode()
    return packed


def _unpacked(packed: Optional[Dict[str, str]]) -> Optional[Dict[str, Any]]:
    if packed is None:
        return None
    return {name: np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)[()] for name, text in packed.items()}
