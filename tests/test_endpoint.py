"""The remote llm against a real HTTP server."""

import asyncio
import gc
import inspect
import os
import re
import signal
import socket
import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from openai import APIStatusError

from memrl.agents.memory import AgentConfig, memory_agent
from memrl.endpoint import EndpointError, RemoteLLM
from memrl.endpoint.addresses import split_url
from memrl.endpoint.failures import backoff, retry_after
from memrl.llm import Decoding, LocalLLM, LocalSession
from memrl.prompts import Prompts
from memrl.reading.reader import read_document
from memrl.types import Sample
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.tiny_folder import PROMPTS, make_tokenizer

TOKENIZER = make_tokenizer()


def remote(server: FakeEndpoint | str, model="fake", decoding=Decoding(), system=None, **options) -> RemoteLLM:  # noqa: B008
    url = server if isinstance(server, str) else server.url
    return RemoteLLM(url, model, TOKENIZER, decoding, system, **({"first_wait": 0.01} | options))


def ask(llm: RemoteLLM, text="red blue", max_new_tokens=4, identity=(0,)):
    async def agent():
        session = llm.session(*identity)
        return await session.chat(session.encode(text), kind="answer", max_new_tokens=max_new_tokens)

    return llm.run([agent()])[0]


@pytest.fixture
def quiet(caplog):
    """Fails the test if asyncio logged an error that no code handled, which it does when the garbage is collected."""
    gc.freeze()  # what is older than the test need not be searched
    yield
    gc.collect()
    gc.unfreeze()
    records = [*caplog.get_records("call"), *caplog.records]
    assert not [record.getMessage() for record in records if record.name == "asyncio"]


# --- the interface -------------------------------------------------------------------------------------------


def test_it_has_the_interface_of_the_local_llm():
    for ours, local in ((RemoteLLM, LocalLLM), (RemoteLLM("http://x", "m", TOKENIZER, Decoding()).session(0), LocalSession)):
        for name in ("encode", "decode", "render", "content_ids", "chat") if local is LocalSession else ("session", "run"):
            expected = [p.name for p in inspect.signature(getattr(local, name)).parameters.values() if p.name != "self"]
            assert [p.name for p in inspect.signature(getattr(ours, name)).parameters.values() if p.name != "self"] == expected
    llm = RemoteLLM("http://x", "m", TOKENIZER, Decoding(), concurrency=5)
    assert llm.concurrency == 5 and llm.tokenizer is TOKENIZER
    assert llm.about == ["m at http://x/v1, 5 requests at a time"]


def test_a_chat_sends_the_message_and_returns_a_turn():
    with FakeEndpoint(lambda body: "blue green") as server:
        llm = remote(server, decoding=Decoding(0.5, 0.7), system="one two")
        turn = ask(llm)
    assert (turn.kind, turn.text, turn.finish_reason) == ("answer", "blue green", "stop")
    assert turn.prompt_ids == TOKENIZER.encode("red blue")
    assert turn.response_ids == TOKENIZER.encode("blue green") and turn.response_logprobs == []
    body = server.bodies[0]
    assert body["messages"] == [{"role": "system", "content": "one two"}, {"role": "user", "content": "red blue"}]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("fake", 0.5, 0.7, 4)
    assert not {"top_k", "min_p", "max_completion_tokens"} & set(body)
    assert server.paths == ["/v1/chat/completions"]
    assert llm.usage == {"prompt_tokens": 2, "completion_tokens": 2}


def test_top_k_min_p_and_the_system_message_are_sent_only_if_set():
    with FakeEndpoint() as server:
        ask(remote(server, decoding=Decoding(top_k=20, min_p=0.1)))
    assert (server.bodies[0]["top_k"], server.bodies[0]["min_p"]) == (20, 0.1)
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["user"]


