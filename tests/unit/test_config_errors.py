"""Wrong configurations. Every message says what is wrong, where, and what would be right."""

import pytest

from epl.config import Config
from epl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("clean_environment")


def message(function, *args):
    with pytest.raises(ConfigError) as caught:
        function(*args)
    return str(caught.value)


STRATEGIES = (
    "'PreferBackward', 'PreferForward', 'PreferBackwardOptimizer', 'Interleaved', 'ZeroBubbleH1', 'ZeroBubbleH2', 'ZeroBubbleV'"
)
DICT = "(from the dict given to epl.Config)"

BAD_DICTS = [
    ("text", "epl.Config takes a dict such as {'pipeline.num_micro_batch': 4}, not 'text'"),
    (["io.slicing"], "epl.Config takes a dict such as {'pipeline.num_micro_batch': 4}, not ['io.slicing']"),
    ({3: 4}, f"a configuration key must be a string such as 'pipeline.num_micro_batch', not 3 {DICT}"),
    # Unknown keys.
    ({"pipeline.num_microbatch": 4}, f"there is no configuration key 'pipeline.num_microbatch' {DICT}; did you mean 'pipeline.num_micro_batch'?"),
    ({"pipelines.num_stages": 4}, f"there is no configuration key 'pipelines.num_stages' {DICT}; did you mean 'pipeline.num_stages'?"),
    ({"pipeline.num_apply_group": 4}, f"there is no configuration key 'pipeline.num_apply_group' {DICT}; did you mean 'optimizer.num_apply_group'?"),
    ({"Pipeline.num_stage": 4}, f"there is no configuration key 'Pipeline.num_stage' {DICT}; did you mean 'pipeline.num_stages'?"),
    ({"amp.x": 1}, f"there is no configuration key 'amp.x' {DICT}; the keys of 'amp' are: level, dtype, debug_log, loss_scale"),
    ({"x.y": 1}, f"there is no configuration key 'x.y' {DICT}; the keys are: {', '.join(Config().to_dict())}"),
    ({"io": {"slice": True}}, f"there is no configuration key 'io.slice' {DICT}; did you mean 'io.slicing'?"),
    ({"amq.level": "o1"}, f"there is no configuration key 'amq.level' {DICT}; did you mean 'amp.level'?"),
    ({"io.level": "o1"}, f"there is no configuration key 'io.level' {DICT}; did you mean 'zero.level' or 'offload.level' or 'amp.level'?"),
    ({"amp.level.o1": True}, f"there is no configuration key 'amp.level.o1' {DICT}; did you mean 'amp.level'?"),
    ({"zero": "v1"}, f"'zero' is a section and needs a dict of its keys, not 'v1' {DICT}"),
    # Types.
    ({"io.slicing": "yes"}, f"io.slicing must be True or False, not 'yes' {DICT}"),
    ({"io.slicing": 2}, f"io.slicing must be True or False, not 2 {DICT}"),
    ({"io.slicing": None}, f"io.slicing must be True or False, not None {DICT}"),
    ({"io.slicing": []}, f"io.slicing must be True or False, not [] {DICT}"),
    ({"pipeline.num_micro_batch": "four"}, f"pipeline.num_micro_batch must be an integer of at least 1, not 'four' {DICT}"),
    ({"pipeline.num_micro_batch": 4.0}, f"pipeline.num_micro_batch must be an integer of at least 1, not 4.0 {DICT}"),
    ({"pipeline.num_micro_batch": True}, f"pipeline.num_micro_batch must be an integer of at least 1, not True {DICT}"),
    ({"pipeline.num_micro_batch": None}, f"pipeline.num_micro_batch must be an integer of at least 1, not None {DICT}"),
    ({"cluster.stall_timeout": "1 min"}, f"cluster.stall_timeout must be a number greater than 0, not '1 min' {DICT}"),
    ({"cluster.stall_timeout": True}, f"cluster.stall_timeout must be a number greater than 0, not True {DICT}"),
    ({"amp.loss_scale": "static"}, f"amp.loss_scale must be 'dynamic' or a number greater than 0, not 'static' {DICT}"),
    ({"amp.loss_scale": None}, f"amp.loss_scale must be 'dynamic' or a number greater than 0, not None {DICT}"),
    ({"amp.level": 1}, f"amp.level must be one of '', 'o1', not 1 {DICT}"),
    ({"zero.level": 1}, f"zero.level must be one of '', 'v0', 'v1', 'v2', not 1 {DICT}"),
    # Ranges.
    ({"pipeline.num_micro_batch": 0}, f"pipeline.num_micro_batch must be an integer of at least 1, not 0 {DICT}"),
    ({"pipeline.num_stages": 0}, f"pipeline.num_stages must be -1 or an integer of at least 1, not 0 {DICT}"),
    ({"gradient_checkpoint.end_taskgraph": -2}, f"gradient_checkpoint.end_taskgraph must be -1 or an integer of at least 0, not -2 {DICT}"),
    ({"cluster.devices_per_worker": -1}, f"cluster.devices_per_worker must be an integer of at least 0, not -1 {DICT}"),
    ({"cluster.stall_timeout": 0}, f"cluster.stall_timeout must be a number greater than 0, not 0 {DICT}"),
    ({"cluster.stall_timeout": float("inf")}, f"cluster.stall_timeout must be a number greater than 0, not inf {DICT}"),
    ({"communication.fp16_scale": "nan"}, f"communication.fp16_scale must be a number greater than 0, not 'nan' {DICT}"),
    ({"amp.loss_scale": -1}, f"amp.loss_scale must be 'dynamic' or a number greater than 0, not -1 {DICT}"),
    # Choices.
    (
        {"communication.gradients_reduce_method": "not_sum"},
        f"communication.gradients_reduce_method must be one of 'mean', 'sum', not 'not_sum' {DICT}",
    ),
    ({"communication.aggregate_at": ""}, f"communication.aggregate_at must be one of 'raw', 'apply', not '' {DICT}"),
    ({"gradient_checkpoint.type": "all"}, f"gradient_checkpoint.type must be one of '', 'collection', 'auto', not 'all' {DICT}"),
    ({"offload.level": None}, f"offload.level must be one of '', 'v0', 'v1', 'v2', not None {DICT}"),
    (
        {"pipeline.strategy": "1f1b"},
        f"pipeline.strategy must be one of {STRATEGIES}, not '1f1b' {DICT}",
    ),
    (
        {"cluster.run_visible_devices": "0, 1"},
        f"cluster.run_visible_devices must be device numbers separated by commas, such as '0,1', or '', not '0, 1' {DICT}",
    ),
    (
        {"cluster.split_shares": "2,0"},
        f"cluster.split_shares must be whole numbers from 1 separated by commas, such as '2,1', or '', not '2,0' {DICT}",
    ),
    (
        {"cluster.run_visible_devices": [0]},
        f"cluster.run_visible_devices must be device numbers separated by commas, such as '0,1', or '', not [0] {DICT}",
    ),
]


