"""What an operator may say, and what is refused with a sentence."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.settings import Settings, default_name


def settings(**given: object) -> Settings:
    return Settings.model_validate({"token_file": Path("t"), **given})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8430", ("127.0.0.1", 8430)),
        ("http://localhost:8430/", ("localhost", 8430)),
        ("https://controller.example", ("controller.example", 443)),
        ("http://[::1]:8430", ("::1", 8430)),
    ],
)
def test_the_controllers_address_is_in_its_url(url: str, address: tuple[str, int]) -> None:
    assert settings(controller=url).address == address


@pytest.mark.parametrize("url", ["controller:8430", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="must be an http"):
        settings(controller=url)


def test_a_token_is_not_sent_in_the_clear_to_another_machine_unless_told() -> None:
    with pytest.raises(ValidationError, match="insecure-http"):
        settings(controller="http://10.0.0.4:8430")
    assert settings(controller="http://10.0.0.4:8430", insecure_http=True).insecure_http


@pytest.mark.parametrize("name", ["a b", "x;touch pwn", "../up", "café", "A", "-a", "a" * 64, ""])
def test_a_name_that_could_mean_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        settings(controller="http://127.0.0.1:1", name=name)


def test_a_host_of_any_name_has_a_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("VM_7.Example", "-.-", "x" * 100, "ü"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert settings(controller="http://127.0.0.1:1", name=default_name()).name


def test_the_environment_counts_and_a_flag_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_AGENT_CONTROLLER", "http://127.0.0.1:1")
    monkeypatch.setenv("VARUNA_AGENT_NAME", "from-env")
    assert settings().controller == "http://127.0.0.1:1"
    assert settings(name="from-flag").name == "from-flag"


def test_a_source_of_notices_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"azure, aws, gcp, file:PATH or none, not 'azur'"):
        settings(controller="http://127.0.0.1:1", notices="azur")
    assert settings(controller="http://127.0.0.1:1", notices="file:/run/notice").notices
    assert settings(controller="http://127.0.0.1:1").notices == "none"
