"""What a person writes becomes a spec, or every mistake in it is named with its line and mend."""

import json
from typing import Any

import pytest

from controller.core.jobspec import Every, NodeRange
from controller.specfile import (
    MOST_MISTAKES,
    MOST_TEXT,
    BadSpecError,
    SpecError,
    read_object,
    read_yaml,
)

GOOD = """\
name: gpt-mini
program: builtin:gpt
nodes: 2..8
batch_size: 64
steps: 2000
checkpoint:
  dir: /mnt/shared
  every: 50 steps
"""


def mistakes(text: str, *overrides: str) -> tuple[SpecError, ...]:
    with pytest.raises(BadSpecError) as refused:
        read_yaml(text, overrides)
    return refused.value.errors


def only(text: str, *overrides: str) -> str:
    (mistake,) = mistakes(text, *overrides)
    return str(mistake)


def test_the_short_forms_become_the_long_ones() -> None:
    spec = read_yaml(GOOD)
    assert spec.nodes == NodeRange(min=2, max=8)
    assert spec.checkpoint.every == Every(steps=50)


def test_yaml_and_its_own_json_give_the_same_spec() -> None:
    spec = read_yaml(GOOD)
    assert read_object(json.loads(spec.model_dump_json())) == spec


def test_an_unknown_field_is_named_with_its_line_and_the_nearest_known_one() -> None:
    assert only(GOOD.replace("  every", "  evry")) == (
        "Unknown field `checkpoint.evry` (line 8). Did you mean `checkpoint.every`?"
    )


def test_an_unknown_field_like_no_other_gets_no_suggestion() -> None:
    assert only(GOOD + "zzz: 1\n") == "Unknown field `zzz` (line 9)."


def test_every_mistake_is_told_at_once_in_the_order_of_the_lines() -> None:
    found = mistakes(GOOD.replace("64", "0").replace("2000", "x"))
    assert [(e.pointer, e.line) for e in found] == [("/batch_size", 4), ("/steps", 5)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("plan: {depth: foo}", "`plan.depth`: `foo` is not N, min..max or min.., nor 'auto'"),
        ("plan: {depth: {min: 2, mx: 3}}", "Unknown field `plan.depth.mx`"),
        ("plan: {micro_batch: 0}", "`plan.micro_batch` must be 'auto' or at least 1, not 0"),
        ("device: cdua", "`device` must be 'auto', 'cpu' or 'cuda', not 'cdua'"),
        ("recovery: 5", "`recovery` must be a map of fields, not 5"),
        ("args: {a: .nan}", "`args.a` must be a finite number"),
        ("args: {a: [1, -.inf]}", "`args.a.1` must be a finite number"),
        ("args: {a: 1e400}", "`args.a` must be a finite number"),
        ("seed: 99999999999999999999", "`seed` must fit into 64 bits"),
        ('args: {a: "\\0"}', "`args.a` must be text without NUL or broken Unicode"),
        ("seed: !!python/name:os.system 1", "The tag `tag:yaml.org,2002:python/name:os.system`"),
        ("clip_grad_norm: .inf", "`clip_grad_norm` must be a finite number"),
        ("name: again", "`name` stands twice, first in line 1"),
        ("args: {a: 1, a: 2}", "`args.a` stands twice, first in line 9"),
        ("args: {<<: {}}", "A field's name must be a plain word"),
        ("args: {a: 1", "This is not YAML:"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(line: str, sentence: str) -> None:
    (mistake,) = mistakes(GOOD + line + "\n")
    assert mistake.message.startswith(sentence)
    assert mistake.line in (9, 10)


def test_a_name_for_a_shell_is_refused() -> None:
    assert only(GOOD.replace("gpt-mini", "x;touch pwn")) == (
        "`name` must be 1 to 40 of a-z, 0-9 and -, the first no -, not 'x;touch pwn' (line 1)."
    )


@pytest.mark.parametrize("name", ["-", "--help", "-x"])
def test_a_name_that_looks_like_an_option_is_refused(name: str) -> None:
    assert "the first no -" in only(GOOD.replace("gpt-mini", f'"{name}"'))


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_spec_says_what_is_needed(text: str) -> None:
    assert {e.pointer for e in mistakes(text)} == {"/program", "/batch_size", "/steps"}


@pytest.mark.parametrize("text", ["- a", "42", "a: &x [1]\nb: *x", "a: \0"])
def test_what_is_no_map_of_fields_is_refused_in_one_sentence(text: str) -> None:
    assert only(text).endswith(".")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: " + "x" * MOST_TEXT, f"A spec has at most {MOST_TEXT:,} characters."),
        ("[" * 5000, "It is nested more than 64 deep."),
        ("- " * 100, "It is nested more than 64 deep."),
    ],
)
def test_what_is_slow_to_read_is_refused_unread(text: str, sentence: str) -> None:
    assert only(text) == sentence


def test_of_very_many_mistakes_the_first_are_told() -> None:
    assert len(mistakes("".join(f"k{i}: 1\n" for i in range(1000)))) == MOST_MISTAKES


def test_words_and_dates_stay_words_and_numbers_are_numbers() -> None:
    args = read_yaml(GOOD + "args: {a: no, b: 2026-01-02, c: 1e-3, d: 1_000, e: 1:30}\n").args
    assert args == {"a": "no", "b": "2026-01-02", "c": 0.001, "d": 1000, "e": "1:30"}


def test_overrides_are_read_as_yaml_and_win() -> None:
    spec = read_yaml(GOOD, ["plan.depth=2..8", "batch_size=32", "args.lr=1e-3", "name=other"])
    assert (spec.plan.depth, spec.batch_size) == (NodeRange(min=2, max=8), 32)
    assert (spec.args, spec.name) == ({"lr": 0.001}, "other")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch_size=0", "`batch_size` must be at least 1, not 0."),
        ("batchsize=1", "Unknown field `batchsize`. Did you mean `batch_size`?"),
        ("steps", "`--set steps` is not of the form field.field=value."),
        ("name.x=1", "`name` is not a map, so `--set name.x` cannot go into it (line 1)."),
        ("steps=.nan", "`--set steps=.nan`: `steps` must be a finite number."),
    ],
)
def test_a_bad_override_is_named_without_a_line_of_the_file(override: str, sentence: str) -> None:
    assert only(GOOD, override) == sentence


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"batch_size": float("nan")}, "/batch_size"),
        ({"args": {"a~b/c": [float("inf")]}}, "/args/a~0b~1c/0"),
        ({"args": {"a": "\ud800"}}, "/args/a"),
        ({"nodes": {"min": 3, "max": 2}}, "/nodes"),
        ({"bundle": "sha256:no"}, "/bundle"),
    ],
)
def test_a_json_body_is_refused_by_pointer_and_without_lines(
    change: dict[str, Any], pointer: str
) -> None:
    given = json.loads(read_yaml(GOOD).model_dump_json()) | change
    with pytest.raises(BadSpecError) as refused:
        read_object(given)
    assert [(e.pointer, e.line) for e in refused.value.errors] == [(pointer, None)]


@pytest.mark.parametrize("given", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(BadSpecError):
        read_object(given)