@pytest.mark.parametrize("params, expected", BAD_DICTS, ids=[str(params) for params, _ in BAD_DICTS])
def test_bad_dict(params, expected):
    assert message(Config, params) == expected


BAD_ENVIRONMENTS = [
    ("EPL_PIPELINE_NUM_MICRO_BATCH", "0", "pipeline.num_micro_batch must be an integer of at least 1, not '0'"),
    ("EPL_PIPELINE_NUM_MICRO_BATCH", "", "pipeline.num_micro_batch must be an integer of at least 1, not ''"),
    ("EPL_IO_SLICING", "on", "io.slicing must be True or False, not 'on'"),
    ("EPL_COMMUNICATION_GRADIENTS_REDUCE_METHOD", "not_mean", "communication.gradients_reduce_method must be one of 'mean', 'sum', not 'not_mean'"),
]


@pytest.mark.parametrize("name, given, expected", BAD_ENVIRONMENTS)
def test_bad_environment_value(monkeypatch, name, given, expected):
    monkeypatch.setenv(name, given)
    assert message(Config) == f"{expected} (from the environment variable {name})"


BAD_VARIABLES = [
    ("EPL_PIPELINE_NUM_MICROBATCH", "did you mean EPL_PIPELINE_NUM_MICRO_BATCH?"),
    ("EPL_PIPELINE_num_stages", "did you mean EPL_PIPELINE_NUM_STAGES?"),
    ("EPL_ZERO_X", "there are: EPL_ZERO_LEVEL"),
    ("EPL_GRADIENT_CHECKPOINT_TYP", "did you mean EPL_GRADIENT_CHECKPOINT_TYPE?"),
]


@pytest.mark.parametrize("name, advice", BAD_VARIABLES)
def test_bad_environment_name(monkeypatch, name, advice):
    monkeypatch.setenv(name, "1")
    assert message(Config) == f"the environment variable {name} names no configuration key; {advice}"


