"""Loading parts of checkpoints into a model, and saving with little extra memory."""

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from absl import logging

from epl import compat
from epl.errors import CheckpointError, ConfigError


class _Piece(NamedTuple):
    """Where a variable's value is in a checkpoint."""

    key: str
    begin: List[int]
    size: List[int]


class ShardingLoader:
    """Initialises variables from a checkpoint, from slices of it or under other names.

    `restore()` makes the variables' initializers read the checkpoint. Call it when the
    model is built and before the op that initialises the variables is, so before the
    session of a `MonitoredTrainingSession`. Variables that the checkpoint does not have
    keep their initializers.

    Args:
      ckpt: checkpoint prefix, or a folder for its latest checkpoint; None makes
        `restore()` do nothing, so that a first run needs no case of its own.
      var_list: the variables to load; None for all global variables. Partitioned
        variables may be given whole or by part; what is no variable is passed over.
      assign_map: variable op name -> name in the checkpoint, for those that differ.
        Several variables may read the same name.
      sharding_info: name in the checkpoint -> {"begin": [...], "size": [...]}, the slice
        that the variable is.
    """

    def __init__(
        self,
        ckpt: Optional[str],
        var_list: Optional[Iterable[Any]] = None,
        assign_map: Optional[Mapping[str, str]] = None,
        sharding_info: Optional[Mapping[str, Mapping[str, Sequence[int]]]] = None,
    ):
        self._ckpt = ckpt
        self._var_list = var_list
        self._assign_map = dict(assign_map or {})
        self._sharding_info = dict(sharding_info or {})

    def restore(self) -> None:
        """Make the initializers of the variables read the checkpoint.

        Raises:
          CheckpointError: no such checkpoint; a name of `assign_map` or `sharding_info`
            is not in it; or a shape or dtype that does not fit.
        """
        if self._ckpt is None:
            return
        prefix = _prefix(self._ckpt)
        reader = tf.train.load_checkpoint(prefix)
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
        self._check_names(prefix, shapes)
        found, missing = [], []  # all is checked before the first variable is touched
        variables = self._variables()
        self._warn_of_unused({n for v in variables for n in _names(v)})
        for variable in variables:
            piece = self._piece(variable, shapes)
            if piece is None:
                missing.append(variable.op.name)
                continue
            if dtypes[piece.key] != variable.dtype.base_dtype:
                raise CheckpointError(
                    "Variable '%s' is %s, but '%s' in checkpoint %s is %s"
                    % (variable.op.name, variable.dtype.base_dtype.name, piece.key, prefix, dtypes[piece.key].name)
                )
            found.append((variable, piece))
        for variable, piece in found:
            _read_initially(variable, prefix, piece, shapes[piece.key])
        if missing:
            logging.info("Checkpoint %s does not have, and so does not initialise: %s", prefix, ", ".join(sorted(missing)))

    def _variables(self) -> List[Any]:
        found: Dict[int, Any] = {}  # by identity: `==` of variables may build an op
        for item in tf.global_variables() if self._var_list is None else self._var_list:
            parts = list(item) if _is_partitioned(item) else [item]
            found.update((id(v), v) for v in parts if isinstance(v, tf2.Variable))
        return list(found.values())

    def _warn_of_unused(self, names: Set[str]) -> None:
        unused = sorted(n for n in self._assign_map if n not in names)
        if unused:
            logging.warning("assign_map names no variable that is loaded, so that these entries do nothing: %s", ", ".join(unused))

    def _check_names(self, prefix: str, shapes: Mapping[str, Any]) -> None:
        wanted = set(self._assign_map.values()) | set(self._sharding_info)
        unknown = sorted(k for k in wanted if k not in shapes)
        # A map made of all variables maps most of them to themselves: those may be absent.
        unknown = [k for k in unknown if k in self._sharding_info or any(v == k != n for n, v in self._assign_map.items())]
        if unknown:
            raise CheckpointError(
                "Checkpoint %s has no '%s', which assign_map or sharding_info names. It has: %s"
                % (prefix, "', '".join(unknown), ", ".join(sorted(shapes)))
            )

    def _piece(self, variable: Any, shapes: Mapping[str, Sequence[int]]) -> Optional[_Piece]:
        """What a variable reads, or None if the checkpoint does not have it."""
        part = compat.save_slice(variable)
        names = _names(variable)
        key = next((self._assign_map[n] for n in names if n in self._assign_map), names[-1])
        if key not in shapes:
            return None
        stored = list(shapes[key])
        info = self._sharding_info.get(key, {"begin": [0] * len(stored), "size": stored})
        begin, size = list(info["begin"]), list(info["size"])
        if len(begin) != len(stored) or len(size) != len(stored) or any(b < 0 or s < 0 or b + s > d for b, s, d in zip(begin, size, stored)):
            raise CheckpointError("sharding_info of '%s': begin %s and size %s do not lie in its shape %s" % (key, begin, size, stored))
        shape = variable.shape if part is None else tf.TensorShape(part[1])
        if not shape.is_compatible_with(size):
            raise CheckpointError(
                "Variable '%s' has the shape %s, but '%s' in the checkpoint gives %s%s; give its slice in sharding_info or leave the "
                "variable out of var_list" % (names[-1], shape.as_list(), key, size, "" if size == stored else " (a slice of %s)" % stored)
            )
        if part is None:
            return _Piece(key, begin, size)
        return _Piece(key, [b + o for b, o in zip(begin, part[2])], variable.shape.as_list())