def test_seeds_depend_on_the_identity_and_the_turn_alone():
    async def two_turns(session):
        for _ in range(2):
            await session.chat([], kind="x", max_new_tokens=1)

    def seeds(identities, concurrency):
        with FakeEndpoint() as server:
            llm = remote(server, concurrency=concurrency)
            llm.run([two_turns(llm.session(*identity)) for identity in identities])
        return sorted(body["seed"] for body in server.bodies)

    first = seeds([(1, 2), (1, 3)], 1)
    assert seeds([(1, 3), (1, 2)], 2) == first and len(set(first)) == 4
    assert seeds([(1, 2), (1, 4)], 1) != first
    assert all(0 <= seed < 2**31 for seed in first)


def test_a_prompt_is_the_users_message_and_its_slots_are_ids():
    session = RemoteLLM("http://x", "m", TOKENIZER, Decoding()).session(0)
    ids = session.render("Q {question} M {memory}", question=[5, 6], memory=[])
    assert ids == [*TOKENIZER.encode("Q"), 5, 6, *TOKENIZER.encode("M")]
    assert session.decode(session.render("red {question} blue", question=session.encode("green"))) == "red green blue"


def test_an_answer_cut_by_the_cap_keeps_its_text_and_ids_never_exceed_the_cap():
    with FakeEndpoint(lambda body: Reply("red blue green grey north", finish_reason="length")) as server:
        llm = remote(server)
        turn = ask(llm, max_new_tokens=3)
    assert turn.finish_reason == "length" and turn.text == "red blue green grey north"
    assert llm.session(0).content_ids(turn) == TOKENIZER.encode("red blue green")


@pytest.mark.parametrize(
    "reply", [Reply(None), Reply(""), Reply(None, reasoning="red blue"), Reply("", finish_reason="content_filter")]
)
def test_no_content_is_an_empty_answer(reply):
    with FakeEndpoint(lambda body: reply) as server:
        turn = ask(remote(server))
    assert (turn.text, turn.response_ids, turn.finish_reason) == ("", [], "stop")


def test_half_a_surrogate_pair_becomes_text():
    with FakeEndpoint(lambda body: Reply("red \ud800 blue")) as server:
        assert ask(remote(server)).text == "red ? blue"


def test_on_turn_sees_every_turn():
    seen = []

    async def agent(session):
        await session.chat([], kind="a", max_new_tokens=1)
        await session.chat([], kind="b", max_new_tokens=1)

    with FakeEndpoint() as server:
        llm = remote(server)
        llm.run([agent(llm.session(0, on_turn=seen.append))])
    assert [turn.kind for turn in seen] == ["a", "b"]


# --- the memory agent ------------------------------------------------------------------------------------------


def copy_the_code(body: dict) -> str:
    """Copies `code NAME is COLOUR` from section or notes into the notes, and answers from the notes."""
    text = body["messages"][-1]["content"]
    found = re.search(r"code (\w+) is (\w+)", text)
    if text.startswith("A "):
        return rf"it is \boxed{{{found[2]}}}" if found else "none"
    return found[0] if found else "none"


def test_the_memory_agent_runs_unchanged_over_a_server():
    filler = "stone river cloud tree . " * 6
    samples = [Sample(str(i), "code", f"{filler}code {name} is {colour} . {filler}") for i, (name, colour) in enumerate([
        ("one", "red"), ("two", "blue"), ("three", "grey"),
    ])]  # fmt: skip
    config = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=4, answer_tokens=3, question_tokens=6)
    with FakeEndpoint(copy_the_code) as server:
        llm = remote(server, concurrency=2)
        trajectories = llm.run(memory_agent(llm.session(0, i), sample, config) for i, sample in enumerate(samples))
    assert [t.response for t in trajectories] == [rf"it is \boxed{{{colour}}}" for colour in ("red", "blue", "grey")]
    assert [t.memory for t in trajectories] == ["code one is red", "code two is blue", "code three is grey"]
    assert [len(t.turns) for t in trajectories] == [8, 8, 8]
    assert server.questions[0].startswith("Q code M none S stone river")
    assert server.most_at_once <= 2


