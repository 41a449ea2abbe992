"""A spec as a person writes it (YAML, ``--set``, a JSON body) -> :class:`JobSpec`, or every mistake
in it at once.

Each mistake is a :class:`SpecError`: where it stands (JSON pointer, and the line of a text), one
sentence, and the likely mend. The YAML taken is the safe, JSON-like part of YAML 1.2: no tags, no
aliases, no duplicate keys, ``1e-3`` is a number and ``no`` is a word. It reads text and touches
nothing else, so the CLI and the API share it.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from controller.core.jobspec import JobSpec

Path = tuple[str | int, ...]

MOST_TEXT = 1 << 16
"""Characters of YAML. Its reader is slow, and slower than linear in what is nested."""
MOST_DEPTH = 64
MOST_MISTAKES = 100
"""So many are told of, at most."""


@dataclass(frozen=True)
class SpecError:
    """One mistake. ``line`` counts from 1; None where there is no text."""

    pointer: str
    line: int | None
    message: str
    """A sentence without its full stop."""
    suggestion: str | None = None

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.message}{where}." + (f" {self.suggestion}" if self.suggestion else "")


class BadSpecError(ValueError):
    """The spec is refused; ``errors`` holds every mistake, at least one."""

    def __init__(self, errors: Sequence[SpecError]) -> None:
        super().__init__(" ".join(str(error) for error in errors))
        self.errors = tuple(errors)


def read_yaml(text: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec that ``text`` and then each ``a.b=value`` of ``overrides`` describe.

    Raises :class:`BadSpecError`.
    """
    source = _Source()
    given = _compose(text, source) or {}
    if not isinstance(given, dict):
        source.refuse((), "A spec is a map of fields, as `name: gpt-mini`")
    source.stop_if_bad()
    for override in overrides:
        _override(given, override, source)
    return _validated(given, source)


def read_object(given: object) -> JobSpec:
    """The same for a value that came as JSON. Raises :class:`BadSpecError`."""
    source = _Source()
    if not isinstance(given, Mapping):
        source.refuse((), "A spec is an object of fields")
    _check_values(given, (), source)
    return _validated(given, source)


@dataclass
class _Source:
    """Where each value stands in the text, and the mistakes so far."""

    lines: dict[Path, int] = field(default_factory=dict)
    errors: list[SpecError] = field(default_factory=list)

    def refuse(
        self, path: Path, message: str, suggestion: str | None = None, line: int | None = None
    ) -> None:
        self.errors.append(
            SpecError(_pointer(path), line or self.line_of(path), message, suggestion)
        )

    def line_of(self, path: Path) -> int | None:
        """The line of ``path``, or of the nearest thing around it that has one."""
        around = (path[:length] for length in range(len(path), 0, -1))
        return next((self.lines[part] for part in around if part in self.lines), None)

    def stop_if_bad(self) -> None:
        if self.errors:
            raise BadSpecError(self.errors)


# --- YAML ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Only resolves what JSON has; everything else is a string."""