def _names(variable: Any) -> List[str]:
    """The op name of a variable and, of a partitioned variable's part, the name of the whole."""
    part = compat.save_slice(variable)
    return [variable.op.name] if part is None else [variable.op.name, part[0]]


def _is_partitioned(item: Any) -> bool:
    return isinstance(item, (list, tuple)) or hasattr(item, "as_tensor") and hasattr(item, "__iter__")


def _prefix(ckpt: str) -> str:
    """The prefix of a checkpoint given by prefix or folder."""
    found = tf.train.latest_checkpoint(ckpt) if tf.gfile.IsDirectory(ckpt) else ckpt
    if not found or not tf.gfile.Exists(found + ".index"):
        raise CheckpointError("There is no checkpoint '%s'; give a prefix such as 'folder/model.ckpt-100', or a folder with checkpoints" % ckpt)
    return found


def _read_initially(variable: Any, prefix: str, piece: _Piece, stored: Sequence[int]) -> None:
    """Replace a variable's initializer by an assignment of a piece of a checkpoint."""
    is_slice = list(piece.size) != list(stored)
    spec = "%s %s" % (" ".join(map(str, stored)), ":".join("%d,%d" % bs for bs in zip(piece.begin, piece.size))) if is_slice else ""
    # RestoreV2 exists on CPUs only. Colocating it with the variable would pull the variable there.
    with tf.control_dependencies(None), tf.device(variable.device), tf.device("/device:CPU:0"):
        value = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[piece.key],
            shape_and_slices=[spec],
            dtypes=[variable.dtype.base_dtype],
            name=variable.op.name + "/checkpoint_value",
        )[0]
    value.set_shape(piece.size)
    with tf.control_dependencies(None), tf.device(variable.device):
        initializer = variable.assign(value, read_value=False, name=variable.op.name + "/checkpoint_initializer")
    compat.set_variable_initializer(variable, value, getattr(initializer, "op", initializer))


class MemoryEfficientBuilder(compat.GroupingSaverBuilder):
    """Saves in small files one after the other, so that few variables are in host memory at once.

    For `tf.train.Saver(sharded=True, restore_sequentially=True, builder=MemoryEfficientBuilder())`.
    A file begins to be gathered from the devices when the file before it, on the same
    host, is written; a restore goes the same way. The result is one checkpoint as
    always, which any `Saver` reads.

    Args:
      sharded_size: most bytes of variables in one file; a larger variable has one of its own.

    Raises:
      ValueError: `sharded_size` is below 1.
    """

    def __init__(self, sharded_size: int = 50 * 1024 * 1024):
        super().__init__()
        if sharded_size < 1:
            raise ConfigError("sharded_size=%r: expected a number of bytes, 1 or more" % sharded_size)
        self._sharded_size = sharded_size
        self._last: Dict[Tuple[str, str], Any] = {}

    def regroup(self, groups: List[Tuple[str, List[Any]]]) -> List[Tuple[str, List[Any]]]:
        """Cut each device's variables, in order, into groups of at most `sharded_size` bytes."""
        self._last = {}
        smaller: List[Tuple[str, List[Any]]] = []
        for device, saveables in groups:
            room = 0
            for saveable in saveables:
                size = _saveable_bytes(saveable)
                if size > room or not smaller or smaller[-1][0] != device:
                    smaller.append((device, []))
                    room = self._sharded_size
                smaller[-1][1].append(saveable)
                room -= size
        return smaller

    def before(self, kind: str, saveables: List[Any]) -> List[Any]:
        last = self._last.get((kind, _host(saveables)))
        return [] if last is None else [last]

    def built(self, kind: str, saveables: List[Any], op: Any) -> None:
        self._last[(kind, _host(saveables))] = op

    def save_op(self, filename_tensor: Any, saveables: List[Any]) -> Any:
        """One SaveV2 op whose inputs leave their devices only when the file's turn has come."""
        names, slices, tensors = [], [], []
        for saveable in saveables:
            for spec in saveable.specs:
                names.append(spec.name)
                slices.append(spec.slice_spec)
                with tf.device(spec.device):
                    # A reference variable has its value ready at any time: this waits with sending it.
                    tensors.append(tf.identity(spec.tensor))
        return tf.raw_ops.SaveV2(prefix=filename_tensor, tensor_names=names, shape_and_slices=slices, tensors=tensors)


def _host(saveables: List[Any]) -> str:
    """The job and task of a group's device."""
    spec = tf.DeviceSpec.from_string(saveables[0].device or "")
    return "%s:%s:%s" % (spec.job, spec.replica, spec.task)


def _saveable_bytes(saveable: Any) -> int:
    """Bytes of what is saved of one object; 0 when its shape or element size is unknown."""
    shape = getattr(saveable.op, "shape", None)
    elements = tf.TensorShape(shape).num_elements() if shape is not None else None
    return sum((elements or 0) * spec.dtype.base_dtype.size for spec in saveable.specs)
