"""Who may go where, strict JSON, and settings that keep the door shut."""

import json

import pytest
from pydantic import ValidationError

from controller.api.auth import roles_for
from controller.api.errors import strict_json
from controller.settings import Settings
from controller.store.tokens import Role
from trainer.contract.builtins import layer_count, wrong_args


@pytest.mark.parametrize(
    ("role", "opens"),
    [
        (Role.VIEWER, {"look"}),
        (Role.USER, {"look", "submit", "fetch"}),
        (Role.ADMIN, {"look", "submit", "fetch"}),
        (Role.AGENT, {"beat", "fetch"}),
    ],
)
def test_a_role_opens_its_own_doors(role: Role, opens: set[str]) -> None:
    doors = {
        "look": roles_for("GET", "/api/v1/jobs"),
        "submit": roles_for("POST", "/api/v1/jobs"),
        "beat": roles_for("POST", "/api/v1/agents/vm-1/beat"),
        "fetch": roles_for("GET", "/api/v1/bundles/sha256:0"),
    }
    assert {name for name, roles in doors.items() if any(map(role.may, roles))} == opens


@pytest.mark.parametrize("path", ["/healthzz", "/static2", "/api/v1/agentsx", "//login", "/"])
def test_a_like_sounding_path_is_not_the_door(path: str) -> None:
    assert roles_for("GET", path) == (Role.VIEWER,)


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "-Infinity", "1e400", "-1e999", "9223372036854775808", "9" * 5000,
     '"\\ud800"', "[" * 100_000, "{", ""],
)  # fmt: skip
def test_json_is_strict(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        strict_json(text.encode())


def test_json_that_is_fine_is_taken() -> None:
    text = '{"a": [1, -2.5e3, "é\\u00e9", true, null], "b": -9223372036854775808}'
    assert strict_json(text.encode()) == json.loads(text)


def test_another_host_than_loopback_needs_tls_or_a_word() -> None:
    with pytest.raises(ValidationError, match="not loopback"):
        Settings(host="0.0.0.0")
    assert Settings(host="0.0.0.0", insecure_http=True).scheme == "http"
    with pytest.raises(ValidationError, match="both"):
        Settings(tls_cert="cert.pem")  # type: ignore[arg-type]


def test_a_builtins_layers_are_known_without_torch() -> None:
    assert layer_count("gpt", {"layers": 3}) == 5
    with pytest.raises(ValueError, match="builtin"):
        layer_count("nothing", {})


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"layers": 0}, "`args.layers` must be a whole number of at least 1, not 0"),
        ({"layers": True}, "`args.layers` must be a whole number, not True"),
        ({"warmup": 0, "decay": 0, "lr": 1, "text": None, "dropout": 0}, None),
        ({"lr": "fast"}, "`args.lr` must be a number, not 'fast'"),
        ({"text": 3}, "`args.text` must be a path, not 3"),
        ({"width": 30}, "`args.heads` must divide `args.width`; 30 is no multiple of 4"),
    ],
)
def test_what_a_builtin_does_not_take_is_said_without_torch(
    args: dict[str, object], sentence: str | None
) -> None:
    assert [said for _, said in wrong_args("gpt", args)] == ([sentence] if sentence else [])
