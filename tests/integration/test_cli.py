"""The `varuna` command against a real controller whose store tells a job's whole life."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.cli.main import main
from controller.store.tokens import Role
from tests.fakes import story
from tests.fakes.served import Served, served
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its reconciler hardly ever looks, so that the story stays as it was told."""
    with served(tmp_path_factory.mktemp("cli"), tick=1000, lost_after=1e6) as running:
        until(lambda: running.parts.looked_at > 0)
        story.tell(running.parts.store, running.parts.clock.now())
        yield running


@pytest.fixture
def run(
    controller: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Exit code, standard output, standard error of a command."""
    monkeypatch.setenv("VARUNA_URL", controller.url)
    monkeypatch.setenv("VARUNA_TOKEN", controller.token(Role.USER))

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return command


def test_jobs_is_plain_text_off_a_terminal(run: Run) -> None:
    code, out, _ = run("jobs")
    assert code == 0 and "\x1b" not in out
    head, row = out.splitlines()[0].split(), out.splitlines()[1].split()
    assert head[:6] == ["NAME", "STATE", "PLAN", "NODES", "STEP", "EX/S"]
    assert row[:6] == ["gpt-mini", "●", "running", "2×2", "4/8", "187/2,000"]


def test_json_is_what_rest_answers(run: Run, controller: Served) -> None:
    _, out, _ = run("jobs", "--json")
    with controller.client() as client:
        assert (
            json.loads(out)["items"][0]["id"] == client.get("/api/v1/jobs").json()["items"][0]["id"]
        )
    _, out, _ = run("jobs", "-q")
    assert out.strip() == story.JOB


def test_status_shows_figures_grid_and_last_events(run: Run) -> None:
    code, out, _ = run("status", "gpt-mini")
    assert code == 0
    for shown in ("187/2,000 (9 %)", "2 (3.8 s), lost 7 steps", "stage 1 layers 4-7", "node-6",
                  "REPLICA 1", "resumed from step 120 (lost 4 steps, 1.6 s)",
                  "Held-out loss"):  # fmt: skip
        assert shown in out


@pytest.mark.parametrize("job", [story.JOB, "gpt-mini", story.JOB[:9]])
def test_a_job_goes_by_id_name_or_prefix(run: Run, job: str) -> None:
    assert json.loads(run("status", job, "--json")[1])["id"] == story.JOB


def test_an_unknown_job_is_exit_code_3(run: Run) -> None:
    code, out, err = run("status", "no such?job")
    assert (code, out) == (3, "") and "no such?job" in err


def test_a_wrong_token_is_exit_code_5(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_TOKEN", "vrn_user_wrong")
    assert run("jobs")[0] == 5


def test_events_and_nodes(run: Run) -> None:
    _, out, _ = run("events", "gpt-mini", "--type", "recovered", "--json")
    assert [event["type"] for event in json.loads(out)["items"]] == ["recovered", "recovered"]
    _, out, _ = run("events", "gpt-mini", "--last", "1")
    assert out.count("\n") == 1 and "recovered" in out
    _, out, _ = run("nodes")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        "node-1", "node-3", "node-4", "node-6", "node-8",
    ]  # fmt: skip


def test_logs_of_a_rank_and_of_a_node(run: Run, controller: Served) -> None:
    controller.parts.logs.append(story.JOB, 4, 2, 0, "one\ntwo\n")
    assert run("logs", "gpt-mini", "--rank", "2", "--tail", "1")[1] == "two\n"
    assert run("logs", "gpt-mini", "--node", "node-4")[1] == "one\ntwo\n"
    code, _, err = run("logs", "gpt-mini", "--node", "nobody")
    assert code == 3 and "holds no seat" in err


def test_evict_refuses_what_cannot_be(run: Run) -> None:
    code, _, err = run("evict", "gpt-mini", "--count", "9")
    assert code == 6 and "9 cannot be taken" in err


def test_a_question_without_a_terminal_is_an_error_and_no_hang(run: Run) -> None:
    code, _, err = run("cancel", "gpt-mini")
    assert code == 2 and "say -y" in err


def test_wait_tells_how_it_ended_by_its_exit_code(run: Run) -> None:
    assert run("wait", "gpt-mini", "--timeout", "0")[0] == 101
    assert run("wait", "gpt-mini", "--for", "running")[0] == 0
    assert run("wait", "nobody")[0] == 102


def test_a_program_goes_up_with_its_folder_and_the_job_is_there(
    run: Run, controller: Served, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def layers(args): ...")
    (tmp_path / ".varunaignore").write_text("secret\n")
    (tmp_path / "secret").write_text("x")
    spec = tmp_path / "job.yaml"
    spec.write_text("name: mine\nprogram: mine.py\nnodes: 1\nbatch_size: 8\nsteps: 3\n")
    code, out, err = run("submit", str(spec), "-y")
    assert code == 0 and "Submitted mine as job_" in out, err
    view = json.loads(run("status", "mine", "--json")[1].splitlines()[-1])  # the log is there, too
    digest = view["spec"]["bundle"]
    with controller.client(Role.AGENT) as agent:
        content = agent.get(f"/api/v1/bundles/{digest}").content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert set(tar.getnames()) == {"job.yaml", "mine.py"}
    code, _, err = run("submit", str(spec), "-y")
    assert code == 6 and "mine" in err
    assert run("cancel", "mine", "-y")[0] == 0


def test_what_the_controller_refuses_is_told_with_its_mend(run: Run, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(
        "program: builtin:gpt\nnodes: 1\nbatch_size: 8\nsteps: 3\nplan: {depth: 20..30}\n"
    )
    code, _, err = run("submit", str(spec), "-y")
    assert code == 2
    assert err.splitlines()[-1] == (
        "`plan.depth` 20 is more than the program's 8 layers. Give at most 8, or auto."
    )