def test_a_memory_of_another_tokenizer_is_cut_to_the_cap():
    config = AgentConfig(Prompts("Q {question} M {memory} S {section}", "A {question} M {memory}", "none"), 4, 2, 3, 6)
    with FakeEndpoint(lambda body: "one two three four") as server:
        llm = remote(server)
        trajectory = llm.run([memory_agent(llm.session(0), Sample("x", "red", "tree " * 8), config)])[0]
    assert trajectory.memory == "one two"
    assert server.questions[1] == "Q red M one two S tree tree tree tree"


# --- running -----------------------------------------------------------------------------------------------


def test_results_come_in_order_and_as_many_run_as_allowed():
    three = threading.Barrier(3, timeout=60)  # opens only where three requests are under way together

    def answer(body):
        three.wait()
        word = body["messages"][-1]["content"]
        return Reply(word, seconds=0.1 if word == "one" else 0.0)

    words = ["one", "two", "three", "four", "red", "blue"]

    async def agent(session, word):
        return (await session.chat(session.encode(word), kind="x", max_new_tokens=1)).text

    with FakeEndpoint(answer) as server:
        llm = remote(server, concurrency=3)
        assert llm.run(agent(llm.session(i), word) for i, word in enumerate(words)) == words
        assert server.most_at_once == 3
        assert llm.run([]) == []


def test_an_agent_that_raises_ends_the_run_and_the_others_are_cancelled(quiet, recwarn):
    cancelled = []

    async def waits(session):
        try:
            await session.chat([], kind="x", max_new_tokens=2)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails(session):
        await session.chat([], kind="y", max_new_tokens=1)
        raise RuntimeError("mine")

    with FakeEndpoint(lambda body: Reply("x", seconds=60 * (body["max_tokens"] == 2))) as server:
        llm = remote(server, concurrency=3)
        with pytest.raises(RuntimeError, match="mine"):
            llm.run([fails(llm.session(0)), *(waits(llm.session(i)) for i in range(1, 6))], concurrency=3)
    assert cancelled == [True, True]
    gc.collect()
    assert not [str(w.message) for w in recwarn if "never awaited" in str(w.message)]


def test_of_several_errors_one_is_raised_and_none_is_printed(quiet):
    async def fails(number):
        raise RuntimeError(f"mine {number}")

    with pytest.raises(RuntimeError, match="mine"):
        remote("http://x", concurrency=4).run(fails(number) for number in range(4))


def test_ctrl_c_ends_the_run_without_noise(quiet):
    # A shell's background job, which the tests may be, starts with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def answer(body):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        return Reply("x", seconds=2)

    async def agent(session):
        await session.chat([], kind="x", max_new_tokens=1)

    with FakeEndpoint(answer) as server:
        llm = remote(server, concurrency=1)
        with pytest.raises(KeyboardInterrupt):
            llm.run(agent(llm.session(i)) for i in range(3))
        assert len(server.bodies) == 1


# --- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failures",
    [
        [Reply(status=500)] * 2,
        [Reply(status=status) for status in (408, 409, 429, 503)],
        [Reply(cut="connect"), Reply("x", cut="body")],
        [Reply(raw="<html>busy</html>", kind="text/html"), Reply(raw="{", kind="application/json")],
        [Reply(raw='{"error": {"message": "upstream"}}'), Reply(raw='{"choices": []}')],
        [Reply("late", seconds=2.0)],
    ],
    ids=["500", "each status", "cut", "no completion", "error as success", "slow"],
)
def test_temporary_failures_are_retried(failures, quiet):
    with FakeEndpoint(lambda body: "red", script=failures) as server:
        assert ask(remote(server, timeout=1.0)).text == "red"
    assert len(server.bodies) == len(failures) + 1
    assert len({str(body) for body in server.bodies}) == 1


def test_an_answer_that_comes_too_slowly_is_requested_again():
    with FakeEndpoint(lambda body: Reply("red"), script=[Reply("late", trickle=0.02)]) as server:
        assert ask(remote(server, timeout=0.4)).text == "red"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_other_failures_are_raised_at_once_with_the_servers_message(status):
    with FakeEndpoint(lambda body: Reply(status=status, message="because\nof this")) as server:
        with pytest.raises(EndpointError, match=rf"^{server.url}/v1: HTTP {status}: because of this$") as caught:
            ask(remote(server))
    assert len(server.bodies) == 1 and caught.value.status == status


