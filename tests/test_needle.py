"""The miniature's task and its warm start."""

import random

import numpy as np
import pytest
import torch

from memrl.agents import AgentConfig
from memrl.config import DataOptions, WarmStartOptions
from memrl.data.needle import NAMES, SENTENCE_WORDS, WORDS, build_tokenizer, make_chunk, make_sample
from memrl.data.training_source import NeedleSource
from memrl.miniature import start as warmstart
from memrl.miniature.needle_lessons import lesson, needle_lessons
from memrl.model import PackedContext
from memrl.prompts import load_prompts
from memrl.scoring.verify import strict_match
from memrl.tokenizer import Tokenizer, load_tokenizer

AGENT = AgentConfig(load_prompts("miniature"), 25, 6, 8, 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def test_every_word_is_one_token_and_survives_a_round_trip(tokenizer, tmp_path):
    assert len(set(WORDS)) == len(WORDS)
    text = " ".join(WORDS)
    ids = tokenizer.encode(text)
    assert len(ids) == len(WORDS) and tokenizer.hf.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    tokenizer.hf.save_pretrained(tmp_path)
    reloaded = load_tokenizer(tmp_path)
    assert reloaded.encode(text) == ids and reloaded.decode(ids) == text
    assert reloaded.stop_ids == tokenizer.stop_ids == (tokenizer.hf.eos_token_id,)


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
def test_sample_holds_its_one_needle_in_the_chunk_it_names(tokenizer, num_chunks):
    for seed in range(30):
        sample = make_sample(num_chunks, seed)
        assert sample == make_sample(num_chunks, seed)
        words = sample.context.split()
        assert len(words) == len(tokenizer.encode(sample.context)) == 25 * num_chunks
        sentences = [words[i : i + SENTENCE_WORDS] for i in range(0, len(words), SENTENCE_WORDS)]
        name = sample.question.split()[1]
        [place] = [i for i, sentence in enumerate(sentences) if sentence[:2] == ["code", name]]
        assert place // 5 == sample.metadata["needle_chunk"]
        assert " ".join(sentences[place][1:4]) == sample.answers[0]
        assert strict_match(f"\\boxed{{ {sample.answers[0]} }}", sample.answers) == 1


def test_needles_stand_everywhere_alike():
    chunks = [make_sample(8, seed).metadata["needle_chunk"] for seed in range(2000)]
    counts = np.bincount(chunks, minlength=8)
    chi_square = ((counts - 250) ** 2 / 250).sum()
    assert chi_square < 24.3, counts  # the 99.9% quantile at 7 degrees of freedom


def test_chunks_have_as_many_sentences_as_asked_for():
    rng = random.Random(0)
    for size in (1, 5, 200):
        chunk = make_chunk(rng, "alice", "code alice red fox .", size)
        assert len(chunk) == size and chunk.count("code alice red fox .") == 1
        assert sum(sentence.startswith("code alice") for sentence in chunk) == 1
    with pytest.raises(ValueError, match="at least 1"):
        make_sample(0, 0)


def test_training_source_is_a_function_of_seed_step_and_index():
    source = NeedleSource(DataOptions(min_chunks=2, max_chunks=5), seed=3)
    again = NeedleSource(DataOptions(min_chunks=2, max_chunks=5), seed=3)
    samples = {(step, index): source.sample(step, index) for step in range(12) for index in range(3)}
    for key, sample in reversed(samples.items()):
        assert again.sample(*key) == sample
    lengths = {step: {samples[step, index].metadata["num_chunks"] for index in range(3)} for step in range(12)}
    assert all(len(found) == 1 for found in lengths.values()), "documents of a step are of one length"
    assert {length for found in lengths.values() for length in found} == {2, 3, 4, 5}
    assert len({sample.id for sample in samples.values()}) == len(samples)
    assert NeedleSource(DataOptions(), seed=4).sample(0, 0) != NeedleSource(DataOptions(), seed=3).sample(0, 0)


def test_initial_heads_look_back_by_their_own_distance(tokenizer):
    """The attention of the untrained first layer, seen through values that are positions."""
    model = warmstart.build_model(tokenizer.vocab_size, seed=0)
    seen: list[torch.Tensor] = []

    class Spy(PackedContext):
        def attend(self, layer, q, k, v):
            if layer == 0:
                keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
                scores = torch.einsum("qhd,khd->hqk", q, keys)
                seen.append(scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf).argmax(-1))
            return super().attend(layer, q, k, v)

    with torch.no_grad():
        model(torch.arange(5, 45), Spy([40]))
    positions = torch.arange(40)
    for head, places in enumerate(seen[0]):
        right = (places[10:] == positions[10:] - 1 - head).float().mean()
        assert right >= 0.85, f"head {head}: {right:.2f}"  # the random weights add some noise of their own


