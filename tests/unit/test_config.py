"""Configuration: defaults, types, the sources and their order. The errors are in test_config_errors.py."""

import copy
import pickle

import numpy as np
import pytest

from epl.config import Config, environment_name, schema
from epl.config_sections import ZeroSection

DEFAULTS = {
    "auto.auto_parallel": False,
    "pipeline.num_stages": -1,
    "pipeline.num_micro_batch": 1,
    "pipeline.strategy": "PreferBackward",
    "pipeline.stages_per_device": 1,
    "pipeline.accumulate_in_run": False,
    "gradient_checkpoint.type": "",
    "gradient_checkpoint.end_taskgraph": -1,
    "gradient_checkpoint.memory_limit": 0,
    "gradient_checkpoint.check_gradients": False,
    "zero.level": "",
    "offload.level": "",
    "amp.level": "",
    "amp.debug_log": False,
    "amp.dtype": "float16",
    "amp.loss_scale": "dynamic",
    "cluster.device_place_prefer_intra_node": True,
    "cluster.run_visible_devices": "",
    "cluster.colocate_split_and_replicate": False,
    "cluster.devices_per_worker": 0,
    "cluster.split_shares": "",
    "cluster.batch_shares": "",
    "cluster.stall_timeout": 60.0,
    "communication.num_communicators": 2,
    "communication.sparse_as_dense": False,
    "communication.max_splits": 5,
    "communication.fp16": False,
    "communication.fp16_scale": 128.0,
    "communication.clip_after_allreduce": False,
    "communication.aggregate_at": "raw",
    "communication.gradients_reduce_method": "mean",
    "communication.statistics_reduce": "mean",
    "communication.sync_batch_norm": False,
    "io.slicing": False,
    "io.unbalanced_io_slicing": False,
    "io.drop_last_files": False,
    "optimizer.num_apply_group": 1,
}


pytestmark = pytest.mark.usefixtures("clean_environment")


def value(config, path):
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


# Values and types.


def test_defaults():
    assert Config().to_dict() == DEFAULTS
    assert {path: type(v) for path, v in Config().to_dict().items()} == {path: type(v) for path, v in DEFAULTS.items()}


def test_sections_have_only_keys_as_public_attributes():
    config = Config()
    found = {f"{name}.{key}" for name in vars(config) for key in dir(getattr(config, name)) if not key.startswith("_")}
    assert found == set(DEFAULTS)


@pytest.mark.parametrize("path", sorted(DEFAULTS))
def test_default_value_is_a_valid_value(path):
    assert value(Config({path: DEFAULTS[path]}), path) in (DEFAULTS[path], str(DEFAULTS[path]).lower())


CONVERSIONS = [
    # key, value given, value of the key
    ("auto.auto_parallel", "True", True),
    ("auto.auto_parallel", "TRUE", True),
    ("auto.auto_parallel", "1", True),
    ("auto.auto_parallel", 1, True),
    ("auto.auto_parallel", np.bool_(True), True),
    ("cluster.device_place_prefer_intra_node", "false", False),
    ("cluster.device_place_prefer_intra_node", 0, False),
    ("gradient_checkpoint.end_taskgraph", "5", 5),
    ("gradient_checkpoint.end_taskgraph", "-1", -1),
    ("gradient_checkpoint.end_taskgraph", 0, 0),
    ("pipeline.num_micro_batch", np.int64(4), 4),
    ("cluster.stall_timeout", "1.5", 1.5),
    ("cluster.stall_timeout", 3, 3.0),
    ("communication.fp16_scale", "256", 256.0),
    ("amp.loss_scale", "Dynamic", "dynamic"),
    ("amp.loss_scale", "128", 128.0),
    ("amp.loss_scale", 128, 128.0),
    ("amp.loss_scale", np.float32(0.5), 0.5),
    ("amp.level", "O1", "o1"),
    ("gradient_checkpoint.type", "Auto", "auto"),
    ("zero.level", "V1", "v1"),
    ("zero.level", "v123", "v123"),
    ("zero.level", None, ""),
    ("offload.level", "V0", "v0"),
    ("communication.gradients_reduce_method", "SUM", "sum"),
    ("communication.statistics_reduce", "First", "first"),
    ("pipeline.strategy", "PREFERFORWARD", "preferforward"),
    ("cluster.run_visible_devices", "0,4,7", "0,4,7"),
    ("cluster.run_visible_devices", 3, "3"),
]


@pytest.mark.parametrize("path, given, expected", CONVERSIONS)
def test_conversion_in_dict(path, given, expected):
    converted = value(Config({path: given}), path)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize("path, given, expected", [c for c in CONVERSIONS if isinstance(c[1], str)])
