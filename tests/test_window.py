"""No turn is longer than the model's positions: every command compares its longest turn with them, and names what fits."""

import importlib
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.agents import AgentConfig
from memrl.agents.limits import check_agent, check_window, fitting_limits, prompt_sizes, turn_tokens
from memrl.commands import train
from memrl.config import AgentOptions
from memrl.evaluation.methods import MethodOptions, make_methods
from memrl.model.hf_config import longest_text, read_config, yarn_for
from memrl.model.transformer import Transformer
from memrl.sampler import Request, Sampler, SamplingParams
from memrl.training.dry_run import longest_tokens
from memrl.training.inputs import build_agent
from memrl.training.trainer import Trainer
from tests.tiny_folder import PROMPTS, make_folder, make_tokenizer
from tests.tiny_run import make_run

AGENT = AgentConfig(PROMPTS, chunk_tokens=5000, memory_tokens=1024, answer_tokens=1024, question_tokens=1024)
SIZES = {"memory": 200, "answer": 100, "no_memory": 1}


def set_window(folder, window: int, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": window, **changes}))


def advised(message: str) -> list[str]:
    """The options that a message advises, as words of a command line; those after "or" are another way."""
    return [word for pair in re.findall(r"(--\S+) (\d+)", message.partition(" or --yarn")[0]) for word in pair]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (8272, {}),
        (8192, {"agent.chunk_tokens": 4920}),
        (4096, {"agent.chunk_tokens": 824}),
        (2048, {"agent.chunk_tokens": 1080, "agent.memory_tokens": 256, "agent.question_tokens": 256}),
        (204, {"agent.chunk_tokens": 1, "agent.answer_tokens": 102, "agent.memory_tokens": 1, "agent.question_tokens": 1}),
        (203, None),
    ],
)
def test_limits_that_fit_are_named(window, expected):
    try:
        check_agent(window, SIZES, AGENT)
    except ValueError as error:
        named = {option.removeprefix("--"): int(value) for option, value in re.findall(r"(--\S+) (\d+)", str(error))}
        assert "has 8272 tokens" in str(error) and f"the window has {window} (" in str(error)
        assert named == (expected or {}) and (expected is not None) == bool(named)
        assert expected is not None or "give shorter prompts, or a model with a longer window" in str(error)
    else:
        assert expected == {}


def test_a_measured_question_is_not_to_be_lowered():
    with pytest.raises(ValueError, match=r"give --agent\.chunk_tokens \d+ --agent\.memory_tokens 128$"):
        check_agent(1024, SIZES, replace(AGENT, answer_tokens=100), question_tokens=300)
    agent = replace(AGENT, memory_tokens=100, answer_tokens=824)  # 0 + 100 + 100 + 824; 0 + 100 + 200 + 10 + 100 is less
    check_agent(1024, SIZES, agent, document_tokens=10, question_tokens=0)
    with pytest.raises(ValueError, match=r"give --agent\.answer_tokens 823$"):
        check_agent(1023, SIZES, agent, document_tokens=10, question_tokens=0)


sizes = st.integers(1, 3000)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sizes, sizes, sizes, sizes, st.integers(1, 300), st.integers(1, 9000))
def test_what_is_named_fits_and_no_single_limit_could_be_larger(chunk, memory, answer, question, text, window):
    agent = AgentConfig(PROMPTS, chunk, memory, answer, question)
    start = {"chunk_tokens": chunk, "answer_tokens": answer, "memory_tokens": memory, "question_tokens": question}
    longest = lambda limits: turn_tokens({"memory": text, "answer": text, "no_memory": 1}, replace(agent, **limits))  # noqa: E731
    found = fitting_limits(window, start, longest)
    if longest(start) <= window:
        return
    assert all(1 <= value < start[name] for name, value in found.items())
    if found:
        assert longest(start | found) <= window
        assert all(longest(start | found | {name: value + 1}) > window for name, value in found.items())
    else:
        assert longest(dict.fromkeys(start, 1)) > window


def test_yarn_is_advised_where_it_fits_and_only_there(tmp_path):
    folder = make_folder(tmp_path / "model")
    set_window(folder, 1000)
    for tokens in (1001, 1500, 3333, 40_000):
        factor = yarn_for(folder, tokens)
        assert tokens <= longest_text(read_config(folder, factor)) < tokens + 11
    assert yarn_for(folder, 10**9) is None
    set_window(folder, 1000, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert yarn_for(folder, 2001) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("window") / "model")


@pytest.fixture
def narrow(model):
    """A model for 30 tokens. Its agent's turns: Q, M, S and three marks, 6 + 4 + 8 in the slots, 4 generated: 28 tokens."""
    set_window(model, 30, rope_scaling=None)
    return model


@pytest.fixture
def run(capsys):
    """run(command, arguments) -> exit code, standard output, the lines on standard error that begin with "error:"."""

    def run(command, *arguments):
        try:
            code = importlib.import_module(f"memrl.commands.{command}").main(list(map(str, arguments)))
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("error:")]

    return run


