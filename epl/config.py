"""The configuration of EPL: where values come from, and which one wins.

defaults < environment `EPL_<SECTION>_<KEY>` < dict in the script < YAML file named by
`EPL_CONFIG` < assignment to an attribute. The keys are in `epl.config_sections`.
"""

import os
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Type

from absl import logging

from epl.config_file import read_settings
from epl.config_keys import Key, Section, hint, nearest
from epl.config_sections import (
    SECTIONS,
    AmpSection,
    AutoSection,
    ClusterSection,
    CommunicationSection,
    GradientCheckpointSection,
    IoSection,
    OffloadSection,
    OptimizerSection,
    PipelineSection,
    ZeroSection,
)
from epl.errors import ConfigError

FILE_VARIABLE = "EPL_CONFIG"
"""The environment variable that names the YAML file."""

_SECTIONS: Dict[str, Type[Section]] = {section._name: section for section in SECTIONS}
_KEYS: Dict[str, Key[Any]] = {key.path: key for section in SECTIONS for key in section._keys.values()}

Setting = Tuple[str, Any, str]
"""Path of a key, the value as given, and where it was found (for error messages)."""


class KeyInfo(NamedTuple):
    """The description of one key, for documentation and tools."""

    path: str
    """`section.key`"""

    type_name: str
    default: Any

    values: str
    """The allowed values as Markdown, without words of any language."""

    choices: Tuple[str, ...]
    """All allowed values, where they can be listed."""

    environment: str
    """The environment variable that sets it."""

    per_rank: bool
    """Whether the ranks of a job may have different values."""

    english: str
    chinese: str


class SectionInfo(NamedTuple):
    """The description of one section."""

    name: str
    english: str
    chinese: str
    keys: List[KeyInfo]


def schema() -> List[SectionInfo]:
    """All sections and keys, in the order of the documentation."""
    return [
        SectionInfo(
            section._name,
            section.__doc__ or "",
            section._chinese,
            [
                KeyInfo(
                    key.path,
                    key.type_name,
                    key.default,
                    key.values,
                    tuple(key.choices),
                    environment_name(key.path),
                    key.per_rank,
                    key.english,
                    key.chinese,
                )
                for key in section._keys.values()
            ],
        )
        for section in SECTIONS
    ]


def environment_name(path: str) -> str:
    """The environment variable of a key.

    >>> environment_name("pipeline.num_stages")
    'EPL_PIPELINE_NUM_STAGES'
    """
    return "EPL_" + path.replace(".", "_").upper()


class Config:
    """All options of EPL, `config.<section>.<key>`.

    Building one reads the environment and the file named by `EPL_CONFIG`; both and
    `param_dict` ({"section.key": value}) are checked at once. Later assignments to
    attributes are checked too. Any mistake is a `ConfigError`.
    """

    auto: AutoSection
    pipeline: PipelineSection
    gradient_checkpoint: GradientCheckpointSection
    zero: ZeroSection
    offload: OffloadSection
    amp: AmpSection
    cluster: ClusterSection
    communication: CommunicationSection
    io: IoSection
    optimizer: OptimizerSection

    def __init__(self, param_dict: Optional[Mapping[str, Any]] = None):
        for section in SECTIONS:
            self.__dict__[section._name] = section()
        self._apply(_from_environment(os.environ))
        if param_dict is not None:
            self._apply(_from_dict(param_dict))
        path = os.environ.get(FILE_VARIABLE)
        if path:
            self._apply(read_settings(path, FILE_VARIABLE, list(_SECTIONS)))

    def _apply(self, settings: Iterator[Setting]) -> None:
        for path, value, source in settings:
            key = _KEYS.get(path)
            if key is None:
                raise ConfigError(f"there is no configuration key {path!r} (from {source}); {_hint(path)}")
            # Not by assignment, whose messages know no source.
            self.__dict__[key.section].__dict__[key.name] = key.convert(value, source)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SECTIONS:
            raise ConfigError(f"{name!r} is a section and can't be replaced; assign its keys: {', '.join(_SECTIONS[name]._keys)}")
        raise ConfigError(f"there is no configuration section {name!r}; {hint(name, list(_SECTIONS), 'the sections are')}")

    def to_dict(self, per_rank: bool = True) -> Dict[str, Any]:
        """The values of all keys as {"section.key": value}.

        `per_rank=False` leaves out the keys in which ranks may differ: what remains
        must be equal on all ranks of a job.
        """
        return {path: getattr(self.__dict__[key.section], key.name) for path, key in _KEYS.items() if per_rank or not key.per_rank}

    def check_program_options(self) -> None:
        """Refuse values that can be set but not trained with. Called when training starts.

        `zero.level` is the one such key: the original accepts any name, and None, there,
        and takes an unknown one for "off". So `Config({"zero.level": "v123"})` is no
        error, but a program trained under it is: it would not save the memory that
        the script asks for.
        """
        values = self.to_dict()
        for path, key in _KEYS.items():
            key.check_program(values[path])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = {path: value for path, value in self.to_dict().items() if value != _KEYS[path].default}
        return f"Config({changed or ''})"


