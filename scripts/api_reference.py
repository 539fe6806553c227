#!/usr/bin/env python3
"""Writes docs/api.md: every public name of the Python package, with its signature and its docstring.

    scripts/api_reference.py            writes it
    scripts/api_reference.py --check    exits 1 if it is not what would be written

Public is what a module without an underscore in its path lists in ``__all__``. Sources are parsed and never imported,
so that the page depends on nothing but them: neither PyTorch nor the shared library has to be there.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "delta_matching"
PAGE = ROOT / "docs" / "api.md"

INTRODUCTION = """# The Python package's functions

Written by `scripts/api_reference.py` from the docstrings; change them there. How they are meant to be used:
[python.md](python.md).
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A public name where it is defined: a function, a class, or an assignment."""

    module: str
    name: str
    node: Function | ast.ClassDef | ast.Assign | ast.AnnAssign


class Sources:
    """The package's modules, parsed, by dotted name."""

    def __init__(self, folder: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.packages: set[str] = set()
        for path in sorted((folder / PACKAGE).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
                self.packages.add(".".join(parts))
            self.trees[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))

    def public_modules(self) -> Iterator[str]:
        """The package first, then its modules that have ``__all__``, in alphabetical order."""
        for name in sorted(self.trees):
            if not any(part.startswith("_") for part in name.split(".")) and self.exported(name):
                yield name

    def exported(self, module: str) -> list[str]:
        """What ``__all__`` lists, in alphabetical order."""
        for node in self.trees[module].body:
            if isinstance(node, ast.Assign) and _target(node) == "__all__":
                return sorted(ast.literal_eval(node.value), key=str.lower)
        return []

    def find(self, module: str, name: str) -> Definition:
        """Follows imports inside the package to where ``name`` is defined.

        Errors: LookupError where ``__all__`` lists a name that nothing defines.
        """
        for node in reversed(list(_statements(self.trees[module].body))):
            # Of a function with overloads the last definition is the real one, hence reversed.
            if isinstance(node, Function | ast.ClassDef) and node.name == name:
                return Definition(module, name, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name:
                return Definition(module, name, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._origin(module, node), alias.name)
        raise LookupError(f"{module}: __all__ lists {name}, which is not defined there")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (module in self.packages)]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _target(node: ast.Assign | ast.AnnAssign) -> str | None:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


# --- Signatures ------------------------------------------------------------------------------------------------------


def _parameters(node: Function, drop_first: bool) -> list[str]:
    def text(argument: ast.arg, default: ast.expr | None = None) -> str:
        written = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
        if default is None:
            return written
        return written + (" = " if argument.annotation else "=") + ast.unparse(default)

    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [text(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if drop_first:
        parts = parts[1:]
    if arguments.vararg:
        parts.append("*" + text(arguments.vararg))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [text(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg and arguments.kwarg.arg != "unsupported":  # takes names only to refuse them
        parts.append("**" + text(arguments.kwarg))
    return parts


def signature(name: str, node: Function, method: bool = False) -> str:
    """The call as one would write a stub: one line, or a parameter a line where that is above 100 columns."""
    bound = method and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    parts = _parameters(node, bound)
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){result}".replace("'", '"')
    if len(line) <= 100:
        return line
    rows = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{rows}){result}".replace("'", '"')


# --- Docstrings ------------------------------------------------------------------------------------------------------

_TITLES = "Args|Attributes|Device|Errors|Example|Note|Raises|Returns|Source|Yields"
_SECTION = re.compile(rf"((?:{_TITLES})(?:, [^:]*)?):(?: (.*))?")  # "Args, of a model:" is one too
_ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", re.DOTALL)
_LISTS = ("Args", "Attributes", "Raises")


def _inline(text: str) -> str:
    text = re.sub(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _fenced(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines).strip("\n") + "\n```"


def _dedented(lines: list[str]) -> list[str]:
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[least:] for line in lines]


def _items(lines: list[str]) -> list[str]:
    """A list entry for each ``name: text``, however many lines it goes on for; text alone stays text."""
    entries: list[str] = []
    for line in _dedented([line for line in lines if line.strip()]):
        # "TypeError: this. ValueError: that." are two.
        first, *more = re.split(r"(?<=[.;]) (?=[A-Z]\w*(?:Error|Exception): )", line.rstrip())
        # The entry goes on where the line is indented, or where it starts no other and the last has not ended.
        if entries and (first.startswith(" ") or not (_ITEM.fullmatch(first) or entries[-1].endswith("."))):
            entries[-1] += "\n" + first.strip()
        else:
            entries.append(first)
        entries += more
    found = [_ITEM.fullmatch(entry) for entry in entries]
    if not any(found):
        return [_inline(entry) for entry in entries]
    result = []
    for entry, item in zip(entries, found, strict=True):
        text = _inline(entry)
        if item is not None:
            text = ", ".join(f"`{name}`" for name in item[1].split(", ")) + f": {_inline(item[2])}"
        result.append("- " + text.replace("\n", "\n  "))
    return result


def _section(title: str, first: str, lines: list[str]) -> str:
    if title == "Example":
        return "**Example**\n\n" + _fenced(_dedented(lines))
    if title.split(",")[0] in _LISTS and not first:
        return f"**{title}**\n\n" + "\n".join(_items(lines))
    text = [first] if first else []
    return _inline(f"**{title}:** " + "\n".join([*text, *(line.strip() for line in lines)]).strip())


def _end(lines: list[str]) -> int:
    """How many lines the block at the head of ``lines`` has: a section, indented code, or a paragraph."""
    section, code = _SECTION.fullmatch(lines[0]), lines[0].startswith(" ")
    for count in range(1, len(lines)):
        line = lines[count]
        # Sections and code hold empty lines and end with their indentation, a paragraph ends at an empty line.
        if (line.strip() and not line.startswith(" ")) if section or code else (not line or _SECTION.fullmatch(line)):
            return count
    return len(lines)


def markdown(docstring: str) -> str:
    """A docstring in Markdown: its sections under bold titles, their entries as lists, examples as code."""
    blocks: list[str] = []
    lines = docstring.splitlines()
    while lines:
        if not lines[0].strip():
            lines = lines[1:]
            continue
        count, section = _end(lines), _SECTION.fullmatch(lines[0])
        if section:
            blocks.append(_section(section[1], section[2] or "", lines[1:count]))
        elif lines[0].startswith(" "):
            blocks.append(_fenced(_dedented(lines[:count])))
        else:
            blocks.append(_inline("\n".join(lines[:count])))
        lines = lines[count:]
    return "\n\n".join(blocks)


# --- The page --------------------------------------------------------------------------------------------------------


def _documented(node: Function | ast.ClassDef | ast.Module) -> str:
    text = ast.get_docstring(node)
    return f"\n{markdown(text)}\n" if text else ""


def _method(owner: str, node: Function) -> str:
    if any(ast.unparse(each) in ("property", "functools.cached_property") for each in node.decorator_list):
        shown = f"{owner}.{node.name}" + (f": {ast.unparse(node.returns)}" if node.returns else "")
    else:
        shown = signature(f"{owner}.{node.name}", node, method=True)
    return f"\n#### {owner}.{node.name}\n\n{_fenced([shown])}\n{_documented(node)}"


def entry(definition: Definition) -> str:
    """A name with its signature and text; a class with its constructor and its documented public methods."""
    name, node = definition.name, definition.node
    head = f"\n### {name}\n\n"
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return f"{head}{_fenced([ast.unparse(node).replace(chr(39), chr(34))])}\n"
    if not isinstance(node, ast.ClassDef):
        return f"{head}{_fenced([signature(name, node)])}\n{_documented(node)}"
    functions = {each.name: each for each in node.body if isinstance(each, Function)}
    made = functions.get("__init__")
    text = head + _fenced([signature(name, made, method=True) if made else f"class {name}"]) + f"\n{_documented(node)}"
    public = (each for each in functions.values() if not each.name.startswith("_") and ast.get_docstring(each))
    return text + "".join(_method(name, each) for each in public)


def page(folder: Path) -> str:
    """The whole page for the package in ``folder``; the same text for the same sources. Errors: LookupError."""
    sources = Sources(folder)
    text, seen = INTRODUCTION, set()
    for module in sources.public_modules():
        text += f"\n## {module}\n{_documented(sources.trees[module])}"
        for name in sources.exported(module):
            definition = sources.find(module, name)
            if (definition.module, definition.name) in seen:
                continue  # the package itself lists it
            seen.add((definition.module, definition.name))
            text += entry(definition)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    try:
        text = page(ROOT / "python")
    except LookupError as error:
        sys.exit(str(error))
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/api.md is not what the docstrings say: run scripts/api_reference.py")


if __name__ == "__main__":
    main()
