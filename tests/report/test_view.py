"""`gspo view`: what its server answers, to whom, and what it says where it cannot."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.made_runs import made_run, metrics_line, rollouts, sample, write_run

from gspo import cli
from gspo.errors import UserError
from gspo.report.view import Server, Viewer, view


class Asked:
    """A server that answers, and questions to it."""

    def __init__(self, *runs: Path) -> None:
        self.server: Server = Server(runs, 0)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def get(self, name: str, *, token: str | None = None, method: str = "GET", **headers: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=10)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        token = self.server.token if token is None else token
        connection.request(method, f"/{token}/{name}", headers=named)
        answer = connection.getresponse()
        answer.text = answer.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def json(self, name: str) -> Any:
        return json.loads(self.get(name).text)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


@pytest.fixture
def asked(run: Path) -> Iterator[Asked]:
    served = Asked(run)
    yield served
    served.close()


def test_the_page_is_the_reports_without_samples_and_may_ask_its_own_server_alone(asked: Asked) -> None:
    page = asked.get("")
    assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert "connect-src 'self'" in page.text and "default-src 'none'" in page.text
    assert '{"live": true' in page.text and '"live":true' in asked.get("data.json").text
    assert "Answer-sum" not in page.text


def test_only_who_has_the_printed_address_is_answered(asked: Asked) -> None:
    names = ("", "data.json", "samples.json", "samples/0/1/0.json")
    for name in names:
        assert asked.get(name).status == 200
        for refused in (asked.get(name, token="x"), asked.get(name, Host="evil.example:80"), asked.get(name, Host="")):
            assert refused.status == 403 and "Answer" not in refused.text
    assert asked.get("", Host=f"localhost:{asked.server.server_port}").status == 200
    assert asked.server.server_address[0] == "127.0.0.1"
    assert asked.get("", method="POST").status == 501


@pytest.mark.parametrize(
    "name",
    [
        *("../recipe.yaml", "recipe.yaml", "%2e%2e/recipe.yaml", "samples/0/1/0.json/x", "samples/9/1/0.json"),
        *("samples/0/-1/0.json", "samples/0/1/99999999999999.json", "samples/99999999999999/1/0.json"),
    ],
)
def test_no_other_file_is_served(name: str, asked: Asked) -> None:
    assert asked.get(name).status == 404


def test_what_has_not_changed_is_not_sent_again_and_what_has_is(asked: Asked, run: Path) -> None:
    for name in ("data.json", "samples.json"):
        tag = asked.get(name).getheader("ETag")
        assert asked.get(name, If_None_Match=tag).status == 304
        assert asked.get(name).getheader("Cache-Control") == "no-cache"
        before = asked.json(name)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(len(before) + 90)) + "\n")
        (run / "rollouts" / f"step_0000{len(name) + 20}.jsonl").write_text(json.dumps(sample("new")) + "\n")
        assert asked.get(name, If_None_Match=tag).status == 200 and asked.json(name) != before


def test_every_sample_is_read_when_it_is_asked_for(asked: Asked) -> None:
    (training,) = asked.json("samples.json")
    for step in training["steps"]:
        places = range(len(step["groups"]))
        read = [asked.json(f"samples/0/{step['step']}/{place}.json") for place in places]
        texts = ["".join(one["texts"]) for group in read for one in group["samples"]]
        assert texts == [line["completion"] for line in rollouts(step["step"])]


def test_a_file_that_is_removed_while_it_is_served_is_said_to_be_gone(asked: Asked, run: Path) -> None:
    asked.get("samples.json")
    (run / "rollouts" / "step_000001.jsonl").unlink()
    gone = asked.get("samples/0/1/0.json")
    assert gone.status == 404
    (run / "recipe.yaml").unlink()
    assert asked.get("data.json").status == 404 and "this is not a run's directory" in asked.get("").text


def test_a_run_that_is_named_twice_is_one_run(run: Path) -> None:
    viewer = Viewer([run, run, run / "rollouts" / ".."])
    assert len(json.loads(viewer.answer("data.json")[1])["runs"]) == 1
    assert len(json.loads(viewer.answer("samples.json")[1])) == 1  # of training


def test_a_set_that_is_evaluated_later_comes_after_those_that_have_a_number(run: Path) -> None:
    viewer = Viewer([run])
    (run / "evaluation").mkdir()
    kinds = ["training", "evaluation on held_out"]  # of which this run has no responses
    for step, names in ((7, ["sums"]), (8, ["codes", "sums"])):
        lines = [{"set": name, **sample(f"{name}:1", words=(f"{name} {step}",))} for name in names]
        (run / "evaluation" / f"step_00000{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **{f"evaluation/{name}/pass_at_1": 0.5 for name in names}}) + "\n")
        viewer.answer("data.json")
        kinds += [f"evaluation on {name}" for name in names if f"evaluation on {name}" not in kinds]
        assert [own["kind"] for own in json.loads(viewer.answer("samples.json")[1])] == kinds
    assert kinds[2:] == ["evaluation on sums", "evaluation on codes"]
    assert json.loads(viewer.answer("samples/3/8/0.json")[1])["samples"][0]["texts"] == ["codes 8", ""]


def test_a_run_without_a_step_is_served_and_grows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lines=[])
    served = Asked(run)
    try:
        assert served.get("").status == 200 and served.json("samples.json")[0]["steps"] == []
        (run / "rollouts").mkdir()
        (run / "rollouts" / "step_000001.jsonl").write_text(json.dumps(sample()) + "\n")
        assert [one["step"] for one in served.json("samples.json")[0]["steps"]] == [1]
    finally:
        served.close()


def test_the_command_prints_the_address_and_ends_plainly_on_ctrl_c(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    waited: list[str] = []
    monkeypatch.setattr(Server, "serve_forever", interrupted)

    def waiting(name: str) -> nullcontext[None]:
        waited.append(name)
        return nullcontext()

    monkeypatch.setattr(cli, "_waiting", waiting)
    assert cli.main(["view", str(run), str(run)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("view: http://127.0.0.1:") and len(first.split("/")[3]) >= 20
    assert last == "view: ended" and waited == ["reading the run"]


def test_what_cannot_be_served_is_one_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, why in [
            ([str(run), "--port", str(port)], "Address already in use"),
            ([str(run), "--port", "99999"], "port must be 0-65535"),
            ([str(tmp_path / "no")], "no such directory"),
            ([str(run), str(run / "rollouts")], "this is not a run's directory"),
        ]:
            assert cli.main(["view", *arguments]) == 2
            error = capsys.readouterr().err
            assert why in error and error.startswith("error: ") and len(error.splitlines()) <= 2
    with pytest.raises(UserError):
        view([run / "rollouts"], 0, note=lambda _: None)
