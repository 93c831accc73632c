"""Changes single keys in the text of a YAML file; comments, order, quotes and line ends stay as they are.

PyYAML tells where each node of a document stands, so a change is a replacement of a few characters or an inserted line.
A library that loads and writes a document would keep comments, but re-indent lists and re-wrap lines, and the user
could not see in a `diff` what was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

INDENT = 2


class YamlText:
    """The text of a YAML file whose root is a mapping.

    Raises:
        ValueError: not YAML, or another root.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.root = _parse(text)

    def has(self, path: str) -> bool:
        """Whether there is a mapping at a dotted path."""
        node: yaml.Node = self.root
        for part in path.split("."):
            entry = _entry(node, part) if isinstance(node, yaml.MappingNode) else None
            if entry is None:
                return False
            node = entry[1]
        return isinstance(node, yaml.MappingNode)

    def set(self, path: str, value: str, *, comment: str = "", after: str | None = None) -> None:
        """Give the key at a dotted path a new value, adding what is missing on the way to it.

        Args:
            value: a scalar as YAML.
            comment: for the line above it.
            after: a key beside the outermost new one, below which that is added; None: at the end.

        Raises:
            ValueError: the path leads through an alias, an anchor or an interpolation, where a change would reach
                further than this key.
        """
        expected = _with(yaml.safe_load(self.text), path, yaml.safe_load(value))
        node = self.root
        parts = path.split(".")
        for depth, part in enumerate(parts):
            here = ".".join(parts[: depth + 1])
            entry = _entry(node, part)
            if entry is None:
                self._insert(node, parts[depth:], value, comment, after)
                break
            key, child = entry
            own = child.start_mark.index >= key.end_mark.index
            if not own or self.text[child.start_mark.index : child.start_mark.index + 1] == "&":
                raise ValueError(f"{here} is shared by a YAML alias (& or *); write it out, then convert")
            if depth == len(parts) - 1:
                self._replace(key, child, here, value, comment)
            elif not isinstance(child, yaml.MappingNode):
                shown = self.text[child.start_mark.index : child.end_mark.index]
                raise ValueError(f"{here} is {shown or 'empty'}, not a mapping; write it out, then convert")
            node = child
        self.root = _parse(self.text)
        if yaml.safe_load(self.text) != expected:
            raise ValueError(f"{path} stands where it cannot be changed without changing more")

    def add_header(self, lines: list[str]) -> None:
        """Put comment lines at the top, below Hydra's own (`# @package ...`), which must come first."""
        rows = self.text.splitlines(keepends=True)
        at = 0
        while at < len(rows) and rows[at].lstrip().lstrip("#").lstrip().startswith("@"):
            at += 1
        header = [f"# {line}".rstrip() + self.newline for line in lines]
        self.text = "".join([*rows[:at], *header, *rows[at:]])
        self.root = _parse(self.text)

    def _replace(self, key: yaml.Node, child: yaml.Node, path: str, value: str, comment: str) -> None:
        if not isinstance(child, yaml.ScalarNode):
            raise ValueError(f"{path} is not a single value; write one, then convert")
        start, end = child.start_mark.index, child.end_mark.index
        if start == end:  # `key:` and nothing behind it
            start = end = key.end_mark.index + 1
            value = f" {value}"
        self._edit(start, end, value)
        self._comment_above(key.start_mark.index, comment)

    def _insert(self, node: yaml.MappingNode, parts: list[str], value: str, comment: str, after: str | None) -> None:
        if node.flow_style:
            opening = node.start_mark.index + 1
            self._edit(opening, opening, _flow(parts, value) + (", " if node.value else ""))
            self._comment_above(node.start_mark.index, comment)
            return
        entry = _entry(node, after) if after else None
        column = node.value[0][0].start_mark.column
        at = self._line_after(_end_of(*(entry or node.value[-1])))
        rows = [" " * (column + INDENT * depth) + f"{part}:" for depth, part in enumerate(parts)]
        rows[-1] += f" {value}"
        if comment:
            rows.insert(len(rows) - 1, f"{' ' * (column + INDENT * (len(parts) - 1))}# {comment}")
        text = self.newline.join(rows) + self.newline
        missing_end = self.newline if at and self.text[at - 1] != "\n" else ""
        self._edit(at, at, missing_end + text)

    def _edit(self, start: int, end: int, text: str) -> None:
        self.text = self.text[:start] + text + self.text[end:]

    def _comment_above(self, index: int, comment: str) -> None:
        if comment:
            line = self.text.rfind("\n", 0, index) + 1
            row = self.text[line:]
            indent = row[: len(row) - len(row.lstrip(" "))]
            self._edit(line, line, f"{indent}# {comment}{self.newline}")

    def _line_after(self, index: int) -> int:
        """Start of the line behind the one in which a node ends."""
        if index and self.text[index - 1] == "\n":  # a block scalar ends there itself
            return index
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end + 1


def _parse(text: str) -> yaml.MappingNode:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise ValueError("not a job file: no keys in it")
    return root


def _entry(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _end_of(key: yaml.Node, node: yaml.Node) -> int:
    """Where the text of an entry ends; PyYAML's mark of a block's end is where the next token begins."""
    if node.start_mark.index < key.end_mark.index:  # an alias
        return key.end_mark.index
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end_of(*node.value[-1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end_of(key, node.value[-1])
    return max(node.end_mark.index, key.end_mark.index)


def _flow(parts: list[str], value: str) -> str:
    return f"{parts[0]}: {value}" if len(parts) == 1 else f"{parts[0]}: {{{_flow(parts[1:], value)}}}"


def _with(document: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The document with one more value, and nothing else changed."""
    head, _, rest = path.partition(".")
    changed = dict(document)
    inner = changed.get(head)
    changed[head] = value if not rest else _with(inner if isinstance(inner, Mapping) else {}, rest, value)
    return changed
