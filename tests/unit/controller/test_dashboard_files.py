"""What the dashboard ships: vendored files by their hashes, and nothing inline anywhere."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from controller.dashboard import pages
from controller.dashboard.bars import WIDTH, segments
from tests.unit.controller.test_words import recovery

STATIC = pages.HERE / "static"
TEMPLATES = sorted((pages.HERE / "templates").rglob("*.html"))
PACKAGES = tomllib.loads((STATIC / "vendor" / "VENDOR.toml").read_text())["package"]
FILES = {file["name"]: file["sha256"] for package in PACKAGES for file in package["file"]}


@pytest.mark.parametrize("name", FILES)
def test_a_vendored_file_is_the_one_that_was_published(name: str) -> None:
    content = (STATIC / "vendor" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == FILES[name]


def test_nothing_is_vendored_without_a_word_on_where_it_comes_from() -> None:
    there = {path.name for path in (STATIC / "vendor").iterdir()}
    assert there == {*FILES, "VENDOR.toml"}
    assert all(package["licence"] and package["version"] for package in PACKAGES)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_nothing_inline_and_switches_no_escaping_off(template: Path) -> None:
    text = template.read_text()
    assert not re.search(r"\sstyle=|\son\w+=|javascript:|<style|\|\s*safe|autoescape", text)
    assert all(" src=" in tag for tag in re.findall(r"<script[^>]*>", text))


@pytest.mark.parametrize("script", sorted(STATIC.glob("*.js")), ids=lambda path: path.name)
def test_a_script_writes_text_never_html(script: Path) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
        script.read_text(),
    )


def test_the_phases_of_a_recovery_stand_side_by_side_to_one_scale() -> None:
    view = recovery(phases={"detect": 0.5, "decide": 0.0, "launch": 1.0, "first_step": 0.5})
    pieces = list(segments(view, longest=4.0))
    assert [(p.phase, p.x, p.width) for p in pieces] == [
        ("detect", 0.0, WIDTH / 8),
        ("launch", WIDTH / 8, WIDTH / 4),
        ("first_step", 3 * WIDTH / 8, WIDTH / 8),
    ]


def test_a_recovery_without_any_figure_yet_has_no_bar() -> None:
    assert list(segments(recovery(), longest=0.0)) == []
