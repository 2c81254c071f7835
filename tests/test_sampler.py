"""The sampler against a loop without a cache: shared prefixes, chunked prompts, batches, attention backends, interruptions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.kernels.attention import pick_attention
from memrl.kernels.attention.base import PageTable
from memrl.model import PackedContext, Transformer, logits_of
from memrl.sampler import Request, Sampler, SamplingParams, kv_cache
from memrl.sampler.cuda_graphs import DecodeGraphs
from memrl.sampler.kv_cache import KVCache
from memrl.sampler.sampler import step_tokens
from memrl.utils.seeds import row_seed
from tests.page_accounting import check_pages

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


class NumberTokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))


def random_prompts(lengths, seed=0, vocab_size=512):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def greedy_without_cache(model, prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def teacher_forced(model, prompts, completions, temperature):
    """Log-probabilities of the completions from one packed forward pass, as training computes them."""
    ids, select, targets, seq_lens = [], [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        first = len(ids) + len(prompt) - 1
        select += range(first, first + len(completion.ids))
        targets += completion.ids
        ids += prompt + completion.ids[:-1]
        seq_lens.append(len(prompt) + len(completion.ids) - 1)
    with torch.no_grad():
        logprobs, _ = model(
            torch.tensor(ids),
            PackedContext(seq_lens),
            torch.tensor(select),
            torch.tensor(targets),
            temperature,
        )
    return logprobs


def assert_same_completions(got, expected, atol=1e-5):
    assert [c.ids for c in got] == [c.ids for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=atol, rtol=0)


# Against plain forward passes


def test_greedy_equals_the_loop_without_a_cache(tiny_model):
    lengths = [1, 60, 17, 17, 33, 2, 59, 1, 8, 45, 31, 32, 5]
    prompts = random_prompts(lengths)
    before = [list(prompt) for prompt in prompts]
    each = [replace(GREEDY, max_new_tokens=3 + i % 9) for i in range(len(prompts))]
    sampler = Sampler(tiny_model, max_rows=4, max_step_tokens=64, page_size=16)
    completions = sampler.generate(prompts, each)
    for prompt, params, completion in zip(prompts, each, completions, strict=True):
        assert completion.ids == greedy_without_cache(tiny_model, prompt, params.max_new_tokens)
        assert completion.finish_reason == "length"
    assert prompts == before


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_packed_forward_pass(tiny_model, temperature):
    prompts = random_prompts([1, 40, 7, 7, 25, 60, 3])
    each = [SamplingParams(15 - i, temperature, seed=i) for i in range(len(prompts))]
    completions = Sampler(tiny_model, max_rows=3).generate(prompts, each)
    sampled = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    expected = teacher_forced(tiny_model, prompts, completions, temperature)
    torch.testing.assert_close(sampled, expected, atol=1e-5, rtol=0)
    other = teacher_forced(tiny_model, prompts, completions, 1.7 - temperature)
    assert (sampled - other).abs().max() > 0.01  # the temperature is in them


def test_greedy_logprobs_are_those_of_temperature_one(tiny_model):
    prompts = random_prompts([4, 9])
    completions = Sampler(tiny_model).generate(prompts, GREEDY)
    sampled = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    torch.testing.assert_close(sampled, teacher_forced(tiny_model, prompts, completions, 1.0), atol=1e-5, rtol=0)


def test_truncated_sampling_reports_both_log_probabilities(tiny_model):
    prompts = random_prompts([4, 9, 30])
    each = [SamplingParams(10, 0.7, top_p=0.5, top_k=20, seed=i) for i in range(3)]
    completions = Sampler(tiny_model).generate(prompts, each)
    full = torch.tensor([logprob for completion in completions for logprob in completion.full_logprobs])
    torch.testing.assert_close(full, teacher_forced(tiny_model, prompts, completions, 0.7), atol=1e-5, rtol=0)
    drawn_from = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    assert (drawn_from > full + 0.1).all()  # what is left shares at most half of the mass


# Independence of the batch


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 1},
        {"max_rows": 3, "max_step_tokens": 4},
        {"max_rows": 5, "max_step_tokens": 70, "page_size": 8},
        {"max_rows": 64, "max_step_tokens": 10**6, "page_size": 1, "cache_gib": 0.01},
        {"cache_gib": 200 * 512 / 2**30, "page_size": 4},  # 200 tokens of 512 bytes: not all of these rows at once
        {"share_prefixes": False},
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_batch(tiny_model, options):
    prompts = random_prompts([12, 1, 50, 12, 33, 8, 50, 2, 21])
    each = [SamplingParams(4 + 3 * (i % 4), 1.0, seed=row_seed(7, i)) for i in range(len(prompts))]
    alone = [Sampler(tiny_model).generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert_same_completions(Sampler(tiny_model, **options).generate(prompts, each), alone)
    backwards = Sampler(tiny_model, **options).generate(prompts[::-1], each[::-1])
    assert_same_completions(backwards[::-1], alone)
    without_some = Sampler(tiny_model, **options).generate(prompts[1::2], each[1::2])
    assert_same_completions(without_some, alone[1::2])


def test_equal_seeds_reproduce_and_different_seeds_differ(tiny_model):
    prompt = random_prompts([10])[0]
    params = SamplingParams(20, seed=5)
    first, twin, other = Sampler(tiny_model).generate([prompt] * 3, [params, params, replace(params, seed=6)])
    assert first.ids == twin.ids == Sampler(tiny_model).generate([prompt], params)[0].ids
    matches = sum(a == b for a, b in zip(first.ids, other.ids, strict=True))
    assert matches < 10


def test_a_draw_depends_on_the_place_in_the_response_and_not_on_the_prompts_length(flat_model):
    completions = Sampler(flat_model).generate([[1], [2] * 9, [3] * 40], SamplingParams(20, seed=3))
    assert completions[0].ids == completions[1].ids == completions[2].ids


def test_a_repeated_context_does_not_repeat_the_draw(flat_model):
    # All distributions of this model are equal, so only the position can make one row's tokens differ.
    ids = Sampler(flat_model).generate([[1, 2]], SamplingParams(64, seed=3))[0].ids
    assert len(set(ids)) >= 12


@pytest.fixture
def flat_model(tiny_config):
    model = Transformer(replace(tiny_config, vocab_size=16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_per_request_parameters_hold_in_a_mixed_batch(tiny_model):
    prompts = random_prompts([6, 40, 6, 13, 6, 22])
    each = [
        GREEDY,
        SamplingParams(9, 1.0, seed=1),
        SamplingParams(5, 0.7, seed=2),
        SamplingParams(14, 2.0, top_k=3, seed=3),
        SamplingParams(1, 1.5, seed=4),
        SamplingParams(11, 1.0, top_p=0.3, stop_ids=range(200), seed=5),
    ]
    alone = [Sampler(tiny_model).generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    together = Sampler(tiny_model, NumberTokenizer(), max_rows=4).generate(prompts, each)
    assert_same_completions(together, alone)
    assert [len(c.ids) for c in together[:5]] == [12, 9, 5, 14, 1]
    assert together[5].finish_reason == "stop"


# How a row ends


def test_any_stop_id_ends_the_row_and_stays_in_it(tiny_model):
    prompts = random_prompts([9, 14, 25])
    free = Sampler(tiny_model).generate(prompts, [SamplingParams(16, seed=i) for i in range(3)])
    stops = (free[0].ids[4], free[1].ids[7])
    stopped = Sampler(tiny_model, NumberTokenizer()).generate(
        prompts, [SamplingParams(16, stop_ids=stops, seed=i) for i in range(3)]
    )
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.ids) if token in stops]
        length = ends[0] + 1 if ends else 16
        assert cut.ids == whole.ids[:length]
        assert len(cut.logprobs) == length
        assert cut.finish_reason == ("stop" if ends else "length")
        assert cut.text == " ".join(map(str, whole.ids[: ends[0]] if ends else whole.ids))
    assert [c.finish_reason for c in stopped[:2]] == ["stop", "stop"]
    assert {stopped[0].ids[-1], stopped[1].ids[-1]} == set(stops)


def test_a_stop_id_at_the_last_allowed_token_is_a_stop(tiny_model):
    prompt = random_prompts([9])[0]
    ids = Sampler(tiny_model).generate([prompt], SamplingParams(16, seed=1))[0].ids
    length = next(i + 1 for i in range(4, 16) if ids[i] not in ids[:i])
    completion = Sampler(tiny_model).generate([prompt], SamplingParams(length, stop_ids=[ids[length - 1]], seed=1))[0]
    assert (completion.ids, completion.finish_reason) == (ids[:length], "stop")


def test_one_new_token_comes_from_the_prefill_alone(tiny_model):
    prompts = random_prompts([1, 5, 60, 5])
    sampler = Sampler(tiny_model, max_rows=2)
    completions = sampler.generate(prompts, replace(GREEDY, max_new_tokens=1))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.ids == greedy_without_cache(tiny_model, prompt, 1)
        assert completion.finish_reason == "length"
        assert len(completion.logprobs) == 1


def test_no_prompts_give_no_completions(tiny_model):
    sampler = Sampler(tiny_model)
    assert sampler.generate([], GREEDY) == []
    assert sampler.step() == []


def test_text_is_empty_without_a_tokenizer(tiny_model):
    assert Sampler(tiny_model).generate([[1]], GREEDY)[0].text == ""


def test_stop_strings_end_a_row_wherever_tokens_begin(tiny_model):
    prompt = random_prompts([9])[0]
    tokenizer = NumberTokenizer()
    ids = Sampler(tiny_model, tokenizer).generate([prompt], SamplingParams(16, seed=1))[0].ids
    text = tokenizer.decode(ids)
    stop = text[len(tokenizer.decode(ids[:5])) - 1 :][:4]  # from the fifth token's last digit into the next ones
    first = text.index(stop)
    (completion,) = Sampler(tiny_model, tokenizer).generate([prompt], SamplingParams(16, stop=["never", stop], seed=1))
    assert completion.finish_reason == "stop"
    assert completion.text == text[:first]
    assert completion.ids == ids[: len(completion.ids)]
    assert stop in tokenizer.decode(completion.ids) and stop not in tokenizer.decode(completion.ids[:-1])
    with pytest.raises(ValueError, match="stop strings need a sampler with a tokenizer"):
        Sampler(tiny_model).generate([prompt], SamplingParams(16, stop=[stop]))


# What is shared


def conversations(seed, num_groups=3, group_size=4):
    """Prompts in groups: a document, then a question, then notes that differ; some notes are equal, some prompts are prefixes."""
    documents = random_prompts([70, 33, 128], seed=seed)
    prompts = []
    for document in documents[:num_groups]:
        for i in range(group_size):
            notes = random_prompts([(0, 5, 5, 31)[i % 4]], seed=seed + 10 + i // 2)[0]
            prompts.append(document + notes)
    return prompts


@pytest.fixture
def always_in_runs(monkeypatch):
    """However little is shared, it is attended to as a run."""
    monkeypatch.setattr(kv_cache, "MIN_SAVED_TOKENS", 1)


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("max_step_tokens", [9, 64, 4096])
def test_sharing_changes_no_log_probability(tiny_model, always_in_runs, page_size, max_step_tokens):
    prompts = conversations(1)
    each = [SamplingParams(6 + i % 9, seed=row_seed(i)) for i in range(len(prompts))]
    options = {"page_size": page_size, "max_step_tokens": max_step_tokens}
    shared = Sampler(tiny_model, **options).generate(prompts, each)
    assert_same_completions(shared, Sampler(tiny_model, share_prefixes=False, **options).generate(prompts, each))
    sampled = torch.tensor([logprob for completion in shared for logprob in completion.logprobs])
    torch.testing.assert_close(sampled, teacher_forced(tiny_model, prompts, shared, 1.0), atol=1e-5, rtol=0)


def count_tokens(sampler):
    """Counts the tokens that the model computes while the sampler works."""
    seen = []
    inner = sampler.model.forward

    def forward(ids, *args, **kwargs):
        seen.append(len(ids))
        return inner(ids, *args, **kwargs)

    sampler.model.forward = forward
    return seen


def test_a_groups_prompt_is_computed_once_and_attended_to_once(tiny_model, always_in_runs):
    prompt = random_prompts([100])[0]
    sampler = Sampler(tiny_model, page_size=16)
    seen, calls = count_tokens(sampler), []
    inner = sampler.attention.dense

    def dense(q, k, v):
        calls.append((len(q), len(k)))
        return inner(q, k, v)

    sampler.attention.dense = dense
    sampler.generate([prompt] * 8, [SamplingParams(5, seed=i) for i in range(8)])
    assert seen[0] == 100
    assert sum(seen) == 100 + 7 + 8 * 4
    # After one step of its own the first row is joined by seven, which outlive it by one step; all see the 6 whole pages of the
    # prompt in one product per layer.
    assert calls == [(8, 96)] * 2 * 4 + [(7, 96)] * 2


def test_a_shared_page_is_stored_once(tiny_model):
    prompt = random_prompts([64])[0]
    sampler = Sampler(tiny_model, page_size=16)
    for i in range(10):
        sampler.submit(Request([*prompt, i], SamplingParams(4, seed=i)))
    sampler.step()
    sampler.step()
    assert len(sampler.scheduler.rows) == 10
    assert sampler.scheduler.pool.num_in_use == 4 + 10


def test_new_weights_are_sampled_from_at_once(tiny_model, randomize):
    prompts = random_prompts([20, 131])
    sampler = Sampler(tiny_model, page_size=16)
    before = sampler.generate(prompts, GREEDY)
    randomize(tiny_model, seed=1)
    after = sampler.generate(prompts, GREEDY)
    assert [c.ids for c in after] == [greedy_without_cache(tiny_model, prompt, 12) for prompt in prompts]
    assert [c.ids for c in after] != [c.ids for c in before]


def test_a_weight_update_that_pytorch_does_not_count_is_announced(tiny_model, randomize):
    prompts = random_prompts([50])
    sampler = Sampler(tiny_model, page_size=16)
    sampler.generate(prompts, GREEDY)
    twin = Transformer(tiny_model.config)
    randomize(twin, seed=1)
    for mine, new in zip(tiny_model.parameters(), twin.parameters(), strict=True):
        mine.data.copy_(new.data)  # as DeepSpeed does: the tensor's version stays
    sampler.weights_changed()
    assert sampler.generate(prompts, GREEDY)[0].ids == greedy_without_cache(tiny_model, prompts[0], 12)
    sampler.submit(Request(prompts[0], GREEDY))
    with pytest.raises(RuntimeError, match="in flight"):
        sampler.weights_changed()


# The cache


def bounded_sampler(model, num_tokens, page_size=4, **options):
    per_token = KVCache.bytes_per_token(model.config, model.dtype)
    return Sampler(model, cache_gib=num_tokens * per_token / 2**30, page_size=page_size, **options)


def test_bytes_per_token_is_what_the_cache_takes(tiny_model):
    sampler = bounded_sampler(tiny_model, 64)
    sampler.generate([[1, 2]], GREEDY)
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*sampler.cache.k, *sampler.cache.v))
    assert total == (64 + 4) * KVCache.bytes_per_token(tiny_model.config, tiny_model.dtype)  # and the scratch page


def test_requests_wait_for_room_in_the_cache(tiny_model):
    sampler = bounded_sampler(tiny_model, 224)
    prompts = random_prompts([50, 3, 120, 200, 7, 60, 30, 90, 1, 1, 1, 1, 1, 1, 1, 40, 217])
    requests = [Request(prompt, replace(GREEDY, max_new_tokens=4 + i % 5)) for i, prompt in enumerate(prompts[:-1])]
    requests.append(Request(prompts[-1], replace(GREEDY, max_new_tokens=8)))  # fills the whole cache
    for request in requests:
        sampler.submit(request)
    most = 0
    while sampler.has_work:
        sampler.step()
        most = max(most, len(sampler.scheduler.rows))
    assert 1 < most < len(requests)
    for request in requests:
        assert request.ids == greedy_without_cache(tiny_model, request.prompt_ids, request.params.max_new_tokens)


def test_a_request_that_can_never_fit_is_an_error_with_both_sizes(tiny_model):
    sampler = bounded_sampler(tiny_model, 256)
    sampler.submit(Request([1] * 200, replace(GREEDY, max_new_tokens=57)))
    sampler.abort()
    with pytest.raises(ValueError, match=r"200 tokens .* 58 new .* 260 tokens, but cache_gib allows 256") as error:
        sampler.submit(Request([1] * 200, replace(GREEDY, max_new_tokens=58)))
    assert "\n" not in str(error.value)
    assert not sampler.has_work


def test_memory_that_held_something_else_never_leaks_into_the_output(tiny_model):
    prompts = random_prompts([40, 1, 17, 60])
    expected = [greedy_without_cache(tiny_model, prompt, 6) for prompt in prompts]
    sampler = bounded_sampler(tiny_model, 512, 16, max_rows=3, max_step_tokens=32)
    sampler.cache.prepare([], [])
    for tensor in (*sampler.cache.k, *sampler.cache.v):
        tensor.fill_(math.nan)
    completions = sampler.generate(prompts, replace(GREEDY, max_new_tokens=6))
    assert [c.ids for c in completions] == expected
    assert all(math.isfinite(logprob) for c in completions for logprob in c.logprobs)


def test_released_cache_takes_no_memory_and_comes_back(tiny_model):
    sampler = Sampler(tiny_model, page_size=16)
    prompts = random_prompts([100])
    before = sampler.generate(prompts, GREEDY)
    sampler.release()
    assert not sampler.cache.k and not sampler.cache.v
    assert sampler.generate(prompts, GREEDY)[0].ids == before[0].ids


def test_a_bfloat16_model_samples_with_a_bfloat16_cache(tiny_model):
    model = tiny_model.to(torch.bfloat16)
    prompts = random_prompts([1, 12, 40])
    sampler = Sampler(model, max_rows=2)
    completions = sampler.generate(prompts, [SamplingParams(10, seed=i) for i in range(3)])
    assert {tensor.dtype for tensor in (*sampler.cache.k, *sampler.cache.v)} == {torch.bfloat16}
    sampled = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    # Rounding differs between the two paths by a few of bfloat16's 8 bits.
    torch.testing.assert_close(sampled, teacher_forced(model, prompts, completions, 1.0), atol=0.1, rtol=0)


# The schedule


def test_a_finished_rows_place_goes_to_the_next_request(tiny_model):
    # Eight requests of two tokens, one after the other in the second row: two steps each.
    sampler = Sampler(tiny_model, max_rows=2)
    long = Request([1, 2], replace(GREEDY, max_new_tokens=17))
    short = [Request([3, i], replace(GREEDY, max_new_tokens=2)) for i in range(8)]
    for request in (long, *short):
        sampler.submit(request)
    finished = []
    while sampler.has_work:
        finished.append(sampler.step())
        assert len(sampler.scheduler.rows) <= 2
    assert len(finished) == 17
    assert [request for step in finished for request in step if request is not long] == short


def test_a_step_computes_no_more_tokens_than_it_may(tiny_model):
    sampler = Sampler(tiny_model, max_step_tokens=20)
    seen = count_tokens(sampler)
    sampler.generate(random_prompts([30, 10, 95, 1]), GREEDY)
    assert max(seen) == 20


def test_a_steps_tokens_follow_the_models_width(tiny_config):
    cpu = torch.device("cpu")
    assert step_tokens(replace(tiny_config, intermediate_size=4864), torch.bfloat16, cpu) == 512
    assert step_tokens(replace(tiny_config, intermediate_size=18944), torch.bfloat16, cpu) == 128
    assert step_tokens(replace(tiny_config, intermediate_size=10**9), torch.float32, cpu) == 64
    assert step_tokens(tiny_config, torch.float32, cpu) == 9728
    assert step_tokens(tiny_config, torch.bfloat16, torch.device("cuda")) == 8192


@pytest.mark.parametrize("in_runs", [False, True])
def test_random_schedules_equal_one_request_at_a_time(tiny_model, in_runs, monkeypatch):
    monkeypatch.setattr(kv_cache, "MIN_SAVED_TOKENS", 1 if in_runs else 10**9)
    prompts = [*random_prompts([1, 3, 9, 17, 31, 40, 2]), *conversations(5, 2)]
    each = [
        SamplingParams(
            max_new_tokens=1 + (5 * i) % 9,
            temperature=(1.0, 0.0, 0.8)[i % 3],
            top_k=(0, 0, 0, 7)[i % 4],
            stop_ids=range(0, 512, 5),
            seed=row_seed(i),
        )
        for i in range(len(prompts))
    ]
    alone = [Sampler(tiny_model).generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert {c.finish_reason for c in alone} == {"stop", "length"}

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        actions=st.lists(st.one_of(st.just("step"), st.integers(0, len(prompts) - 1)), max_size=24),
        max_rows=st.integers(1, 5),
        max_step_tokens=st.integers(1, 60),
        cache_tokens=st.sampled_from([128, 224, 10_000]),
        page_size=st.sampled_from([1, 4, 16]),
    )
    def check(actions, max_rows, max_step_tokens, cache_tokens, page_size):
        sampler = bounded_sampler(tiny_model, cache_tokens, page_size, max_rows=max_rows, max_step_tokens=max_step_tokens)
        submitted, finished = [], []

        def step():
            finished.extend(sampler.step())
            check_pages(sampler.scheduler.pool, [row.table for row in sampler.scheduler.rows])

        for action in actions:
            if action == "step":
                step()
            else:
                request = Request(prompts[action], each[action], tag=action)
                sampler.submit(request)
                submitted.append(request)
        while sampler.has_work:
            step()
        assert sorted(map(id, finished)) == sorted(map(id, submitted))  # each is returned exactly once
        assert sampler.scheduler.pool.num_in_use == 0
        assert_same_completions(
            [sampler.completion(request) for request in submitted],
            [alone[request.tag] for request in submitted],
        )

    check()


# Backends and graphs


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_every_backend_gives_the_same_greedy_tokens(tiny_model, always_in_runs, name):
    prompts = conversations(2)
    expected = [greedy_without_cache(tiny_model, prompt, 12) for prompt in prompts]
    attention, _ = pick_attention(name, "cpu", torch.float32)
    sampler = Sampler(tiny_model, page_size=8, max_step_tokens=50, attention=attention)
    assert [c.ids for c in sampler.generate(prompts, GREEDY)] == expected


class TableAttention(type(pick_attention("eager", "cpu", torch.float32)[0])):
    """Reads pages through a table of fixed shape, as the GPU backends do."""

    graphable = True

    def plan_pages(self, tables, lengths, page_size, device):
        return PageTable(tables.int(), lengths.int())

    def pages(self, q, k_pages, v_pages, plan):
        outs = []
        for row, (table, length) in enumerate(zip(plan.pages.long(), plan.lengths.tolist(), strict=True)):
            k, v = (pages[table].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
            outs.append(self.dense(q[row : row + 1], k, v))
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))


def test_decoding_in_graphs_fills_buckets_and_never_captures_by_length(tiny_model):
    captured = []

    def capture(function):
        captured.append(function())
        return function

    sampler = Sampler(tiny_model, page_size=4, max_rows=6, attention=TableAttention())
    sampler.graphs = DecodeGraphs(tiny_model, sampler.cache, sampler.attention, 6, capture)
    prompts = random_prompts([3, 20, 9, 30, 1, 14, 2, 8])
    each = [replace(GREEDY, max_new_tokens=3 + 5 * i) for i in range(len(prompts))]
    completions = sampler.generate(prompts, each)
    for prompt, params, completion in zip(prompts, each, completions, strict=True):
        assert completion.ids == greedy_without_cache(tiny_model, prompt, params.max_new_tokens)
    # Rows by powers of two up to 6, pages by powers of two: far fewer than the 38 steps.
    assert {len(logits) for logits in captured} <= {1, 2, 4, 6}
    assert 3 <= len(captured) <= 12
    again = len(captured)
    sampler.generate(prompts, each)
    assert len(captured) == again
    sampler.release()
    assert [c.ids for c in sampler.generate(prompts, each)] == [c.ids for c in completions]
    assert len(captured) > again  # the old graphs pointed into memory that is gone


# Mistakes


def test_an_empty_prompt_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="empty prompt"):
        Sampler(tiny_model).generate([[]], GREEDY)


def test_a_refused_prompt_leaves_nothing_behind(tiny_model):
    sampler = Sampler(tiny_model)
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.generate([[1, 2], []], GREEDY)
    assert not sampler.has_work


def test_the_number_of_params_must_fit_the_number_of_prompts(tiny_model):
    with pytest.raises(ValueError, match="2 prompts came with 3 SamplingParams"):
        Sampler(tiny_model).generate([[1], [2]], [GREEDY] * 3)


def test_abort_forgets_everything(tiny_model):
    prompts = random_prompts([30, 5, 12])
    sampler = Sampler(tiny_model, max_rows=2)
    for prompt in prompts:
        sampler.submit(Request(prompt, GREEDY))
    sampler.step()
    sampler.abort()
    assert not sampler.has_work
    assert sampler.step() == []
    assert sampler.generate(prompts[:1], GREEDY)[0].ids == greedy_without_cache(tiny_model, prompts[0], 12)


def test_an_interrupted_step_leaves_nothing_behind(tiny_model):
    prompts = random_prompts([70, 70])
    sampler = Sampler(tiny_model, page_size=16, max_step_tokens=32)
    inner, calls = tiny_model.forward, []

    def forward(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return inner(*args, **kwargs)

    tiny_model.forward = forward
    with pytest.raises(KeyboardInterrupt):
        sampler.generate(prompts, GREEDY)
    assert not sampler.has_work
    check_pages(sampler.scheduler.pool, [])
    # What was planned and not computed must not be found.
    assert [c.ids for c in sampler.generate(prompts, GREEDY)] == [greedy_without_cache(tiny_model, p, 12) for p in prompts]


def test_an_idle_step_between_two_batches_changes_nothing(tiny_model):
    sampler = Sampler(tiny_model)
    sampler.generate([[1], [2]], GREEDY)
    assert sampler.step() == []
    prompt = [1, 2, 3, 4, 5]
    assert sampler.generate([prompt], GREEDY)[0].ids == greedy_without_cache(tiny_model, prompt, 12)


def test_a_copied_page_that_is_given_away_in_the_same_step_keeps_its_content(tiny_model):
    prompts = random_prompts([7, 8])
    once = replace(GREEDY, max_new_tokens=1)
    sampler = bounded_sampler(tiny_model, 16, 4)
    sampler.generate(prompts[:1], once)
    again = sampler.generate(prompts, once)
    assert_same_completions(again, [Sampler(tiny_model).generate([prompt], once)[0] for prompt in prompts])


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"max_step_tokens": 0}, {"page_size": -1}], ids=str)
def test_senseless_sizes_are_errors(tiny_model, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Sampler(tiny_model, **options)