BAD_FILES = [
    ("syntax", "io:\n  slicing: true\n  drop: [1\n", "{path}, line 4: this is not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("tab", "io:\n\tslicing: true\n", "{path}, line 2: this is not valid YAML: found character '\\t' that cannot start any token"),
    ("two documents", "a: 1\n---\nb: 2\n", "{path}, line 2: this is not valid YAML: but found another document"),
    ("control character", "io:\n  slicing: \x07\n", "{path}, line 2: this is not valid YAML: special characters are not allowed"),
    (
        "Python object",
        "amp.level: !!python/name:os.system\n",
        "{path}, line 1: this is not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'",
    ),
    ("list", "# c\n- io.slicing\n", "{path}, line 2: the file must hold a mapping of keys to values, not ['io.slicing']"),
    ("text", "io.slicing\n", "{path}, line 1: the file must hold a mapping of keys to values, not 'io.slicing'"),
    ("key is a list", "[1, 2]: 3\n", "{path}, line 1: a key must be a name such as pipeline.num_micro_batch"),
    ("section is a value", "amp:\n  level: o1\nzero: v1\n", "{path}, line 3: 'zero' is a section and needs a mapping of its keys, not 'v1'"),
    ("unknown section", "ampp:\n  level: o1\n", "there is no configuration key 'ampp' (from {path}, line 1); did you mean the section 'amp'?"),
    ("no dot", "loss_scale: 3\n", "there is no configuration key 'loss_scale' (from {path}, line 1); did you mean 'amp.loss_scale'?"),
    (
        "unknown key",
        "amp:\n  level: o1\n  loss: 3\n",
        "there is no configuration key 'amp.loss' (from {path}, line 3); did you mean 'amp.loss_scale'?",
    ),
    ("wrong value", "amp:\n\n  level: o3\n", "amp.level must be one of '', 'o1', not 'o3' (from {path}, line 3)"),
    ("no value", "amp:\n  level:\n", "amp.level must be one of '', 'o1', not None (from {path}, line 2)"),
    (
        "mapping for a value",
        "amp.loss_scale: {a: 1}\n",
        "amp.loss_scale must be 'dynamic' or a number greater than 0, not {{'a': 1}} (from {path}, line 1)",
    ),
    ("no date", "io.slicing: 2020-99-99\n", "{path}, line 1: this is not a valid value: month must be in 1..12"),
    ("twice", "amp.level: o1\namp:\n  debug_log: 1\n  level: ''\n", "{path}, line 4: 'amp.level' is already set in line 1"),
    ("encoding", b"amp.level: \xff\n", "EPL_CONFIG names the file '{path}', which is not UTF-8 text"),
]


@pytest.mark.parametrize("content, expected", [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_bad_file(config_file, content, expected):
    path = config_file(content)
    assert message(Config) == expected.format(path=path)


def test_missing_file(monkeypatch, tmp_path):
    monkeypatch.setenv("EPL_CONFIG", "/no/such/file.yaml")
    assert message(Config) == "EPL_CONFIG names the file '/no/such/file.yaml', which can't be read: No such file or directory"
    monkeypatch.setenv("EPL_CONFIG", str(tmp_path))
    assert message(Config) == f"EPL_CONFIG names the file {str(tmp_path)!r}, which can't be read: Is a directory"


BAD_ASSIGNMENTS = [
    ("pipeline", "num_micro_batch", 0, "pipeline.num_micro_batch must be an integer of at least 1, not 0"),
    ("pipeline", "num_microbatch", 4, "configuration section 'pipeline' has no key 'num_microbatch'; did you mean 'num_micro_batch'?"),
    ("pipeline", "strategy", "gpipe", f"pipeline.strategy must be one of {STRATEGIES}, not 'gpipe'"),
    ("offload", "x", 4, "configuration section 'offload' has no key 'x'; its keys are: level"),
]


@pytest.mark.parametrize("section, name, given, expected", BAD_ASSIGNMENTS)
def test_bad_assignment(section, name, given, expected):
    config = Config()
    assert message(setattr, getattr(config, section), name, given) == expected
    assert config == Config()


def test_sections_can_not_be_replaced():
    assert message(setattr, Config(), "amp", "o1") == "'amp' is a section and can't be replaced; assign its keys: level, dtype, debug_log, loss_scale"
    assert message(setattr, Config(), "pipline", 1) == "there is no configuration section 'pipline'; did you mean 'pipeline'?"


def test_reading_an_unknown_key():
    with pytest.raises(AttributeError, match="has no key 'num_stage'; did you mean 'num_stages'"):
        _ = Config().pipeline.num_stage
    assert not hasattr(Config().pipeline, "x")


def test_config_errors_are_value_errors():
    with pytest.raises(ValueError):
        Config({"communication.gradients_reduce_method": "max"})


@pytest.mark.parametrize("level", ["", None, "v0", "V1", "v2"])
def test_known_zero_level_may_be_trained_with(level):
    Config({"zero.level": level}).check_program_options()


def test_unknown_zero_level_is_refused_when_training_starts():
    config = Config({"zero.level": "v123"})
    assert message(config.check_program_options) == "zero.level must be one of '', 'v0', 'v1', 'v2', not 'v123'"
    config.zero.level = None
    config.check_program_options()
