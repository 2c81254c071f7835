"""Servers that send anything: each ends in one line, in bounded time and memory, and never with the key in it."""

import contextlib
import gzip
import json
import math
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIStatusError

from memrl.agents.memory import AgentConfig
from memrl.commands.eval import main as evaluate
from memrl.commands.filter_dataset import Filter
from memrl.endpoint import EndpointError
from memrl.endpoint.addresses import HIDDEN, public_url, redact, split_url
from memrl.endpoint.failures import BadReply, backoff, describe, retry_after
from memrl.endpoint.remote_llm import LONGEST_TOKEN, MOST_LOST
from memrl.endpoint.replies import LARGEST_REPLY, read_completion, read_model_names
from memrl.llm import Decoding
from memrl.reading.reader import read_document
from memrl.types import Sample
from memrl.utils.plain_text import printable
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.test_endpoint import ask, remote
from tests.tiny_folder import PROMPTS, make_folder

KEY = "sk-correct-horse/battery"
Send = Callable[[bytes], None]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def raw_server(*talks: Callable[[Send], None]) -> Iterator[str]:
    """A server that reads each request and then calls the next of `talks`, the last one for all later requests."""
    closed, left = threading.Event(), list(talks)

    def serve(connection: socket.socket, talk: Callable[[Send], None]) -> None:
        def send(data: bytes) -> None:
            if closed.is_set():
                raise ConnectionError
            connection.sendall(data)

        with contextlib.suppress(OSError), connection:
            request = b""
            while not re.search(rb"\r\n\r\n(.|$)", request) or (request[:4] == b"POST" and not request.endswith(b"}")):
                request += connection.recv(2**16)
            talk(send)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                talk = left.pop(0) if len(left) > 1 else left[0]
                threading.Thread(target=serve, args=(connection, talk), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        closed.set()


def silence(send: Send) -> None:
    while True:
        time.sleep(0.02)
        send(b"")


def endless_body(send: Send) -> None:
    send(HEAD + b"\r\n")
    while True:
        send(b"x" * 2**16)


def endless_headers(send: Send) -> None:
    send(HEAD)
    while True:
        send(b"x-name: " + b"y" * 4096 + b"\r\n")


def slow_headers(send: Send) -> None:
    send(HEAD)
    while True:
        send(b"x: y\r\n")
        time.sleep(0.02)


def slow_body(send: Send) -> None:
    send(HEAD + b"\r\n")
    while True:
        send(b" ")
        time.sleep(0.02)


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> Callable[[Send], None]:
    lines = [b"HTTP/1.1 " + status, b"connection: close", *headers, b"content-length: %d" % len(body)]
    return lambda send: send(b"\r\n".join(lines) + b"\r\n\r\n" + body)


BOMB = gzip.compress(b"[" * 30_000_000)
ATTACKS = {
    "closes at once": (lambda send: None, r"disconnected without sending|Connection reset"),
    "says nothing": (silence, r"no answer within 0\.3 s"),
    "a byte at a time": (slow_body, r"no answer within 0\.3 s"),
    "a header at a time": (slow_headers, r"no answer within 0\.3 s"),
    "headers without end": (endless_headers, "Receive buffer too long"),
    "a body without end": (endless_body, "larger than 4 MiB"),
    "no HTTP": (lambda send: send(b"\x00\xff220 mail ready\r\n"), r"HTTP|protocol|illegal"),
    "no body": (whole(b""), "the answer is empty"),
    "a page": (whole(b"<!DOCTYPE html><h1>hi</h1>", b"content-type: text/html"), "not JSON: '<!DOCTYPE html><h1>hi</h1>'"),
    "half of JSON": (whole(b'{"choices": ['), r"not JSON: '\{\"choices\": \['"),
    "an event stream": (whole(b"data: {}", b"content-type: text/event-stream"), "not JSON: 'data: {}'"),
    "bytes": (whole(bytes(range(128, 256))), "not JSON"),
    "a bomb": (whole(BOMB, b"content-encoding: gzip"), r"compressed \(gzip\), which was not asked for"),
    "two bombs": (whole(BOMB, b"content-encoding: gzip, deflate"), "compressed"),
    "deep nesting": (whole(b"[" * 1_000_000), "not JSON"),
    "deep nesting in an error": (whole(b'{"error":' * 200_000, status=b"400 No"), "HTTP 400: "),
    "many digits": (whole(b'{"choices": ' + b"9" * 100_000 + b"}"), "not JSON"),
    "null choices": (whole(b'{"choices": null}'), "not a completion"),
    "an error as success": (whole(b'{"error": {"message": "upstream"}}'), "upstream"),
    "an object as text": (whole(b'{"choices": [{"message": {"content": {"a": 1}}}]}'), "the message's content is an object"),
    "a number as text": (whole(b'{"choices": [{"message": {"content": 1e999}}]}'), "the message's content is a number"),
    "a redirect": (whole(b"", b"location: http://evil/?a=b", status=b"302 Found"), r"HTTP 302: it redirects to http://evil/;"),
    "a redirect to nonsense": (whole(b"", b"location: http://[", status=b"307 Found"), "HTTP 307|[Rr]edirect|URL"),
    "500": (whole(b"\x1b[2Jred\nblue", status=b"500 No"), r"HTTP 500: \\x1b\[2Jred blue"),
    "a status of 999": (whole(b"{}", status=b"999 No"), "HTTP 999: "),
    "no content": (lambda send: send(b"HTTP/1.1 204 No\r\n\r\n"), "the answer is empty"),
}


@pytest.mark.parametrize(("talk", "words"), ATTACKS.values(), ids=ATTACKS)
def test_a_hostile_server_ends_in_one_line_that_says_what_it_sent(talk, words, capsys):
    began = time.monotonic()
    with raw_server(talk) as url:
        llm = remote(url, tries=2, timeout=0.3 if "within" in words else 5.0)
        with pytest.raises(EndpointError, match=words) as caught:
            ask(llm)
        with pytest.raises(ValueError) as checked:
            llm.check()
    message = str(caught.value)
    assert message.startswith(f"{url}/v1: ")
    for line in (message, str(checked.value)):
        assert printable(line, 500) == line
    said = capsys.readouterr().err.splitlines()
    assert len(said) == ("try 2 of 2" in message), "what is tried again is said"
    assert time.monotonic() - began < 8


def test_an_answer_of_any_size_takes_little_memory():
    tracemalloc.start()
    try:
        with raw_server(endless_body) as url, pytest.raises(EndpointError, match="larger than 4 MiB"):
            ask(remote(url))
        assert tracemalloc.get_traced_memory()[1] < 5 * LARGEST_REPLY
    finally:
        tracemalloc.stop()


def test_a_long_real_answer_is_read_and_text_beyond_the_cap_is_cut():
    with FakeEndpoint(lambda body: "red " * 500_000) as server:
        turn = ask(remote(server), max_new_tokens=3)
    assert turn.text == ("red " * 500_000)[: 3 * LONGEST_TOKEN] and turn.finish_reason == "length"


def test_no_redirect_takes_the_key_elsewhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEndpoint() as other:
        headers = {"location": f"{other.url}/openai/deployments/fake/chat/completions"}
        with FakeEndpoint(lambda body: Reply(status=307, headers=headers), models=None) as server:
            with pytest.raises(EndpointError, match=rf"HTTP 307: it redirects to {other.url}/openai.*give the final address"):
                ask(remote(f"{server.url}/openai/deployments/fake"))
        assert server.headers[0]["api-key"] == KEY and other.bodies == []


# --- keys -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sk-one\n", "sk-one\r\nx: y", "sk one", "sk-\x00", "sk-é", "\ufeffsk-one", "sk-\x1b[2J"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setattr("os.environ", {"OPENAI_API_KEY": key})
    with pytest.raises(ValueError, match=r"^OPENAI_API_KEY holds a blank") as caught:
        remote("http://x")
    assert "sk" not in str(caught.value)


@pytest.mark.parametrize(
    "echo",
    [
        lambda key: key,
        lambda key: f"x{key}y" * 3,
        lambda key: key.replace("/", "%2F"),
        lambda key: "x" * 290 + key,  # cut in the middle, if it were cut first
    ],
)
def test_an_echoed_key_is_in_no_message_and_in_no_answer(monkeypatch, echo, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    text = echo(KEY)
    script = [Reply(status=500, message=text), Reply(raw=f"<p>{text}"), Reply(raw=json.dumps({"error": text}))]
    with FakeEndpoint(lambda body: Reply(status=400, message=text), script=script) as server:
        with pytest.raises(EndpointError) as caught:
            ask(remote(server))
    with FakeEndpoint(lambda body: text, models=["fake", text]) as server:
        answer = ask(remote(server), max_new_tokens=100).text
        with pytest.raises(ValueError) as checked:
            remote(server, model="other").check()
    for shown in (str(caught.value), answer, str(checked.value), capsys.readouterr().err):
        assert not re.search(r"sk-corr|attery", shown) and shown


def test_a_key_is_found_before_text_is_cut_and_after_it_is_parsed(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEndpoint(lambda body: Reply(raw="x" * 110 + KEY)) as server, pytest.raises(EndpointError) as caught:
        ask(remote(server, tries=1))
    assert "sk-" not in str(caught.value)
    escaped = json.dumps({"choices": [{"message": {"content": KEY}}]}).replace("sk-", r"\u0073k-")
    with FakeEndpoint(lambda body: Reply(raw=escaped)) as server:
        assert ask(remote(server), max_new_tokens=100).text == HIDDEN


def test_an_address_shows_neither_its_password_nor_its_query(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeEndpoint(
        lambda body: Reply(status=400, message="bob:p%40ssword-of-bob queried-key p@ssword-of-bob Basic " + basic)
    ) as server:
        basic = "Ym9iOnBAc3N3b3JkLW9mLWJvYg=="
        url = server.url.replace("//", "//bob:p%40ssword-of-bob@") + "/v1?api-key=queried-key&api-version=2024-10-21"
        llm = remote(url)
        with pytest.raises(EndpointError) as caught:
            ask(llm)
    assert server.headers[0]["authorization"] == f"Basic {basic}" and "api-key=queried-key" in server.paths[0]
    message = str(caught.value)
    assert message == f"{server.url}/v1: HTTP 400: bob:{HIDDEN} {HIDDEN} {HIDDEN} Basic {HIDDEN}"
    assert llm.url == f"{server.url}/v1" and "bob" not in llm.about[0]
    assert public_url(f"http://host/{KEY}/v1?a=b") == f"http://host/{HIDDEN}/v1"
    assert public_url("http://localhost:8000") == "http://localhost:8000", "what holds no secret is stored as it is"


def test_no_file_of_an_evaluation_or_a_filter_holds_a_key(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    folder, questions = make_folder(tmp_path / "model"), tmp_path / "qa.jsonl"
    questions.write_text('{"id": "a", "question": "code ?", "context": "red", "answers": ["red"]}\n')
    with FakeEndpoint(lambda body: f"red {KEY} password-of-bob queried-key") as server:
        url = f"{server.url.replace('//', '//bob:password-of-bob@')}/v1?key=queried-key"
        options = ["--model", "fake", "--endpoint", url, "--tokenizer", folder, "--out", tmp_path / "out"]
        evaluate([*map(str, [*options, "--task", questions, "--samples", 1])])
        with contextlib.suppress(SystemExit):
            Filter.main([*map(str, [questions, tmp_path / "kept.jsonl", "--endpoint", url, "--name", "fake"])])
    written = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents and path != questions]
    assert {"samples.jsonl", "eval_config.json"} < {path.name for path in written} and len(server.bodies) > 2
    text = "".join(path.read_text(errors="ignore") for path in written) + "".join(capsys.readouterr())
    assert HIDDEN in text and not re.search("correct-horse|password-of-bob|queried-key", text)


def test_words_that_stand_for_no_key_are_replaced_nowhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert redact("the EMPTY set of 2024-10-21", "http://a:b@host?api-version=2024-10-21") == "the EMPTY set of 2024-10-21"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "",
        "http://[::1",
        "http://host:99999",
        "http://host:0",
        "http://a b",
        "http://h\x1b[2J",
    ],
)
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(ValueError, match="is not an address; give one like http") as caught:
        split_url(url)
    assert str(caught.value).isprintable()
    with pytest.raises(ValueError) as caught:
        split_url("htp://bob:password@host?key=secret")
    assert "password" not in str(caught.value) and "secret" not in str(caught.value)


# --- retries --------------------------------------------------------------------------------------------------------------------


def test_a_retry_says_what_is_wrong_and_when_it_is_tried_again(capsys):
    with FakeEndpoint(lambda body: "red", script=[Reply(status=503, message="over\nloaded")] * 3) as server:
        ask(remote(server))
    (line,) = capsys.readouterr().err.splitlines()  # of three within five seconds
    assert line == f"{server.url}/v1: HTTP 503: over loaded; next try in 0 s (try 2 of 8)"


def test_waiting_without_an_answer_is_said(monkeypatch, capsys):
    monkeypatch.setattr("memrl.endpoint.remote_llm.QUIET_S", 0.05)
    with FakeEndpoint(lambda body: Reply("red", seconds=0.3)) as server:
        ask(remote(server))
    assert capsys.readouterr().err.splitlines() == [f"{server.url}/v1: no answer for 0.05 s; a request waits up to 600 s"]


def test_no_attempt_begins_after_the_budget(monkeypatch):
    monkeypatch.setattr("memrl.endpoint.remote_llm.BUDGET_S", 0.15)
    with FakeEndpoint(lambda body: Reply(status=503)) as server:
        with pytest.raises(EndpointError, match=r"try \d of 1000"):
            ask(remote(server, tries=1000, first_wait=0.05))
    assert 2 <= len(server.bodies) <= 5


def test_a_server_that_answers_nothing_ends_the_run_and_a_poisoned_document_does_not(capsys):
    config = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=4, answer_tokens=3, question_tokens=6)

    def read(server, texts):
        llm = remote(server, tries=2, concurrency=1)
        readings = [read_document(llm, Sample(str(i), "red", text), config, (0, i)) for i, text in enumerate(texts)]
        return [reading.error is None for reading in llm.run(readings)]

    def answer(body):
        return Reply(status=500) if "river" in body["messages"][-1]["content"] else "red"

    with FakeEndpoint(answer) as server:
        assert read(server, ["river"] * (MOST_LOST - 1) + ["tree", "river"]) == [False] * (MOST_LOST - 1) + [True, False]
        with pytest.raises(EndpointError, match=rf"HTTP 500: .*; {MOST_LOST} requests in a row were given up, so the run ends"):
            read(server, ["river"] * 100)


@given(
    st.one_of(
        st.text(), st.from_regex(r"-?[0-9]{1,12}(\.[0-9]*)?(e[0-9]+)?"), st.from_regex(r"\w{3}, \d+ [A-Z][a-z]{2} \d+ [\d:]+ \S+")
    )
)
@settings(max_examples=100, deadline=None)
def test_any_retry_after_is_a_number_of_seconds(value):
    error = APIStatusError.__new__(APIStatusError)
    error.response = SimpleNamespace(headers={"retry-after": value})
    assert 0 <= retry_after(error) < math.inf and backoff(10**6, 1.0, 0) == 30


@pytest.mark.parametrize(
    "value", ["1e9", "-5", "soon", "0x10", "9" * 400, "Wed, 21 Oct 2015 07:28:00 GMT", "inf", "nan", "1" + "0" * 12]
)
def test_hostile_retry_after_is_ignored(value):
    error = APIStatusError.__new__(APIStatusError)
    error.response = SimpleNamespace(headers={"retry-after": value})
    assert retry_after(error) == 0


# --- the reader of answers, in this process -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(["content", "id"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE = JSON | st.fixed_dictionaries({}, optional={"content": JSON, "reasoning_content": JSON, "role": JSON})
CHOICE = JSON | st.fixed_dictionaries({}, optional={"message": MESSAGE, "finish_reason": JSON, "logprobs": JSON})
USAGE = JSON | st.fixed_dictionaries({}, optional={"prompt_tokens": JSON, "completion_tokens": JSON})
COMPLETION = st.fixed_dictionaries({}, optional={"choices": JSON | st.lists(CHOICE, max_size=2), "usage": USAGE, "data": JSON})


@given(st.one_of(COMPLETION.map(json.dumps), JSON.map(json.dumps), st.text()))
@settings(max_examples=300, deadline=None)
def test_any_answer_is_a_completion_or_a_line(body):
    names = read_model_names(body)
    assert all(isinstance(name, str) for name in names)
    try:
        found = read_completion(body)
    except BadReply as error:
        assert printable(describe(error, 1.0), 300) == describe(error, 1.0)
    else:
        found.text.encode()
        assert found.finish_reason in ("stop", "length")
        assert all(type(count) is int and 0 <= count < 2**53 for count in found[2:4])
        assert all(isinstance(call["function"]["arguments"], str) for call in found.tool_calls)


def test_a_completion_with_odd_fields_is_read():
    choice = {"message": {"content": "red"}, "finish_reason": ["length"], "logprobs": {"content": [{"logprob": "x" * 99}]}}
    for usage in (
        None,
        [],
        {"prompt_tokens": "7", "completion_tokens": -1},
        {"prompt_tokens": 10**400, "completion_tokens": 1e308},
    ):
        assert read_completion(json.dumps({"choices": [choice, None], "usage": usage})) == ("red", "stop", 0, 0, [])
    assert remote("http://x", decoding=Decoding()).usage == {}
