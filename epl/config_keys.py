"""What a configuration key is: its type, default, allowed values and documentation.

A key is a data descriptor. So a section is an ordinary class that lists its keys,
every assignment is validated, and the documentation is read from the same place.
"""

import difflib
import math
import numbers
import re
from typing import TYPE_CHECKING, Any, Dict, Generic, Iterable, Optional, Sequence, Type, TypeVar, Union, overload

from epl.errors import ConfigError

T = TypeVar("T")
K = TypeVar("K", bound="Key[Any]")


def nearest(name: str, names: Iterable[str]) -> Optional[str]:
    """The one of `names` that `name` was most likely meant to be, or None.

    >>> nearest("num_microbatch", ["num_stages", "num_micro_batch"])
    'num_micro_batch'
    """
    names = list(names)
    found = difflib.get_close_matches(name, names, n=1)
    if not found and name:
        found = [other for other in names if other.startswith(name)]  # "loss" is far from "loss_scale"
    return found[0] if found else None


def hint(name: str, names: Sequence[str], what: str) -> str:
    """The end of a message about an unknown name: the nearest one, else all there are."""
    guess = nearest(name, names)
    return f"did you mean {guess!r}?" if guess else f"{what}: {', '.join(names)}"


class Key(Generic[T]):
    """One entry of a section.

    A subclass says which values there are (`expected`, `values`, `choices`) and turns
    what a dict, an environment variable or a file holds into one of them (`parse`).
    """

    type_name = ""
    """Name of the type, for the documentation."""

    expected = ""
    """The allowed values as the end of the sentence "the key must be ..."."""

    values = ""
    """The allowed values as the documentation's tables show them (Markdown, no words)."""

    choices: Sequence[str] = ()
    """All allowed values, where they can be listed."""

    def __init__(self, default: T, english: str, chinese: str, per_rank: bool = False):
        """`per_rank`: the ranks of one job may have different values."""
        self.default = default
        self.english = english
        self.chinese = chinese
        self.per_rank = per_rank
        self.section = self.name = self.path = ""

    def __set_name__(self, owner: Type["Section"], name: str) -> None:
        self.section, self.name = owner._name, name
        self.path = f"{self.section}.{name}"

    @overload
    def __get__(self: K, section: None, owner: type) -> K: ...

    @overload
    def __get__(self, section: "Section", owner: type) -> T: ...

    def __get__(self: K, section: Optional["Section"], owner: type) -> Union[K, T]:
        if section is None:
            return self
        return section.__dict__[self.name]

    def __set__(self, section: "Section", value: Any) -> None:
        section.__dict__[self.name] = self.convert(value)

    def convert(self, value: Any, source: str = "") -> T:
        """The checked value of this key, or a ConfigError that quotes `source`."""
        try:
            return self.parse(value)
        except (ValueError, TypeError, OverflowError):
            raise self.error(value, source) from None

    def error(self, value: Any, source: str = "") -> ConfigError:
        origin = f" (from {source})" if source else ""
        return ConfigError(f"{self.path} must be {self.expected}, not {value!r}{origin}")

    def parse(self, value: Any) -> T:
        """The value as this key's type; any ValueError or TypeError means "not allowed"."""
        raise NotImplementedError

    def check_program(self, value: T) -> None:
        """Refuse a value that can be set but not trained with."""


class BoolKey(Key[bool]):
    type_name = "bool"
    expected = "True or False"
    values = "`True`, `False`"

    _names = {"true": True, "1": True, "false": False, "0": False}

    def parse(self, value: Any) -> bool:
        if isinstance(value, str):
            value = self._names.get(value.lower())
        # `==` and not `is`: numpy's booleans and the numbers 0 and 1 are welcome.
        if value is None or isinstance(value, (str, bytes)) or value not in (0, 1):
            raise ValueError
        return bool(value)


class IntKey(Key[int]):
    """An integer of at least `minimum`; `unset`, if given, is one more allowed value."""

    type_name = "int"

    def __init__(self, default: int, english: str, chinese: str, minimum: int, unset: Optional[int] = None, per_rank: bool = False):
        super().__init__(default, english, chinese, per_rank)
        self.minimum = minimum
        self.unset = unset
        alone = "" if unset is None else f"{unset} or "
        self.expected = f"{alone}an integer of at least {minimum}"
        self.values = ("" if unset is None else f"`{unset}`, ") + f"≥ {minimum}"

    def parse(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (str, numbers.Integral)):
            raise TypeError
        number = int(value)
        if number < self.minimum and number != self.unset:
            raise ValueError
        return number


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError
    return number


class PositiveKey(Key[float]):
    type_name = "float"
    expected = "a number greater than 0"
    values = "> 0"

    def parse(self, value: Any) -> float:
        return _positive(value)


class LossScaleKey(Key[Union[str, float]]):
    type_name = "str, float"
    expected = "'dynamic' or a number greater than 0"
    values = '`"dynamic"`, > 0'

    def parse(self, value: Any) -> Union[str, float]:
        if isinstance(value, str) and value.lower() == "dynamic":
            return "dynamic"
        return _positive(value)


class ChoiceKey(Key[str]):
    """One of a few names; upper and lower case are the same, the value is lower case."""

    type_name = "str"

    def __init__(self, default: str, choices: Sequence[str], english: str, chinese: str):
        super().__init__(default, english, chinese)
        self.choices = tuple(choices)
        self.expected = "one of " + ", ".join(repr(x) for x in choices)
        self.values = ", ".join(f'`"{x}"`' for x in choices)

    def parse(self, value: Any) -> str:
        lowered = value.lower() if isinstance(value, str) else None
        if lowered not in [x.lower() for x in self.choices]:
            raise ValueError
        return lowered


class NameKey(ChoiceKey):
    """A choice whose spelling is kept when it is assigned to the attribute."""

    def __set__(self, section: "Section", value: Any) -> None:
        self.convert(value)
        section.__dict__[self.name] = value


class LateChoiceKey(ChoiceKey):
    """A choice that takes any name, and None for "", until a program is to be trained."""

    def parse(self, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            raise TypeError
        return value.lower()

    def check_program(self, value: str) -> None:
        if value not in self.choices:
            raise self.error(value)


class DeviceListKey(Key[str]):
    type_name = "str"
    expected = "device numbers separated by commas, such as '0,1', or ''"
    values = '`""`, `"0,1"`, ...'

    def parse(self, value: Any) -> str:
        if type(value) is int:  # in YAML a single device is a number
            value = str(value)
        if not re.match(r"(\d+(,\d+)*)?\Z", value):
            raise ValueError
        return value


class ShareListKey(Key[str]):
    type_name = "str"
    expected = "whole numbers from 1 separated by commas, such as '2,1', or ''"
    values = '`""`, `"2,1"`, ...'

    def parse(self, value: Any) -> str:
        if not re.match(r"([1-9]\d*(,[1-9]\d*)+)?\Z", value):
            raise ValueError
        return value


class Section:
    """A group of keys. Its public attributes are its keys, nothing else."""

    _name = ""
    _chinese = ""
    _keys: Dict[str, Key[Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._keys = {name: key for name, key in vars(cls).items() if isinstance(key, Key)}

    def __init__(self) -> None:
        for name, key in self._keys.items():
            self.__dict__[name] = key.default

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._keys:
            raise ConfigError(self._no_such(name))
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # type checkers shall report unknown attributes themselves

        def __getattr__(self, name):
            raise AttributeError(self._no_such(name))

    def _no_such(self, name: str) -> str:
        what = "its keys are"
        return f"configuration section {self._name!r} has no key {name!r}; {hint(name, list(self._keys), what)}"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"