def test_tries_are_bounded_and_counted(quiet):
    with FakeEndpoint(lambda body: Reply(status=503, message="overloaded")) as server:
        with pytest.raises(EndpointError, match=r"HTTP 503: overloaded \(try 3 of 3\)"):
            ask(remote(server, tries=3))
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(seconds=0.4), "no answer within 0.1 s"),
        (Reply(raw="{"), "the answer is not JSON"),
        (Reply(raw="<html> a page", kind="text/html"), "the answer is not JSON: '<html> a page'"),
    ],
)
def test_a_failure_without_a_status_is_described(reply, words):
    with FakeEndpoint(lambda body: reply) as server:
        with pytest.raises(EndpointError, match=re.escape(words)) as caught:
            ask(remote(server, tries=1, timeout=0.1 if reply.seconds else 5.0))
    assert caught.value.status is None


def test_waits_double_up_to_a_minute_and_differ_by_hash():
    assert [backoff(i, 1.0, 0) for i in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff(0, 1.0, 2**63 - 1) == pytest.approx(1.0) and backoff(2000, 0.5, 0) == 30


def test_retry_after_is_read_as_number_and_as_date():
    class Answer(APIStatusError):
        def __init__(self, value):
            self.response = SimpleNamespace(headers={} if value is None else {"retry-after": value})

    assert [retry_after(Answer(value)) for value in (None, "7", "1.5", "soon", "-3")] == [0, 7, 1.5, 0, 0]
    in_a_minute = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=60), usegmt=True)
    assert 50 < retry_after(Answer(in_a_minute)) <= 60
    assert 50 < retry_after(Answer(in_a_minute.replace("GMT", "-0000"))) <= 60
    assert retry_after(Answer("Wed, 21 Oct 2015 07:28:00 GMT")) == 0 and retry_after(ValueError()) == 0


def test_a_retry_waits_as_long_as_retry_after(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def note(seconds):
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("memrl.endpoint.remote_llm.asyncio.sleep", note)
    with FakeEndpoint(lambda body: "red", script=[Reply(status=429, headers={"Retry-After": "17"}), Reply(status=429)]) as server:
        assert ask(remote(server)).text == "red"
    assert slept[0] == 17 and slept[1] < 1
    with FakeEndpoint(lambda body: Reply(status=429, message="quota", headers={"Retry-After": "86400"})) as server:
        with pytest.raises(EndpointError, match=r"HTTP 429: quota; it asks to wait 86400 s, and 300 are the most$"):
            ask(remote(server))
    assert len(server.bodies) == 1


def test_a_server_that_is_gone_ends_the_run_and_not_document_by_document(quiet):
    config = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=4, answer_tokens=3, question_tokens=6)
    finished = []

    async def read(llm, i):
        finished.append(await read_document(llm, Sample(str(i), "red", "tree " * 9), config, (0, i)))

    with FakeEndpoint() as server:
        llm = remote(server, tries=2, concurrency=2)
    with pytest.raises(EndpointError, match=r"Connection refused.*so the run ends here"):
        llm.run(read(llm, i) for i in range(50))
    assert finished == []


def test_a_document_that_the_server_refuses_does_not_disturb_the_others():
    config = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=4, answer_tokens=3, question_tokens=6)

    def answer(body):
        return Reply(status=400, message="too long") if "river" in body["messages"][-1]["content"] else "red"

    with FakeEndpoint(answer) as server:
        llm = remote(server)
        samples = [Sample(str(i), "red", text) for i, text in enumerate(("tree", "river", "stone"))]
        readings = llm.run(read_document(llm, sample, config, (0, i)) for i, sample in enumerate(samples))
    assert [reading.error is None for reading in readings] == [True, False, True]
    assert "HTTP 400: too long" in readings[1].error