def _hint(path: str) -> str:
    """What was likely meant by a path that names no key, or what there is instead."""
    section, dot, name = path.partition(".") if "." in path else ("", "", path)
    guess = nearest(section, _SECTIONS) if section not in _SECTIONS else None
    if f"{guess}.{name}" in _KEYS:
        return f"did you mean '{guess}.{name}'?"
    same_name = [repr(other) for other, key in _KEYS.items() if key.name == name]
    if same_name:
        return f"did you mean {' or '.join(same_name)}?"
    if section in _SECTIONS:
        guess = nearest(name, _SECTIONS[section]._keys)
        return f"did you mean '{section}.{guess}'?" if guess else f"the keys of {section!r} are: {', '.join(_SECTIONS[section]._keys)}"
    if not dot and nearest(name, _SECTIONS):
        return f"did you mean the section {nearest(name, _SECTIONS)!r}?"
    return hint(path, list(_KEYS), "the keys are")


def _from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Settings in `EPL_<SECTION>_<KEY>`; other variables that start with EPL_ are not ours."""
    paths = {environment_name(path): path for path in _KEYS}
    for variable in sorted(environment):
        if variable in paths:
            yield paths[variable], environment[variable], f"the environment variable {variable}"
            continue
        for name, section in _SECTIONS.items():
            prefix = environment_name(name) + "_"
            if variable.upper().startswith(prefix):
                guess = nearest(variable[len(prefix) :].lower(), section._keys)
                names = [environment_name(key.path) for key in section._keys.values() if guess in (None, key.name)]
                advice = f"did you mean {names[0]}?" if guess else f"there are: {', '.join(names)}"
                raise ConfigError(f"the environment variable {variable} names no configuration key; {advice}")


def _from_dict(params: Mapping[str, Any]) -> Iterator[Setting]:
    """Settings in a dict; keys with a dot, or a section's name with a dict of its keys."""
    source = "the dict given to epl.Config"
    if not isinstance(params, Mapping):
        raise ConfigError(f"epl.Config takes a dict such as {{'pipeline.num_micro_batch': 4}}, not {params!r}")
    for name, value in params.items():
        if not isinstance(name, str):
            raise ConfigError(f"a configuration key must be a string such as 'pipeline.num_micro_batch', not {name!r} (from {source})")
        if name in _SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name!r} is a section and needs a dict of its keys, not {value!r} (from {source})")
            for key, inner in value.items():
                yield f"{name}.{key}", inner, source
        elif "." in name:
            yield name, value, source
        else:
            logging.warning("The configuration key %r is ignored: keys have the form 'section.key'; %s", name, _hint(name))