def test_conversion_in_environment(monkeypatch, path, given, expected):
    monkeypatch.setenv(environment_name(path), given)
    converted = value(Config(), path)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize("path, given, expected", CONVERSIONS)
def test_conversion_in_assignment(path, given, expected):
    config = Config()
    section, key = path.split(".")
    setattr(getattr(config, section), key, given)
    if path == "pipeline.strategy":
        expected = given  # kept as typed
    assert value(config, path) == expected


def test_configs_do_not_share_values():
    one, other = Config(), Config()
    one.pipeline.num_micro_batch = 4
    assert other.pipeline.num_micro_batch == 1


# Sources.


def test_sources_in_order(monkeypatch, config_file):
    keys = ["communication.max_splits", "communication.num_communicators", "pipeline.num_micro_batch", "optimizer.num_apply_group"]
    for path in keys[1:]:
        monkeypatch.setenv(environment_name(path), "10")
    config_file("optimizer.num_apply_group: 30\n")
    config = Config({path: 20 for path in keys[2:]})
    assert [value(config, path) for path in keys] == [5, 10, 20, 30]
    config.optimizer.num_apply_group = 40
    assert config.optimizer.num_apply_group == 40


def test_environment_is_read_when_the_config_is_built(monkeypatch):
    before = Config()
    monkeypatch.setenv("EPL_IO_SLICING", "True")
    assert (before.io.slicing, Config().io.slicing) == (False, True)


@pytest.mark.parametrize(
    "name", ["EPL_CONFIG", "EPL_TIMELINE", "EPL_DUMP_PASSES", "EPL_ENV_CACHE", "EPL_PYTHON", "EPL_PIPELINES_X", "EPL_IO", "EPL_GRADIENT_X"]
)
def test_variables_of_no_section_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert Config() == Config({})


@pytest.mark.parametrize(
    "text",
    [
        "pipeline:\n  num_micro_batch: 4\n  strategy: PreferForward\namp:\n  loss_scale: 64\n",
        "pipeline.num_micro_batch: 4\npipeline.strategy: PreferForward\namp.loss_scale: 64\n",
        "# mixed\namp: {loss_scale: '64'}\npipeline.num_micro_batch: 4\npipeline:\n  strategy: PreferForward\n  # num_stages: 2\nzero:\n",
    ],
)
def test_file_forms(config_file, text):
    config_file(text)
    assert repr(Config()) == "Config({'pipeline.num_micro_batch': 4, 'pipeline.strategy': 'preferforward', 'amp.loss_scale': 64.0})"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file(config_file, text):
    config_file(text)
    assert Config().to_dict() == DEFAULTS


def test_nested_dict():
    assert Config({"pipeline": {"num_micro_batch": 4}, "io": {}}).pipeline.num_micro_batch == 4


@pytest.mark.parametrize(
    "key, advice",
    [
        ("loss_scale", "did you mean 'amp.loss_scale'?"),
        ("num_micro_batches", "did you mean 'pipeline.num_micro_batch'?"),
    ],
)
def test_key_without_dot_is_ignored_with_a_warning(monkeypatch, key, advice):
    warnings = []
    monkeypatch.setattr("absl.logging.warning", lambda text, *args: warnings.append(text % args))
    assert Config({key: 128, "amp.level": "o1"}).to_dict() == dict(DEFAULTS, **{"amp.level": "o1"})
    assert warnings == [f"The configuration key {key!r} is ignored: keys have the form 'section.key'; {advice}"]


# As a value.


def test_equality_and_copies():
    config = Config({"pipeline.num_micro_batch": 4})
    assert config == Config({"pipeline.num_micro_batch": "4"})
    assert config != Config()
    assert config.io == Config().io != config.pipeline
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        twin.pipeline.num_micro_batch = 8
        assert config.pipeline.num_micro_batch == 4


def test_repr_builds_an_equal_config():
    config = Config({"pipeline.num_micro_batch": 4, "amp.level": "O1"})
    assert repr(config) == "Config({'pipeline.num_micro_batch': 4, 'amp.level': 'o1'})"
    assert eval(repr(config)) == config
    assert repr(Config()) == "Config()"
    assert repr(config.zero) == "ZeroSection(level='')"


def test_dict_of_what_ranks_must_share():
    assert set(DEFAULTS) - set(Config().to_dict(per_rank=False)) == {"cluster.run_visible_devices", "cluster.devices_per_worker"}


def test_schema():
    keys = {key.path: key for section in schema() for key in section.keys}
    assert {path: key.default for path, key in keys.items()} == DEFAULTS
    level = keys["zero.level"]
    assert (level.type_name, level.choices, level.environment, level.per_rank) == ("str", ("", "v0", "v1", "v2"), "EPL_ZERO_LEVEL", False)
    assert level.english == ZeroSection.level.english
    assert len({key.environment for key in keys.values()}) == len(keys)
