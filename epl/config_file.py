"""Read the YAML configuration file, keeping the line of every entry for error messages."""

from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import yaml

from epl.errors import ConfigError


def read_settings(path: str, variable: str, sections: Sequence[str]) -> Iterator[Tuple[str, Any, str]]:
    """The entries of a file as ("section.key", value, "file, line").

    Both `section: {key: value}` and `section.key: value` are understood, also mixed.
    `variable` is the environment variable that named the file.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{variable} names the file {path!r}, which is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{variable} names the file {path!r}, which can't be read: {error.strerror}") from error
    try:
        document = _Document(text, path, sections)
        yield from document.settings()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: this is not valid YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}, line {line}: this is not valid YAML: {error.reason}") from error


class _Document:
    """One parsed file. Works on YAML nodes, because plain values know no line numbers."""

    def __init__(self, text: str, path: str, sections: Sequence[str]):
        self.path = path
        self.sections = sections
        self.loader = yaml.SafeLoader(text)
        self.lines: Dict[str, int] = {}

    def settings(self) -> Iterator[Tuple[str, Any, str]]:
        root: Optional[yaml.Node] = self.loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            if root is None or self.value(root) is None:  # an empty file, or one with only "---"
                return
            raise ConfigError(f"{self.where(root)}: the file must hold a mapping of keys to values, not {self.value(root)!r}")
        for name, key, node in self.entries(root):
            if name not in self.sections:
                yield self.setting(name, key, node)
            elif isinstance(node, yaml.MappingNode):
                for inner, inner_key, inner_node in self.entries(node):
                    yield self.setting(f"{name}.{inner}", inner_key, inner_node)
            elif self.value(node) is not None:  # "section:" with all of its keys commented out is fine
                raise ConfigError(f"{self.where(key)}: {name!r} is a section and needs a mapping of its keys, not {self.value(node)!r}")

    def setting(self, name: str, key: yaml.Node, node: yaml.Node) -> Tuple[str, Any, str]:
        if name in self.lines:
            raise ConfigError(f"{self.where(key)}: {name!r} is already set in line {self.lines[name]}")
        self.lines[name] = key.start_mark.line + 1
        return name, self.value(node), self.where(key)

    def entries(self, mapping: yaml.MappingNode) -> Iterator[Tuple[str, yaml.Node, yaml.Node]]:
        for key, node in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self.where(key)}: a key must be a name such as pipeline.num_micro_batch")
            yield key.value, key, node

    def value(self, node: yaml.Node) -> Any:
        try:
            # SafeLoader builds plain values only, no Python objects.
            return self.loader.construct_object(node, deep=True)
        except ValueError as error:  # what looks like a date and is none
            raise ConfigError(f"{self.where(node)}: this is not a valid value: {error}") from error

    def where(self, node: yaml.Node) -> str:
        return f"{self.path}, line {node.start_mark.line + 1}"