def test_a_server_that_refuses_the_seed_gets_none_from_then_on(capsys):
    with FakeEndpoint(refuses=["seed"]) as server:
        llm = remote(server)
        assert [ask(llm).text for _ in range(2)] == ["yes", "yes"]
    assert ["seed" in body for body in server.bodies] == [True, False, False]
    assert capsys.readouterr().err.count("accepts no seed") == 1


def test_max_tokens_is_sent_under_its_other_name_if_refused():
    with FakeEndpoint(refuses=["max_tokens", "top_p"]) as server:
        llm = remote(server)
        ask(llm, max_new_tokens=7)
    assert server.bodies[-1]["max_completion_tokens"] == 7 and not {"max_tokens", "top_p"} & set(server.bodies[-1])


def test_a_parameter_with_a_value_of_its_own_is_never_omitted():
    with FakeEndpoint(refuses=["top_p"]) as server, pytest.raises(EndpointError, match="Unknown parameter: 'top_p'"):
        ask(remote(server, decoding=Decoding(top_p=0.7)))


def test_an_error_that_names_a_parameter_by_chance_changes_nothing_for_others():
    with FakeEndpoint(lambda body: "red", script=[Reply(status=400, message="the seed of doubt")] * 2) as server:
        llm = remote(server)
        with pytest.raises(EndpointError):
            ask(llm)
        ask(llm)
    assert ["seed" in body for body in server.bodies] == [True, False, True]


# --- the address, the key and the first check ------------------------------------------------------------------


def test_addresses():
    assert split_url("http://host:8000") == ("http://host:8000/v1", {})
    assert split_url(" http://host:8000/ ") == ("http://host:8000/v1", {})
    assert split_url("http://host/v1/") == split_url("http://host/v1/chat/completions") == ("http://host/v1", {})
    azure = "https://x.openai.azure.com/openai/deployments/gpt"
    assert split_url(f"{azure}?api-version=2024-10-21") == (azure, {"api-version": "2024-10-21"})
    for wrong in ("localhost:8000", "ftp://host", "http://", ""):
        with pytest.raises(ValueError, match="is not an address; give one like http"):
            RemoteLLM(wrong, "m", TOKENIZER, Decoding())


def test_a_full_address_of_the_azure_kind_works(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with FakeEndpoint(models=None) as server:
        llm = remote(f"{server.url}/openai/deployments/fake?api-version=1")
        llm.check()
        assert ask(llm).text == "yes"
    assert set(server.paths) == {"/openai/deployments/fake/chat/completions?api-version=1"}
    assert server.headers[0]["api-key"] == "k"


def test_the_check_generates_nothing_if_the_model_is_listed(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeEndpoint() as server:
        remote(server).check()
        assert server.bodies == []
        ask(remote(server))
    assert server.headers[0]["authorization"] == "Bearer none"


def test_the_check_generates_a_few_tokens_if_models_are_not_listed():
    with FakeEndpoint(models=None) as server:
        remote(server, model="any").check()
        assert len(server.bodies) == 1


def test_the_error_for_a_wrong_model_name_lists_the_served_ones():
    with FakeEndpoint(models=["one", "two"]) as server:
        with pytest.raises(ValueError, match=r"HTTP 404: .*\(model 'three'\); it serves one, two$"):
            remote(server, model="three").check()


def test_a_wrong_path_is_reported():
    with FakeEndpoint(lambda body: Reply(status=404, raw='{"detail": "Not Found"}'), models=None) as server:
        with pytest.raises(ValueError, match=r"HTTP 404: .*Not Found.*correct the address or the model's name"):
            remote(f"{server.url}/nowhere").check()


def test_a_missing_key_is_reported(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeEndpoint(key="secret") as server:
        with pytest.raises(ValueError, match="HTTP 401: bad key; set the environment variable OPENAI_API_KEY"):
            remote(server).check()
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        remote(server).check()


def test_a_server_that_is_not_running_is_reported():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"^{url}/v1: Connection refused; start the server, or correct its address$"):
            remote(url).check()


@pytest.mark.parametrize("option", ["concurrency", "timeout", "tries", "first_wait"])
def test_numbers_that_are_not_positive_are_refused(option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        remote("http://x", **{option: 0})