def test_infer_refuses_a_turn_beyond_the_window_and_both_ways_out_work(narrow, tmp_path, run):
    file = tmp_path / "text.txt"
    file.write_text("red blue green stone river " * 8)
    arguments = [file, "-q", "name ?", "--model", narrow, "--device", "cpu"]
    assert run("infer", *arguments)[0] == 0
    code, out, errors = run("infer", *arguments, "--agent.chunk_tokens", 16)  # 6 + 2 + 4 + 16 + 4
    assert (code, out, len(errors)) == (2, "", 1) and "has 32 tokens" in errors[0] and "the window has 30" in errors[0]
    assert errors[0].endswith("give --agent.chunk_tokens 14 or --yarn 1.07")
    assert run("infer", *arguments, *advised(errors[0]))[0] == 0
    assert run("infer", *arguments, "--agent.chunk_tokens", 15)[0] == 2
    assert run("infer", *arguments, "--agent.chunk_tokens", 16, "--yarn", 1.07)[0] == 0
    assert run("infer", *arguments, "--agent.chunk_tokens", 16, "--yarn", 1.06)[0] == 2
    file.write_text("red blue green")  # a short document has no longer turn
    assert run("infer", *arguments, "--agent.chunk_tokens", 16)[0] == 0


@pytest.mark.parametrize(
    ("method", "more", "way"),
    [
        ("memory", ["--agent.chunk_tokens", 16], "--agent.chunk_tokens 10 or --yarn 1.2"),  # 6 + 6 + 4 + 16 + 4
        ("one_shot", ["--agent.answer_tokens", 400], "--agent.answer_tokens "),
        ("retrieval", ["--retrieval_tokens", 500, "--passage_tokens", 16], "--retrieval_tokens "),
    ],
)
def test_eval_refuses_a_turn_beyond_the_window_and_the_value_named_works(narrow, tmp_path, run, method, more, way):
    if method != "memory":  # their prompt is the default one, of 100 words
        set_window(narrow, 300)
    arguments = ["--model", narrow, "--lengths", 3, "--samples", 1, "--methods", method, "--device", "cpu"]
    code, out, errors = run("eval", *arguments, *more, "--out", tmp_path / "a")
    assert (code, out, len(errors)) == (2, "", 1) and way in errors[0]
    code, out, errors = run("eval", *arguments, *more, *advised(errors[0]), "--out", tmp_path / "a")
    assert code == 0 and errors == [] and "failed:" not in out


def test_a_window_of_the_users_own_is_named_as_such(narrow):
    tokenizer, agent = make_tokenizer(), replace(AGENT, question_tokens=20, answer_tokens=500)
    methods = make_methods(["one_shot", "retrieval"], MethodOptions(window=900, retrieval_tokens=600), agent, 2000)
    methods["one_shot"].check_window(tokenizer, 2000, lambda tokens: "never")
    with pytest.raises(ValueError, match=r"the window has 900 \(--window\); give --retrieval_tokens \d+$"):
        methods["retrieval"].check_window(tokenizer, 2000, lambda tokens: "never")
    remote = make_methods(["memory", "retrieval"], MethodOptions(), AGENT, None)
    for method in remote.values():  # nothing is known about a server's window
        method.check_window(tokenizer, None, lambda tokens: "never")


def test_training_refuses_a_turn_beyond_the_window(narrow, tmp_path):
    config = train.parse(make_run(tmp_path))
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.tokenizer = config, make_tokenizer()
    trainer.agent, trainer.validation_samples = build_agent(config.agent), []
    trainer._check_inputs((), narrow)
    trainer.agent = replace(trainer.agent, chunk_tokens=16)
    with pytest.raises(
        ValueError, match=r"has 36 tokens, .* the window has 30 .*give --agent\.chunk_tokens 10 or rope_scaling"
    ) as error:
        trainer._check_inputs((), narrow)
    set_window(narrow, 30, rope_scaling=json.loads(re.search(r"rope_scaling (\{.*\})", str(error.value))[1]))
    trainer._check_inputs((), narrow)
    trainer.agent = replace(trainer.agent, chunk_tokens=10)
    set_window(narrow, 30, rope_scaling=None)
    trainer._check_inputs((), narrow)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_the_dry_run_refuses_a_turn_beyond_the_window(tmp_path, has_tokenizer):
    folder = make_folder(tmp_path / "model")
    set_window(folder, 4000)
    if not has_tokenizer:
        for file in folder.glob("tokenizer*"):
            file.unlink()
    with pytest.raises(ValueError, match=r"the window has 4000 .*give --agent\.chunk_tokens") as error:
        longest_tokens(AgentOptions(), str(folder), 10**6)
    chunk_tokens = int(advised(str(error.value))[1])
    assert longest_tokens(AgentOptions(chunk_tokens=chunk_tokens), str(folder), 10**6)[0] <= 4000


def test_the_miniatures_turns_fit_into_its_window():
    from memrl.data.needle import build_tokenizer
    from memrl.miniature.start import build_model
    from memrl.tokenizer import Tokenizer

    tokenizer = Tokenizer(build_tokenizer())
    agent = build_agent(train.parse([]).agent)
    check_agent(longest_text(build_model(tokenizer.vocab_size, 0).config), prompt_sizes(tokenizer, agent), agent)


def test_no_request_passes_the_window_whatever_agent_sends_it(tiny_config):
    sampler = Sampler(Transformer(replace(tiny_config, max_position_embeddings=20)).eval(), max_rows=1, cache_gib=0.001)
    with torch.no_grad():
        sampler.submit(Request([1] * 15, SamplingParams(5)))
    with pytest.raises(ValueError, match="can have 21 tokens together, but the model's window has 20"):
        sampler.submit(Request([1] * 15, SamplingParams(6)))


def test_a_window_that_nothing_fits_into_says_so():
    with pytest.raises(ValueError, match="give shorter prompts, or a model with a longer window"):
        check_window(10, {"a": 5}, lambda limits: 100 + limits["a"])
