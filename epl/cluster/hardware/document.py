"""Plain data that people write, and where each of its values stands, for error messages."""

import difflib
import pathlib
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import yaml

from epl.cluster.hardware.units import Quantity, read
from epl.errors import ClusterError

Path = Tuple[Union[str, int], ...]


class Document:
    """Data with a name and, if it was a file, the line of each entry.

    Attributes:
      name: the file, or what the data is.
      data: plain values: dicts, lists, texts, numbers.
      lines: path of an entry -> its line, from 1.
    """

    def __init__(self, name: str, data: Any, lines: Optional[Mapping[Path, int]] = None):
        self.name = name
        self.data = data
        self.lines = lines or {}

    @property
    def root(self) -> "Item":
        return Item(self, (), self.data)

    def place(self, path: Path) -> str:
        """For example "cluster.yaml, line 7: nodes[1].devices"."""
        line = next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), None)
        text = ""
        for step in path:
            text += "[%d]" % step if isinstance(step, int) else ("." if text else "") + str(step)
        return self.name + (", line %d" % line if line else "") + (": " + text if text else "")


def read_file(path: Union[str, pathlib.Path], what: str) -> Document:
    """A YAML file. Raises ClusterError that names the file, what is expected in it, and the line of an error."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ClusterError("%s is not UTF-8 text; expected %s in YAML" % (path, what)) from None
    except OSError as error:
        raise ClusterError("%s can't be read: %s; expected %s in YAML" % (path, error.strerror, what)) from error
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Document:
    """The same for a text. Only plain values come out of it, no Python objects."""
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: Dict[Path, int] = {}
        _note_lines(node, (), lines, name, set())
        return Document(name, None if node is None else loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ClusterError("%s%s: this is not valid YAML: %s" % (name, ", line %d" % (mark.line + 1) if mark else "", error.problem)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ClusterError("%s, line %d: this is not valid YAML: %s" % (name, line, error.reason)) from None
    except RecursionError:
        raise ClusterError("%s: this is nested too deeply" % name) from None
    except ValueError as error:  # what looks like a date or a number and is none
        raise ClusterError("%s: a value is not valid: %s" % (name, error)) from None
    finally:
        loader.dispose()


def _note_lines(node: Optional[yaml.Node], path: Path, lines: Dict[Path, int], name: str, seen: Set[int]) -> None:
    """The line of each entry. An anchored value is visited once: aliases can make a short text a huge tree."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            lines[path + (index,)] = inner.start_mark.line + 1
            _note_lines(inner, path + (index,), lines, name, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            where = path + (str(key.value),)
            line = key.start_mark.line + 1
            if where in lines and key.value != "<<":
                raise ClusterError("%s, line %d: %r is already set in line %d; keep one" % (name, line, key.value, lines[where]))
            lines[where] = line
            _note_lines(inner, where, lines, name, seen)


class Item:
    """A value in a document. Whatever it is asked to be and is not is a ClusterError with its place."""

    def __init__(self, document: Document, path: Path, value: Any):
        self.document = document
        self.path = path
        self.value = value

    @classmethod
    def of(cls, value: Any, name: str) -> "Item":
        """A value from elsewhere than a file, such as an argument."""
        return Document(name, value).root

    def error(self, expected: str, why: str = "") -> ClusterError:
        """To raise: this value is not what was expected."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ClusterError("%s is %s%s; expected %s" % (self.document.place(self.path), shown, ", which " + why if why else "", expected))

    def missing(self, key: str, expected: str) -> ClusterError:
        """To raise: an entry of this mapping is not there."""
        return ClusterError("%s has no %r; expected %s" % (self.document.place(self.path), key, expected))

    def fields(self, known: Sequence[str], what: str) -> Dict[str, "Item"]:
        """The entries of a mapping by key. An entry without a value counts as absent; keys that are not known are refused."""
        found = self.entries(what)
        for key, item in found.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                advice = "did you mean %r?" % near[0] if near else "there are: " + ", ".join(known)
                raise ClusterError("%s: there is no such key; %s" % (item.document.place(item.path), advice))
        return {key: item for key, item in found.items() if item.value is not None}

    def entries(self, what: str) -> Dict[str, "Item"]:
        """The entries of a mapping with keys of the user's choice."""
        if not isinstance(self.value, dict):
            raise self.error("a mapping: " + what)
        for key in self.value:
            if not isinstance(key, str):
                raise self.error("a mapping of names: " + what, "has the key %r" % (key,))
        return {key: Item(self.document, self.path + (key,), value) for key, value in self.value.items()}

    def items(self, what: str) -> List["Item"]:
        """The elements of a list that is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.error("a list of " + what)
        return [Item(self.document, self.path + (index,), value) for index, value in enumerate(self.value)]

    def text(self, what: str) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error(what)
        return self.value

    def number(self, what: str, least: float = 0.0) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not least <= self.value <= 1e300:
            raise self.error(what)
        return float(self.value)

    def count(self, most: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 1 <= self.value <= most:
            raise self.error("a whole number from 1 to %d" % most)
        return self.value

    def quantity(self, quantity: Quantity, zero: bool = False) -> float:
        """A number with a unit, in the base unit: greater than 0, or also 0."""
        expected = "%s with a unit, such as '%s'" % (quantity.name, quantity.example)
        if not isinstance(self.value, str):
            raise self.error(expected, "has no unit" if isinstance(self.value, (int, float)) and not isinstance(self.value, bool) else "")
        try:
            found = read(self.value, quantity)
        except ValueError as error:
            raise self.error(expected, str(error)) from None
        if found < 0 or (found == 0 and not zero):
            raise self.error(expected, "must be %s" % ("at least 0" if zero else "greater than 0"))
        return found
