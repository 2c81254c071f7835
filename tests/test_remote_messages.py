"""Messages and tool calls between an agent and an OpenAI-compatible server."""

import json

import pytest

from memrl.endpoint import EndpointError
from memrl.endpoint.replies import read_completion
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.test_endpoint import TOKENIZER, remote
from tests.test_messages import ASK, TOOL

CALL = {"id": "call_7", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3 + 4"}'}}


def result(call_id, text="7"):
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "calculator"}


def talk(server, steps, **options):
    """The turns of a conversation that goes on with `steps`, lists of messages, after each turn."""

    async def agent(session):
        messages, turns = [ASK], []
        for more in [*steps, []]:
            turns.append(await session.chat(messages, kind="call", max_new_tokens=50, tools=[TOOL]))
            messages = [*messages, turns[-1], *more]
        return turns

    llm = remote(server, **options)
    return llm.run([agent(llm.session(0))])[0]


def test_messages_and_tools_are_sent_as_they_are_and_calls_come_back_with_their_ids():
    with FakeEndpoint(script=[Reply("red", tool_calls=[CALL]), Reply("blue")]) as server:
        first, second = talk(server, [[result("call_7")]], system="one two")
    system = {"role": "system", "content": "one two"}
    assert [body["tools"] for body in server.bodies] == [[TOOL], [TOOL]]
    assert server.bodies[0]["messages"] == [system, ASK]
    called = {"role": "assistant", "content": "red", "tool_calls": [CALL]}
    assert server.bodies[1]["messages"] == [system, ASK, called, result("call_7")]
    assert (first.text, first.tool_calls, first.finish_reason) == ("red", [CALL], "stop")
    assert (second.text, second.tool_calls) == ("blue", [])
    assert second.prompt_ids[: first.num_tokens] == first.prompt_ids + first.response_ids
    assert first.response_logprobs == [] and len(first.response_ids) > len(TOKENIZER.encode("red"))


def test_a_turn_of_calls_alone_is_sent_with_null_content():
    with FakeEndpoint(script=[Reply(None, tool_calls=[CALL]), Reply("blue")]) as server:
        first, _ = talk(server, [[result("call_7")]])
    assert first.text == "" and server.bodies[1]["messages"][1]["content"] is None


def test_results_of_calls_in_a_text_are_sent_as_the_users():
    with FakeEndpoint(lambda body: Reply("red <tool_call> green")) as server:
        talk(server, [[result("a"), result("b", "8")], [{"role": "user", "content": [5, 6]}]])
    words = "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>"
    said = {"role": "assistant", "content": "red <tool_call> green"}
    last = {"role": "user", "content": TOKENIZER.decode([5, 6])}
    assert server.bodies[-1]["messages"] == [ASK, said, {"role": "user", "content": words}, said, last]


def test_a_system_message_of_the_conversation_replaces_the_sessions():
    async def agent(session):
        return await session.chat([{"role": "system", "content": "mine"}, ASK], kind="x", max_new_tokens=5)

    with FakeEndpoint() as server:
        llm = remote(server, system="ours")
        llm.run([agent(llm.session(0))])
    assert server.bodies[0]["messages"] == [{"role": "system", "content": "mine"}, ASK] and "tools" not in server.bodies[0]


def test_calls_beyond_the_cap_are_dropped_and_the_turn_counts_as_cut():
    long = CALL | {"function": {"name": "calculator", "arguments": json.dumps({"expression": "1" * 20_000})}}
    with FakeEndpoint(lambda body: Reply("red", tool_calls=[long])) as server:
        [turn] = talk(server, [])
    assert (turn.text, turn.tool_calls, turn.finish_reason) == ("red", [], "length")


def test_a_key_inside_a_call_is_hidden(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-correct-horse")
    echo = CALL | {"function": {"name": "calculator", "arguments": '{"expression": "sk-correct-horse"}'}}
    with FakeEndpoint(lambda body: Reply("red", tool_calls=[echo])) as server:
        [turn] = talk(server, [])
    assert turn.tool_calls[0]["function"]["arguments"] == '{"expression": "[hidden]"}'


def test_calls_are_read_in_the_forms_that_servers_send():
    def read(calls):
        body = {"choices": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}]}
        return read_completion(json.dumps(body))

    assert read([CALL]).tool_calls == [CALL] and read([CALL]).finish_reason == "stop"
    assert read(None).tool_calls == read([]).tool_calls == []
    [made] = read([{"function": {"name": "f", "arguments": {"a": 1}}}]).tool_calls
    assert made == {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    [half] = read([{"id": "x", "function": {"name": "\ud800", "arguments": "{"}}]).tool_calls
    assert half["function"] == {"name": "?", "arguments": "{"}


@pytest.mark.parametrize("calls", [["x"], [{}], [{"function": "f"}], [{"function": {"name": 5}}]])
def test_a_call_without_a_function_is_a_bad_answer(calls):
    with FakeEndpoint(lambda body: Reply("red", tool_calls=calls)) as server, pytest.raises(EndpointError, match="no function"):
        talk(server, [], tries=1)
