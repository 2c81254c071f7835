"""Both prompt orders of memrl, with several questions at once: what is computed once, and that results do not change."""

from dataclasses import replace

import pytest
import torch

from memrl.agents import AgentConfig, memory_agent
from memrl.kernels.attention import pick_attention
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer, logits_of
from memrl.prompts import load_prompts
from memrl.sampler import Sampler, kv_cache
from memrl.types import Sample
from tests.test_tokenizer import character_tokenizer

DOCUMENT = "Pierre inherits a fortune; Natasha dances at the ball; Andrei looks at the sky. " * 12
QUESTIONS = ("Who dances?", "Who inherits what?", "What does Andrei look at?", "Who dances?")
ORDERS = ("question_first", "section_first")


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def model(tiny_config, tokenizer, randomize):
    model = Transformer(replace(tiny_config, vocab_size=tokenizer.vocab_size)).eval()
    randomize(model, seed=2)
    return model


def read(model, tokenizer, order, **options):
    """All turns of four readings at once, two chunks each, and how many tokens the model computed for them."""
    agent = AgentConfig(load_prompts(order), chunk_tokens=480, memory_tokens=6, answer_tokens=4, question_tokens=40)
    sampler = Sampler(model, tokenizer, page_size=16, **options)
    computed, inner = [], model.forward

    def forward(ids, *args, **kwargs):
        computed.append(len(ids))
        return inner(ids, *args, **kwargs)

    model.forward = forward
    llm = LocalLLM(sampler, tokenizer, Decoding(temperature=0.0))
    samples = [Sample(str(i), question, DOCUMENT) for i, question in enumerate(QUESTIONS)]
    trajectories = llm.run([memory_agent(llm.session(0, i), sample, agent) for i, sample in enumerate(samples)])
    model.forward = inner
    return [turn for trajectory in trajectories for turn in trajectory.turns], sum(computed)


@pytest.mark.parametrize("order", ORDERS)
def test_greedy_turns_equal_the_loop_without_a_cache_for_every_backend(model, tokenizer, order, monkeypatch):
    monkeypatch.setattr(kv_cache, "MIN_SAVED_TOKENS", 1)
    expected = None
    for name in ("eager", "sdpa"):
        for share in (True, False):
            attention, _ = pick_attention(name, "cpu", torch.float32)
            turns, _ = read(model, tokenizer, order, attention=attention, share_prefixes=share)
            found = [(turn.prompt_ids, turn.response_ids) for turn in turns]
            expected = expected or found
            assert found == expected
    assert len(expected) == 4 * 3
    for prompt, response in expected:
        ids = list(prompt)
        for token in response:
            assert token == int(logits_of(model, ids)[-1].argmax())
            ids.append(token)


def test_section_first_computes_a_chunk_once_for_all_questions(model, tokenizer):
    _, alone = read(model, tokenizer, "section_first", share_prefixes=False)
    _, section_first = read(model, tokenizer, "section_first")
    _, question_first = read(model, tokenizer, "question_first")
    assert section_first < 0.5 * alone
    assert section_first < 0.6 * question_first
