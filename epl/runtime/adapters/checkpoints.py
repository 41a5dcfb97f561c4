"""Adapter of checkpoints and exports: only the chief writes them, and plain TensorFlow can read them."""

import functools
import inspect
import os
from typing import Any, Callable, Optional

import tensorflow.compat.v1 as tf

from epl import compat
from epl.cluster.default_device import default_device, host_device
from epl.env import Env
from epl.ir import op_table
from epl.runtime import chief, loss_scale
from epl.runtime.adapters import Patches
from epl.runtime.adapters.sessions import rank_session


def install(patches: Patches) -> None:
    chief.forget()
    management = compat.checkpoint_management()
    patches.replace(tf.train.Saver, "save", _save)
    patches.replace(tf.train.Saver, "restore", _restore)
    _replace_function(patches, "update_checkpoint_state_internal", management.update_checkpoint_state_internal, _chief_only)
    patches.replace(management, "_delete_file_if_exists", _chief_only)
    for name in ("latest_checkpoint", "get_checkpoint_state"):
        _replace_function(patches, name, getattr(management, name), _settling("checkpoint_dir"))
    _replace_function(patches, "load_checkpoint", compat.checkpoint_reader_function(), _settling("ckpt_dir_or_file"))
    _replace_function(patches, "write_graph", compat.write_graph_function(), _write_graph)
    patches.replace(compat.meta_graph_module(), "create_meta_graph_def", _create_meta_graph)
    _replace_function(patches, "convert_variables_to_constants", tf.graph_util.convert_variables_to_constants, _freeze)
    _replace_function(patches, "load", compat.saved_model_load_function(), _settling("export_dir"))
    builder = tf.saved_model.Builder
    patches.replace(builder, "__init__", _builder_init)
    patches.replace(builder, "add_meta_graph", _chief_only)
    patches.replace(builder, "add_meta_graph_and_variables", _add_variables)
    patches.replace(builder, "save", _builder_save)


def _replace_function(patches: Patches, name: str, function: Any, make: Callable[[Any], Any]) -> None:
    for owner in compat.modules_with(name, function):
        patches.replace(owner, name, make)


def _chief_only(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if chief.is_chief() else None

    return wrapper


def _settling(argument: str) -> Callable[[Any], Any]:
    """Whoever reads the path that is given as `argument` must find what this rank believes to have written there."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not chief.is_chief():
                path = signature.bind(*args, **kwargs).arguments.get(argument)
                if path is not None:
                    chief.settle(os.fspath(path))
            return original(*args, **kwargs)

        return wrapper

    return make


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if chief.is_chief():
            path = original(*args, **kwargs)
            if path is not None:
                chief.written(path)
            return path
        # The same program and bookkeeping, without files: other passes take the writing out of it.
        given = signature.bind(*args, **kwargs)
        given.arguments["write_meta_graph"] = False
        path = original(*given.args, **given.kwargs)
        if path is not None:
            chief.expect(path)
        return path

    return save


def _restore(original: Callable[..., None]) -> Callable[..., None]:
    settled = _settling("save_path")(original)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def restore(*args: Any, **kwargs: Any) -> None:
        settled(*args, **kwargs)
        path = signature.bind(*args, **kwargs).arguments.get("save_path")
        if path is not None and loss_scale.is_dynamic():
            loss_scale.current().load(path)

    return restore


# Graphs that are written down.


def without_default_device(graph_def: tf.GraphDef) -> tf.GraphDef:
    """Take the devices that EPL gave the ops out of a GraphDef, in place; the user's own stay.

    A plain session knows no job named worker, and would refuse to place the ops.
    """
    name = _default_device()
    if name is None:
        return graph_def
    default = tf.DeviceSpec.from_string(name)
    env = Env.get()
    host = host_device(env.cluster) if env.config.offload.level else None
    known = {}

    def plain(device: str) -> str:
        if device not in known:
            spec = tf.DeviceSpec.from_string(device)
            if (spec.job, spec.replica, spec.task) != (default.job, default.replica, default.task):
                known[device] = device
            elif (spec.device_type, spec.device_index) == (default.device_type, default.device_index):
                known[device] = ""
            else:
                known[device] = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index).to_string()
        return known[device]

    for nodes in [graph_def.node] + [f.node_def for f in graph_def.library.function]:
        for node in nodes:
            if node.device == host and node.op in op_table.VARIABLES:
                node.device = ""
            elif node.device:
                node.device = plain(node.device)
    return graph_def


def _default_device() -> Optional[str]:
    env = Env.get()
    return default_device(env.cluster) if env.initialized and env.cluster is not None else None


def _create_meta_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_meta_graph_def(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        without_default_device(made.graph_def)
        return made

    return create_meta_graph_def


def _freeze(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert_variables_to_constants(*args: Any, **kwargs: Any) -> Any:
        return without_default_device(original(*args, **kwargs))

    return convert_variables_to_constants


def _write_graph(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def write_graph(graph_or_graph_def: Any, logdir: Any, name: str, as_text: bool = True) -> str:
        if not chief.is_chief():
            return os.path.join(logdir, name)
        if _default_device() is not None:
            if isinstance(graph_or_graph_def, tf.Graph):
                graph_or_graph_def = without_default_device(graph_or_graph_def.as_graph_def())
            elif isinstance(graph_or_graph_def, tf.GraphDef):
                copy = tf.GraphDef()
                copy.CopyFrom(graph_or_graph_def)
                graph_or_graph_def = without_default_device(copy)
        return original(graph_or_graph_def, logdir, name, as_text)

    return write_graph


# SavedModels.


def _builder_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, export_dir: Any) -> None:
        if chief.is_chief():
            original(self, export_dir)
        self.__dict__["_epl_export_dir"] = export_dir

    return init


def _add_variables(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def add_meta_graph_and_variables(self: Any, sess: Any, *args: Any, **kwargs: Any) -> None:
        if chief.is_chief():
            original(self, sess, *args, **kwargs)
            return
        ranked = rank_session(sess)
        if ranked is None or not ranked.plan.is_shared:
            return
        # The variables of stages that lie here: the chief saves with the same nodes at the same time.
        saver = signature.bind(self, sess, *args, **kwargs).arguments.get("saver")
        with sess.graph.as_default():
            saver = saver or tf.train.Saver(compat.all_saveables(), sharded=True, write_version=tf.train.SaverDef.V2, allow_empty=True)
        constants = tf.saved_model.constants
        folder = os.path.join(tf.compat.as_str_any(self.__dict__["_epl_export_dir"]), constants.VARIABLES_DIRECTORY)
        saver.save(sess, os.path.join(folder, constants.VARIABLES_FILENAME), write_meta_graph=False, write_state=False)

    return add_meta_graph_and_variables


def _builder_save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(self: Any, as_text: bool = False) -> Any:
        folder = tf.compat.as_str_any(self.__dict__.get("_epl_export_dir", ""))
        if chief.is_chief():
            path = original(self, as_text)
            chief.written(folder)
            return path
        chief.expect(folder)
        name = tf.saved_model.constants.SAVED_MODEL_FILENAME_PBTXT if as_text else tf.saved_model.constants.SAVED_MODEL_FILENAME_PB
        return tf.compat.as_bytes(os.path.join(folder, name))

    return save
