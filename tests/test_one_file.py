"""The teaching edition, docs/one_file.py, against the package: documents, readings, rewards, advantages, gradients."""

import ast
import copy
import importlib.util
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
import torch

from memrl.agents import make_config, memory_agent
from memrl.commands.train import parse
from memrl.data.needle import build_tokenizer, make_sample
from memrl.engine import distributed
from memrl.engine.deepspeed_engine import Engine, learning_rate_factor
from memrl.llm import Decoding, LocalLLM
from memrl.miniature.registry import find_miniature
from memrl.miniature.start import build_model
from memrl.model import PackedContext
from memrl.rl.loss import policy_loss
from memrl.rl.packing import TrainTurn, pack_turns
from memrl.rl.reference import Reference
from memrl.rl.rollout import assign_advantages
from memrl.rl.update import accumulate_gradients, add_logprobs, loss_options, prepare_update
from memrl.sampler import Sampler
from memrl.scoring.verify import strict_match
from memrl.tokenizer import Tokenizer
from memrl.types import Group, Sample, Trajectory, Turn

FILE = Path(__file__).resolve().parent.parent / "docs" / "one_file.py"
TEXT = FILE.read_text(encoding="utf-8")
CONFIG = parse([])  # configs/tiny.yaml
LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens", "question_tokens")
AGENT = make_config(CONFIG.agent.prompts, **{name: getattr(CONFIG.agent, name) for name in LIMITS})
NAMES = {  # of parameters, the file's and the package's
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "norm": "model.norm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


@pytest.fixture(scope="module")
def one():
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["one_file"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(build_tokenizer())


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.init("cpu")
    yield
    distributed.shutdown()


def package_name(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def package_copy(model):
    """The package's model with the same weights."""
    twin = build_model(model.embed.num_embeddings, seed=5)
    weights = {package_name(name): value for name, value in model.state_dict().items()}
    twin.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return twin


@pytest.fixture(scope="module")
def start(one):
    """A random model that is not indifferent: its next words have uneven probabilities."""
    return disturbed(one.Model(0), 0.1, seed=1)


@torch.no_grad()
def disturbed(model, std: float, seed: int):
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(std * torch.randn(parameter.shape, generator=rng))
    return model


@pytest.fixture(scope="module")
def readings(one, start):
    """Six groups of short documents; the rewards of the second and the last group are equal."""
    documents = [one.make_document(3, seed) for seed in range(6) for _ in range(one.GROUP_SIZE)]
    readings = one.read(start, documents, 1.0, torch.Generator().manual_seed(2))
    for number, reading in enumerate(readings):
        group, place = divmod(number, one.GROUP_SIZE)
        reading.reward = float(place <= group) if group not in (1, 5) else float(group == 5)
    one.set_advantages(readings)
    return readings


def package_turns(reading) -> list[Turn]:
    kinds = ["memory"] * (len(reading.turns) - 1) + ["answer"]
    return [
        Turn(kind, turn.prompt, turn.response, turn.logprobs, "stop") for kind, turn in zip(kinds, reading.turns, strict=True)
    ]


def package_groups(one, readings) -> list[Group]:
    groups = []
    for first in range(0, len(readings), one.GROUP_SIZE):
        members = [Trajectory(package_turns(r), reward=r.reward) for r in readings[first : first + one.GROUP_SIZE]]
        groups.append(Group(first, Sample(str(first), "q", ""), members))
    return groups


class PlainEngine:
    def __init__(self, module):
        self.module = self.forward = module

    def __call__(self, *arguments):
        return self.module(*arguments)

    def backward(self, loss, is_last):
        loss.backward()


def test_the_file_is_short_and_needs_torch_alone():
    assert len(TEXT.splitlines()) <= 400
    nodes = list(ast.walk(ast.parse(TEXT)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules} - sys.stdlib_module_names == {"torch"}


def test_its_constants_are_the_settings_of_the_miniature(one):
    rl, agent, optim = CONFIG.rl, CONFIG.agent, CONFIG.optim
    assert (one.CHUNK_TOKENS, one.MEMORY_TOKENS, one.ANSWER_TOKENS) == (
        agent.chunk_tokens,
        agent.memory_tokens,
        agent.answer_tokens,
    )
    assert (one.QUESTIONS, one.GROUP_SIZE, one.EPOCHS) == (rl.prompts_per_step, rl.group_size, rl.epochs)
    assert (one.MIN_CHUNKS, one.MAX_CHUNKS) == (CONFIG.data.min_chunks, CONFIG.data.max_chunks)
    assert (one.CLIP_LOW, one.CLIP_HIGH, one.DUAL_CLIP, one.KL_COEF) == (rl.clip_low, rl.clip_high, rl.dual_clip, rl.kl_coef)
    assert (one.LEARNING_RATE, one.BETAS, one.MAX_GRAD_NORM) == (optim.lr, (optim.beta1, optim.beta2), optim.grad_clip)
    assert (one.LESSONS, one.FLAW) == (CONFIG.warm_start.batch_size, CONFIG.warm_start.flaw)


@pytest.mark.parametrize("num_chunks", [1, 9])
def test_words_and_documents_are_the_same(one, tokenizer, num_chunks):
    assert one.VOCABULARY == tokenizer.hf.convert_ids_to_tokens(range(tokenizer.vocab_size))
    for seed in range(20):
        document, sample = one.make_document(num_chunks, seed), make_sample(num_chunks, seed)
        assert (document.question, (document.answer,)) == (sample.question, sample.answers)
        assert document.ids == tokenizer.encode(sample.context)


def test_the_untrained_model_is_the_same(one):
    model, twin = one.Model(seed=4), build_model(len(one.VOCABULARY), seed=4)
    weights = twin.state_dict()
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in twin.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[package_name(name)], rtol=0, atol=1e-6)


def test_a_greedy_reading_is_the_same(one, start, tokenizer):
    """Prompts, memories, answers and log-probabilities: the agent, the sampler and its cache."""
    llm = LocalLLM(Sampler(package_copy(start), tokenizer, max_rows=4), tokenizer, Decoding(temperature=0.0))
    documents, samples = ([make(5, seed) for seed in range(8)] for make in (one.make_document, make_sample))
    expected = llm.run(memory_agent(llm.session(seed), sample, AGENT) for seed, sample in enumerate(samples))
    lengths = set()
    for reading, trajectory in zip(one.read(start, documents, 0.0, torch.Generator()), expected, strict=True):
        assert len(reading.turns) == len(trajectory.turns) == 6
        for turn, other in zip(reading.turns, trajectory.turns, strict=True):
            assert (turn.prompt, turn.response) == (other.prompt_ids, other.response_ids)
            torch.testing.assert_close(turn.logprobs, other.response_logprobs, rtol=0, atol=5e-5)
            lengths.add(len(turn.response))
    assert len(lengths) > 2, "the rows of a batch must end at different places"


def test_sampled_words_have_the_models_probabilities(one, start):
    prompt = one.make_prompt("code emma", one.encode("nothing"))
    with torch.no_grad():
        ids = torch.tensor([prompt])
        expected = start.next_logprobs(start(ids, torch.arange(len(prompt))[None]))[0, -1].exp()
    drawn = [ids[0] for ids, _ in one.sample(start, [prompt] * 4000, 1, 1.0, torch.Generator().manual_seed(0))]
    shares = torch.bincount(torch.tensor(drawn), minlength=len(expected)) / len(drawn)
    assert (shares - expected).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5


def test_the_samplers_log_probabilities_are_those_of_training_in_both(one, start, readings):
    twin = package_copy(start)
    turns = [turn for reading in readings for turn in reading.turns]
    sampled = torch.tensor([value for turn in turns for value in turn.logprobs])
    assert len({len(turn.prompt) for turn in turns}) > 3
    with torch.no_grad():
        torch.testing.assert_close(one.turn_logprobs(start, turns), sampled, rtol=0, atol=5e-5)
        for turn in turns[:40]:
            [batch] = pack_turns([TrainTurn(Turn("memory", turn.prompt, turn.response, turn.logprobs, "stop"), 0.0)], 100)
            other, _ = twin(batch.ids, PackedContext(batch.seq_lens), batch.select, batch.targets)
            torch.testing.assert_close(torch.tensor(turn.logprobs), other, rtol=0, atol=5e-5)


def test_rewards_are_the_strict_verifiers(one, tokenizer):
    rng, rewards = random.Random(0), []
    words = [one.ID[word] for word in ("\\boxed{", "\\boxed{", "}", "}", "emma", "red", "fox", "<|end|>", "<|pad|>")]
    right = one.encode("\\boxed{ emma red fox }")
    for _ in range(3000):
        response = [word for word in right if rng.random() < 0.95]
        for _ in range(rng.randrange(4)):
            response.insert(rng.randrange(len(response) + 1), rng.choice(words))
        rewards.append(one.reward(response, "emma red fox"))
        assert rewards[-1] == strict_match(tokenizer.decode(response), ["emma red fox"]), one.content(response)
    assert 0.2 < sum(rewards) / len(rewards) < 0.8


def test_advantages_are_the_same(one, readings):
    groups = package_groups(one, readings)
    assign_advantages(groups, CONFIG.rl)
    expected = [trajectory.advantage for group in groups for trajectory in group.trajectories]
    assert [reading.advantage for reading in readings] == pytest.approx(expected, abs=1e-7)
    assert len(set(expected)) > 5


def test_the_gradient_of_an_optimizer_step_is_the_same(one, start, readings, monkeypatch):
    """The policy has moved since it sampled, so that both clips and the penalty take effect. All in fp64."""
    start = copy.deepcopy(start).double()
    policy = disturbed(start, 0.02, seed=3)
    twin, rl = package_copy(policy).double(), replace(CONFIG.rl, micro_batch_tokens=1500)
    turns = [turn for part in assign_advantages(package_groups(one, readings), rl).values() for turn in part]
    update = prepare_update(turns, rl)
    assert update is not None and len(update.batches) > 2
    engine = cast(Engine, PlainEngine(twin))
    # Norms and angles are fp32 for every type of the weights; here the differences would be rounding errors.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    add_logprobs([update], engine, Reference(package_copy(start).double()), rl, 1.0)
    metrics = accumulate_gradients(engine, update, rl, 1.0)
    assert metrics["clip_frac"] > 0.01 and metrics["dual_clip_frac"] > 0.001 and metrics["kl"] > 0.01

    one.add_gradient(policy, one.make_batches(start, readings, size=50))
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in policy.named_parameters():
        gradient = expected[package_name(name)]
        assert gradient.norm() > 1e-5 and (parameter.grad - gradient).norm() < 1e-6 * gradient.norm(), name


def test_token_losses_are_the_same_for_extreme_ratios(one):
    rng = torch.Generator().manual_seed(0)
    logprobs, old, ref, advantages = (scale * torch.randn(400, generator=rng) for scale in (15, 15, 15, 1))
    losses, one_token = one.token_losses(logprobs, old, ref, advantages), torch.ones(1)
    for loss, now, then, start, gain in zip(losses, *(v.split(1) for v in (logprobs, old, ref, advantages)), strict=True):
        expected, _ = policy_loss(now, then, gain, loss_options(CONFIG.rl), weights=one_token, ref_logprobs=start)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert ((logprobs - old).abs() > 20).sum() > 50


def test_learning_rates_are_the_same(one, monkeypatch):
    rates, steps = [], 4
    monkeypatch.setattr(one, "take_step", lambda model, optimizer, rate: rates.append(rate) or 0.0)
    monkeypatch.setattr(one, "read", lambda *_: [one.Reading(None)])
    monkeypatch.setattr(one, "make_batches", lambda *_: [None])
    monkeypatch.setattr(one, "add_gradient", lambda *_: None)
    one.train(one.Model(), steps, seed=0)
    total = steps * one.EPOCHS
    expected = [CONFIG.optim.lr * learning_rate_factor(done, done, total, CONFIG.optim) for done in range(total)]
    assert rates == pytest.approx(expected)


def test_a_whole_run_reports_its_progress_and_accuracy(one, monkeypatch, capsys):
    for name, value in {"QUESTIONS": 2, "MIN_CHUNKS": 1, "MAX_CHUNKS": 2, "LESSONS": 2}.items():
        monkeypatch.setattr(one, name, value)
    one.main(["--steps", "2", "--quote_steps", "25", "--teach_steps", "25", "--documents", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("accuracy")] == [
        f"accuracy {when} reinforcement learning, {chunks:2d} chunks" for when in ("before", "after") for chunks in (1, 16, 64)
    ]
    assert "warm start: p(wanted word)" in lines[0] and "left   " in lines[0]
    assert [line.split()[0] for line in lines if "reward" in line] == ["1/2", "2/2"]


def test_lessons_are_the_teachers(one, tokenizer):
    """Which kinds of lessons there are, and how many of each."""
    mine, count, shares = random.Random(0), 4000, [Counter(), Counter()]
    theirs = find_miniature(CONFIG.model.miniature).lessons(random.Random(1), CONFIG.warm_start, tokenizer, AGENT)
    for prompt, response in islice(theirs, count):
        turn = one.lesson(mine)
        shares[0][kind_of(one, turn.prompt, turn.response)] += 1
        shares[1][kind_of(one, prompt, response)] += 1
    assert len(shares[1]) > 12
    for kind in shares[0] | shares[1]:
        numbers = [share[kind] for share in shares]
        assert abs(numbers[0] - numbers[1]) < 4.5 * (sum(numbers) + 1) ** 0.5, kind  # 4.5 standard deviations


def kind_of(one, prompt_ids: list[int], response_ids: list[int]) -> tuple:
    """What a lesson's memory holds, whether its chunk has the answer and ends in a fact, and what the teacher writes."""
    prompt, response = ([one.VOCABULARY[number] for number in ids] for ids in (prompt_ids, response_ids))
    name, first, last = prompt[3], prompt.index("memory") + 1, prompt.index("section" if "section" in prompt else "answer")
    memory = prompt[first:last]
    known = memory[-1] if memory[-1] in ("none", "nothing") else "answer" if memory[0] == name else "another"
    section = prompt[last + 1 : -2]
    sentences = [section[place : place + 5] for place in range(0, len(section), 5)]
    needles = [sentence[1:4] for sentence in sentences if sentence[:2] == ["code", name]]
    words = [word for word in response if word not in ("\\boxed{", "}", "<|end|>")]
    wanted = {tuple(memory): "memory", (name, "none"): "none"} | {tuple(needle): "needle" for needle in needles}
    ends_in_fact = bool(sentences) and sentences[-1][0] == "code"
    return known, len(needles), ends_in_fact, response[0] == "\\boxed{", response[-1], wanted.get(tuple(words), "last fact")