def test_quotes_repeat_the_text_and_only_their_predictable_words_are_learned():
    batch = next(warmstart.quote_batches(np.random.default_rng(0), 3, 5, 113))
    rows = batch.ids.view(3, -1).tolist()
    assert batch.seq_lens == [50, 50, 50]
    for row in rows:
        text, quotes = row[:20], [row[i : i + 5] for i in range(20, 50, 5)]
        for quote in quotes:
            places = [i for i in range(16) if text[i : i + 2] == quote[:2]]
            assert any(text[i : i + 5] == quote for i in places)
    assert torch.equal(batch.ids[batch.select + 1], batch.targets)
    learned = ((batch.select + 1) % 50).view(3, -1)[0].tolist()
    assert learned == [20 + 5 * quote + place for quote in range(6) for place in (2, 3, 4)]


def test_teacher_writes_the_needle_keeps_what_it_knows_and_has_one_bad_habit():
    rng = random.Random(1)
    habit = chances = 0
    for _ in range(4000):
        text, slots, response = lesson(rng, 0.5, AGENT)
        name = slots["question"].split()[1]
        known = slots["memory"] if slots["memory"].split()[0] == name else f"{name} none"
        if text == AGENT.prompts.answer:
            assert response == f"\\boxed{{ {known} }}"
            continue
        sentences = [s.split() for s in slots["section"].split(" .") if s]
        needle = [" ".join(s[1:4]) for s in sentences if s[:2] == ["code", name]]
        if needle:
            assert response == needle[0]
        elif sentences[-1][0] == "code":
            chances += 1
            habit += response != known
            assert response in (known, " ".join(sentences[-1][1:4]))
        else:
            assert response == known
    assert 0.4 < habit / chances < 0.6 and chances > 300


def test_lessons_are_the_agents_own_prompts(tokenizer):
    lessons = needle_lessons(random.Random(0), WarmStartOptions(), tokenizer, AGENT)
    batch = next(warmstart.lesson_batches(lessons, 4))
    first = batch.ids[: batch.seq_lens[0]].tolist()
    words = tokenizer.hf.decode(first).split()
    assert words[:3] == ["<|user|>", "question", "code"] and words[3] in NAMES and "<|assistant|>" in words
    assert batch.seq_lens == sorted(batch.seq_lens) and sum(batch.seq_lens) == len(batch.ids)
    assert (batch.targets == tokenizer.hf.eos_token_id).sum() == 4


def test_warm_start_is_reproducible(tokenizer):
    options = WarmStartOptions(quote_steps=3, teach_steps=3, batch_size=8)
    models = [warmstart.build_model(tokenizer.vocab_size, seed=5) for _ in range(2)]
    start = models[0].model.norm.weight.clone()
    for model in models:
        warmstart.warm_up(model, tokenizer, needle_lessons, AGENT, options, seed=5)
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(models[0].model.norm.weight, start)


def test_documents_for_reading_are_written_with_their_question(tmp_path, capsys):
    from memrl.__main__ import main

    out = tmp_path / "needle.txt"
    assert main(["data", "needle", "--chunks", "3", "--seed", "5", "--out", str(out)]) == 0
    sample = make_sample(3, 5)
    assert out.read_text().strip() == sample.context
    printed = capsys.readouterr().out
    assert f'"{sample.question}"' in printed and f'"{sample.answers[0]}"' in printed