_NUMBER = r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?"
_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?\d[\d_]*", list("-+0123456789")),
    ("float", rf"{_NUMBER}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def _compose(text: str, source: _Source, path: Path = ()) -> Any:
    if len(text) > MOST_TEXT:
        source.refuse((), f"A spec has at most {MOST_TEXT:,} characters")
        return None
    try:
        if wrong := _not_like_json(text):
            source.refuse((), wrong)
            return None
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "it cannot be read"
        source.refuse((), f"This is not YAML: {what}", line=mark.line + 1 if mark else None)
        return None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        source.refuse((), f"This is not YAML: {str(error).splitlines()[0]}")
        return None
    return None if node is None else _value(node, path, source)


def _not_like_json(text: str) -> str | None:
    """What of YAML's own the text has. Reads no further than that."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            return "Aliases (`*name`) are not taken; write the value out"
        if depth > MOST_DEPTH:
            return f"It is nested more than {MOST_DEPTH} deep"
    return None


def _value(node: yaml.Node, path: Path, source: _Source) -> Any:
    source.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, source)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_value(item, (*path, i), source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, source)
    source.refuse(path, f"The tag `{node.tag}` is not taken")
    return None


def _mapping(node: yaml.MappingNode, path: Path, source: _Source) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
            source.refuse(path, "A field's name must be a plain word", line=line)
            continue
        key = key_node.value
        here = (*path, key)
        if key in given:
            first = source.lines[here]
            source.refuse(here, f"`{_dotted(here)}` stands twice, first in line {first}", line=line)
            continue
        source.lines[here] = line
        given[key] = _value(value_node, here, source)
    return given


def _scalar(node: yaml.ScalarNode, path: Path, source: _Source) -> Any:
    kind, text = node.tag.removeprefix(_TAG), str(node.value)
    match kind:
        case "null":
            value: Any = None
        case "bool":
            value = text.lower() == "true"
        case "int":
            value = int(text) if len(text) < 40 else math.inf
        case "float":
            value = float(text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf"))
        case "str":
            value = text
        case _:
            source.refuse(path, f"The tag `{node.tag}` is not taken")
            return None
    _check_values(value, path, source)
    return value


# --- values, whatever they came in ----------------------------------------------------------------


def _check_values(given: object, path: Path, source: _Source) -> None:
    """Refuse what the store and JSON cannot carry: NaN, infinity, numbers past 64 bits, broken
    Unicode.
    """
    match given:
        case float() if not math.isfinite(given):
            source.refuse(path, f"`{_dotted(path)}` must be a finite number")
        case int() if not -(2**63) <= given < 2**63:
            source.refuse(path, f"`{_dotted(path)}` must fit into 64 bits")
        case str() if "\0" in given or not _is_unicode(given):
            source.refuse(path, f"`{_dotted(path)}` must be text without NUL or broken Unicode")
        case Mapping():
            for key, value in given.items():
                _check_values(str(key), path, source)
                _check_values(value, (*path, str(key)), source)
        case list():
            for i, value in enumerate(given):
                _check_values(value, (*path, i), source)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _override(given: dict[str, Any], override: str, source: _Source) -> None:
    """Put ``a.b=value`` into ``given``; the value is read as YAML."""
    dotted, equals, text = override.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        source.refuse((), f"`--set {override}` is not of the form field.field=value")
        return
    place = given
    for depth, key in enumerate(keys[:-1], 1):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            what = _dotted(keys[:depth])
            message = f"`{what}` is not a map, so `--set {dotted}` cannot go into it"
            source.refuse(keys[:depth], message)
            return
    source.lines = {path: line for path, line in source.lines.items() if path[: len(keys)] != keys}
    inner = _Source()
    place[keys[-1]] = _compose(text, inner, keys)
    source.errors += [
        SpecError(_pointer(keys), None, f"`--set {override}`: {error.message}")
        for error in inner.errors
    ]


# --- pydantic's errors in our words ---------------------------------------------------------------


def _validated(given: Any, source: _Source) -> JobSpec:
    source.stop_if_bad()
    try:
        return JobSpec.model_validate(given)
    except ValidationError as refused:
        found = refused.errors(include_url=False)[:MOST_MISTAKES]
        for path, errors in _by_path(given, found).items():
            message, suggestion = _sentence(path, errors)
            source.refuse(path, message, suggestion)
        raise BadSpecError(sorted(source.errors, key=lambda e: e.line or 0)) from None


def _by_path(given: Any, errors: list[ErrorDetails]) -> dict[Path, list[ErrorDetails]]:
    """Errors by the place in ``given``; the members of a union refuse one value several times."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_path_in(given, error), []).append(error)
    return {path: found for path, found in by_path.items() if not _is_hidden(path, by_path)}


def _is_hidden(path: Path, paths: Iterable[Path]) -> bool:
    """Whether a place inside ``path`` is refused too, which says it better."""
    return bool(path) and any(other[: len(path)] == path != other for other in paths)


def _path_in(given: Any, error: ErrorDetails) -> Path:
    """``loc`` without the names of union members, which are no places in ``given``."""
    path: list[str | int] = []
    for part in error["loc"]:
        known = range(len(given)) if isinstance(given, list) else given
        if isinstance(known, Mapping | range) and part in known:
            given = given[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(part)
    return tuple(path)


def _sentence(path: Path, errors: list[ErrorDetails]) -> tuple[str, str | None]:
    name = _dotted(path)
    if any(error["type"] == "extra_forbidden" for error in errors):
        known = list(_fields_at(path[:-1]))
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        mend = f"Did you mean `{_dotted((*path[:-1], close[0]))}`?" if close else None
        return f"Unknown field `{name}`", mend
    if any(error["type"] == "missing" for error in errors):
        return f"`{name}` is needed", None
    if not path:
        return "; ".join(_demand(error) for error in errors), None
    demands = list(dict.fromkeys(_demand(error) for error in errors))
    sentences = [d for d in demands if not d.startswith("must be ")]
    needs = [d.removeprefix("must be ") for d in demands if d.startswith("must be ")]
    if sentences:
        return f"`{name}`: " + ", nor ".join(sentences + needs), None
    shown = repr(errors[0]["input"])
    tail = f", not {shown}" if len(shown) <= 60 else ""
    return f"`{name}` must be {' or '.join(needs)}{tail}", _closest(errors)


def _demand(error: ErrorDetails) -> str:
    """What the value must be, in a few words."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "int_type" | "int_parsing" | "int_from_float":
            return "must be a whole number"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "greater_than_equal":
            return f"must be at least {limits['ge']}"
        case "greater_than":
            return f"must be above {limits['gt']}"
        case "literal_error":
            return f"must be {limits['expected']}"
        case "string_type":
            return "must be text"
        case "string_pattern_mismatch" if error["loc"][-1] == "name":
            return "must be 1 to 40 of a-z, 0-9 and -, the first no -"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a map of fields"
        case "value_error":
            return str(limits["error"])
        case _:
            return error["msg"][0].lower() + error["msg"][1:]


def _closest(errors: list[ErrorDetails]) -> str | None:
    """The nearest of the words that a literal takes."""
    for error in errors:
        words = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        if close := difflib.get_close_matches(str(error["input"]), words, n=1):
            return f"Did you mean `{close[0]}`?"
    return None


def _fields_at(path: Path) -> Iterator[str]:
    """The fields that the map at ``path`` takes."""
    model: type[BaseModel] | None = JobSpec
    for part in path:
        known = model.model_fields.get(str(part)) if model else None
        model = _model_in(known.annotation) if known else None
    return iter(model.model_fields if model else ())


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    models = (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return next(models, None)


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path) or "spec"


def _pointer(path: Path) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
