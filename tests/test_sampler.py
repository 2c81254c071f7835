"""The sampler against a loop without a cache, and its randomness against the distributions that it claims."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.model import PackedContext, Transformer, logits_of
from memrl.sampler import Request, Sampler, SamplingParams, row_seed
from memrl.sampler.kv_cache import KVCache
from memrl.sampler.sampling import sample_tokens, uniform

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
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=atol, rtol=0
        )


def chi_square_limit(degrees):
    """The 99.9% quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def assert_drawn_from(ids, probabilities):
    """Chi-square test of the ids' counts; no id of probability zero may occur."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * len(ids)
    assert expected.min() > 5, "too few draws for the test to mean anything"
    statistic = float(((counts[possible] - expected).square() / expected).sum())
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def draw(logits, num_draws, temperature=1.0, top_p=1.0, top_k=0, seed=11):
    """Many tokens of one distribution, each row with a seed of its own."""
    seeds = torch.tensor([row_seed(seed, i) for i in range(num_draws)])
    ids, logprobs = sample_tokens(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_p),
        torch.full((num_draws,), top_k),
        uniform(seeds, torch.zeros_like(seeds)),
        truncated=top_p < 1 or top_k > 0,
    )
    return ids, logprobs


# Against plain forward passes


def test_greedy_equals_the_loop_without_a_cache(tiny_model):
    lengths = [1, 60, 17, 17, 33, 2, 59, 1, 8, 45, 31, 32, 5]
    prompts = random_prompts(lengths)
    before = [list(prompt) for prompt in prompts]
    each = [replace(GREEDY, max_new_tokens=3 + i % 9) for i in range(len(prompts))]
    sampler = Sampler(tiny_model, max_rows=4, max_prefill_tokens=64)
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
    torch.testing.assert_close(
        sampled, teacher_forced(tiny_model, prompts, completions, 1.0), atol=1e-5, rtol=0
    )


def test_truncated_sampling_still_reports_the_untruncated_logprobs(tiny_model):
    prompts = random_prompts([4, 9, 30])
    each = [SamplingParams(10, 0.7, top_p=0.5, top_k=20, seed=i) for i in range(3)]
    completions = Sampler(tiny_model).generate(prompts, each)
    sampled = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    torch.testing.assert_close(
        sampled, teacher_forced(tiny_model, prompts, completions, 0.7), atol=1e-5, rtol=0
    )


# Independence of the batch


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 1},
        {"max_rows": 3, "max_prefill_tokens": 1},
        {"max_rows": 5, "max_prefill_tokens": 70},
        {"max_rows": 64, "max_prefill_tokens": 10**6},
        {"cache_gib": 200 * 512 / 2**30},  # 200 tokens of 512 bytes: at most six of these rows at once
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_batch(tiny_model, options):
    prompts = random_prompts([12, 1, 50, 12, 33, 8, 50, 2, 21])
    each = [SamplingParams(4 + 3 * (i % 4), 1.0, seed=row_seed(7, i)) for i in range(len(prompts))]
    alone = [
        Sampler(tiny_model).generate([prompt], params)[0]
        for prompt, params in zip(prompts, each, strict=True)
    ]
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
    alone = [
        Sampler(tiny_model).generate([prompt], params)[0]
        for prompt, params in zip(prompts, each, strict=True)
    ]
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
    completion = Sampler(tiny_model).generate(
        [prompt], SamplingParams(length, stop_ids=[ids[length - 1]], seed=1)
    )[0]
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


# Distributions


def test_samples_follow_the_softmax():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    ids, logprobs = draw(logits, 20_000)
    assert_drawn_from(ids, logits.softmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[ids], atol=1e-6, rtol=0)


def test_samples_follow_the_softmax_at_a_temperature():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    ids, logprobs = draw(logits, 20_000, temperature=1.6)
    assert_drawn_from(ids, (logits / 1.6).softmax(-1))
    torch.testing.assert_close(logprobs, (logits / 1.6).log_softmax(-1)[ids], atol=1e-6, rtol=0)


def test_generated_tokens_follow_the_models_softmax(tiny_config, randomize):
    model = Transformer(replace(tiny_config, vocab_size=10)).eval()
    randomize(model, seed=3, std=0.15)
    num_draws = 3000
    each = [SamplingParams(1, seed=row_seed(i)) for i in range(num_draws)]
    completions = Sampler(model).generate([[1, 2, 3]] * num_draws, each)
    probabilities = logits_of(model, [1, 2, 3])[-1].softmax(-1)
    assert_drawn_from(torch.tensor([c.ids[0] for c in completions]), probabilities)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (0.95, 0), (1.0, 4), (0.8, 3), (0.3, 6), (1.0, 99)])
def test_truncated_samples_follow_the_renormalised_distribution(top_p, top_k):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2)) * 1.2
    p = logits.double().softmax(-1).tolist()
    allowed, mass = set(), 0.0
    for token in sorted(range(12), key=lambda i: -p[i]):
        if mass >= top_p or (top_k and len(allowed) == top_k):
            break
        allowed.add(token)
        mass += p[token]
    expected = torch.tensor([p[i] / mass if i in allowed else 0.0 for i in range(12)])
    assert len(allowed) < 12 or top_k == 99
    ids, logprobs = draw(logits, 20_000, top_p=top_p, top_k=top_k)
    assert_drawn_from(ids, expected)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[ids], atol=1e-6, rtol=0)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(tiny_model):
    prompts = random_prompts([3, 20, 44])
    greedy = Sampler(tiny_model).generate(prompts, GREEDY)
    assert_same_completions(
        Sampler(tiny_model).generate(prompts, SamplingParams(12, 1.0, top_k=1, seed=4)), greedy
    )
    assert_same_completions(
        Sampler(tiny_model).generate(prompts, SamplingParams(12, 1.0, top_p=1e-6, seed=4)), greedy
    )


def test_top_k_keeps_exactly_k_tokens_of_a_tie():
    ids, _ = draw(torch.zeros(8), 4000, top_k=3)
    assert ids.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.05, 4.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5)])
def test_a_token_of_probability_zero_is_never_picked(temperature, top_p, top_k):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 300, generator=generator) * 10  # at temperature 0.05 most of them underflow to 0
    rows[torch.rand(64, 300, generator=generator) < 0.5] = -torch.inf
    rows[:, 0] = rows[:, -1] = -torch.inf  # the two ends are what a search that is off by one runs into
    rows[0] = -torch.inf
    rows[0, 150] = -3.0  # one possible token
    full = torch.full
    for number in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        ids, logprobs = sample_tokens(
            rows,
            full((64,), temperature),
            full((64,), top_p),
            full((64,), top_k),
            full((64,), number, dtype=torch.float64),
            truncated=top_p < 1 or top_k > 0,
        )
        p = (rows / temperature).softmax(-1).gather(1, ids[:, None])
        assert (p > 0).all()
        assert torch.isfinite(logprobs).all()
        assert ids[0] == 150


def test_the_ends_of_a_large_vocabulary_are_reachable_and_in_range():
    logits = torch.zeros(2, 151_936)
    one = torch.ones(2)
    ids, _ = sample_tokens(
        logits, one, one, torch.zeros(2).long(), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), False
    )
    assert ids.tolist() == [0, 151_935]


def test_every_token_of_a_long_flat_tail_can_be_picked():
    # A tail token has a probability of 7e-10, but fp32 sums near 1 are 6e-8 apart: most would never come up.
    logits = torch.zeros(151_936)
    logits[0] = math.log(1e4 * 151_935)
    cdf = logits.log_softmax(-1).exp().double().cumsum(-1)
    tokens = torch.arange(1, 151_936, 1111)
    between = (cdf[tokens - 1] + cdf[tokens]) / 2 / cdf[-1]
    ones = torch.ones(len(tokens))
    ids, _ = sample_tokens(logits.expand(len(tokens), -1), ones, ones, ones.long() * 0, between, False)
    assert torch.equal(ids, tokens)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.5]])
    ids, _ = sample_tokens(
        logits, torch.tensor([0.0, 1.0]), torch.ones(2), torch.zeros(2).long(), torch.zeros(2).double(), False
    )
    assert ids.tolist() == [1, 0]


# Random numbers


def splitmix64(state, index):
    """Output `index` of the reference generator, in Python's unbounded integers."""
    mask = 2**64 - 1
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniform_is_splitmix64():
    # The published outputs for this seed pin the test's own definition.
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    pairs = [
        (s, i)
        for s in (0, 1, 1234567, 2**62 + 12345, 2**63 - 1, -1, -(2**63))
        for i in (0, 1, 2, 1000, 10**9)
    ]
    got = uniform(torch.tensor([s for s, _ in pairs]), torch.tensor([i for _, i in pairs]))
    assert got.tolist() == [(splitmix64(s, i) >> 11) * 2.0**-53 for s, i in pairs]


@pytest.mark.parametrize("vary", ["positions", "seeds", "hashed seeds"])
def test_uniform_is_uniform(vary):
    num = 50_000
    counter, fixed = torch.arange(num), torch.full((num,), 17)
    if vary == "positions":
        numbers = uniform(fixed, counter)
    elif vary == "seeds":
        numbers = uniform(counter, fixed)
    else:
        numbers = uniform(torch.tensor([row_seed(0, i) for i in range(num)]), fixed)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == num
    assert_drawn_from((numbers * 128).long(), torch.full((128,), 1 / 128))
    # Neighbours are uncorrelated: the estimate's standard error is 1/sqrt(num).
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / math.sqrt(num)


def test_row_seed_tells_identities_apart_and_never_changes():
    assert row_seed(0, 1, 2, 3, 4) == 1410846738257104941
    identities = [(a, b, c) for a in range(8) for b in range(8) for c in range(8)] + [
        (0,),
        (0, 0),
        (0, 0, 0, 0),
    ]
    seeds = [row_seed(*identity) for identity in identities]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# The cache


def cache_bytes(sampler):
    return sum(tensor.numel() * tensor.element_size() for tensor in (*sampler.cache.k, *sampler.cache.v))


def bounded_sampler(model, num_tokens, **options):
    per_token = KVCache.bytes_per_token(model.config, model.dtype)
    return Sampler(model, cache_gib=num_tokens * per_token / 2**30, **options), num_tokens * per_token


def run_within(sampler, limit):
    """Step to the end, checking the bound all the way; the most rows that were in flight at once."""
    most = 0
    while sampler.has_work:
        sampler.step()
        most = max(most, len(sampler.active))
        assert cache_bytes(sampler) <= limit
    return most


def test_bytes_per_token_is_what_the_cache_takes(tiny_model):
    cache = KVCache(tiny_model)
    cache.reserve(3, 64)
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*cache.k, *cache.v))
    assert total == 3 * 64 * KVCache.bytes_per_token(tiny_model.config, tiny_model.dtype)


def test_requests_wait_for_room_in_the_cache(tiny_model):
    sampler, limit = bounded_sampler(tiny_model, 224)  # seven rows of 32 tokens, and not a power of two
    prompts = random_prompts([50, 3, 120, 200, 7, 60, 30, 90, 1, 1, 1, 1, 1, 1, 1, 40, 217])
    requests = [
        Request(prompt, replace(GREEDY, max_new_tokens=4 + i % 5)) for i, prompt in enumerate(prompts[:-1])
    ]
    requests.append(Request(prompts[-1], replace(GREEDY, max_new_tokens=8)))  # fills the whole cache
    for request in requests:
        sampler.submit(request)
    most = run_within(sampler, limit)
    assert 1 < most < len(requests)
    for request in requests:
        assert request.ids == greedy_without_cache(
            tiny_model, request.prompt_ids, request.params.max_new_tokens
        )


def test_a_long_request_after_many_short_ones_stays_within_the_bound(tiny_model):
    # Many short rows leave many places behind; growing all of them for one long row would break the bound.
    sampler, limit = bounded_sampler(tiny_model, 512)
    short = [Request([i + 1], replace(GREEDY, max_new_tokens=2 + 20 * (i == 0))) for i in range(16)]
    for request in short:
        sampler.submit(request)
    sampler.step()
    assert len(sampler.active) == 1  # one row is left, and its keys and values have to survive the reshaping
    long = Request(random_prompts([250])[0], replace(GREEDY, max_new_tokens=3))
    sampler.submit(long)
    run_within(sampler, limit)
    for request in (*short, long):
        assert request.ids == greedy_without_cache(
            tiny_model, request.prompt_ids, request.params.max_new_tokens
        )


def test_a_request_that_can_never_fit_is_an_error_with_both_sizes(tiny_model):
    sampler, _ = bounded_sampler(tiny_model, 256)
    fits = Request([1] * 200, replace(GREEDY, max_new_tokens=57))
    sampler.submit(fits)
    sampler.abort()
    with pytest.raises(
        ValueError, match=r"200 tokens .* 58 new .* 288 tokens, but cache_gib allows 256"
    ) as error:
        sampler.submit(Request([1] * 200, replace(GREEDY, max_new_tokens=58)))
    assert "\n" not in str(error.value)
    assert not sampler.has_work


def test_the_cache_becomes_smaller_again(tiny_model):
    sampler = Sampler(tiny_model)
    sampler.generate(random_prompts([100] * 16), replace(GREEDY, max_new_tokens=2))
    large = cache_bytes(sampler)
    sampler.generate([[1]], replace(GREEDY, max_new_tokens=2))
    assert cache_bytes(sampler) < large / 16


def test_fresh_cache_memory_never_leaks_into_the_output(tiny_model):
    prompts = random_prompts([40, 1, 17, 60])
    expected = [greedy_without_cache(tiny_model, prompt, 6) for prompt in prompts]
    torch.use_deterministic_algorithms(True)  # makes torch fill uninitialised memory with NaN
    try:
        completions = Sampler(tiny_model, max_rows=3).generate(prompts, replace(GREEDY, max_new_tokens=6))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [c.ids for c in completions] == expected
    assert all(math.isfinite(logprob) for c in completions for logprob in c.logprobs)


def test_new_weights_are_sampled_from_at_once(tiny_model, randomize):
    prompts = random_prompts([20, 31])
    sampler = Sampler(tiny_model)
    before = sampler.generate(prompts, GREEDY)
    randomize(tiny_model, seed=1)
    after = sampler.generate(prompts, GREEDY)
    assert [c.ids for c in after] == [greedy_without_cache(tiny_model, prompt, 12) for prompt in prompts]
    assert [c.ids for c in after] != [c.ids for c in before]


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
    # A step gives a new row two tokens and an old one a single token. So eight requests of two tokens, one
    # after the other in the second row, are done when the one of ten in the first row is: after nine steps.
    sampler = Sampler(tiny_model, max_rows=2)
    long = Request([1, 2], replace(GREEDY, max_new_tokens=10))
    short = [Request([3, i], replace(GREEDY, max_new_tokens=2)) for i in range(8)]
    for request in (long, *short):
        sampler.submit(request)
    finished = []
    while sampler.has_work:
        finished.append(sampler.step())
        assert len(sampler.active) <= 2
    assert len(finished) == 9
    assert [request for step in finished for request in step if request is not long] == short


def test_a_prefill_longer_than_its_budget_is_admitted_alone(tiny_model):
    sampler = Sampler(tiny_model, max_prefill_tokens=20)
    for prompt in random_prompts([30, 10, 10, 1]):
        sampler.submit(Request(prompt, GREEDY))
    sampler.step()
    assert len(sampler.active) == 1
    sampler.step()
    assert len(sampler.active) == 3
    sampler.step()
    assert len(sampler.active) == 4


def test_random_schedules_equal_one_request_at_a_time(tiny_model):
    prompts = random_prompts([1, 3, 3, 9, 17, 31, 40, 2])
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
    alone = [
        Sampler(tiny_model).generate([prompt], params)[0]
        for prompt, params in zip(prompts, each, strict=True)
    ]
    assert {c.finish_reason for c in alone} == {"stop", "length"}

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(
        actions=st.lists(st.one_of(st.just("step"), st.integers(0, len(prompts) - 1)), max_size=24),
        max_rows=st.integers(1, 5),
        max_prefill_tokens=st.integers(1, 60),
        cache_tokens=st.sampled_from([64, 96, 224, 10_000]),
    )
    def check(actions, max_rows, max_prefill_tokens, cache_tokens):
        sampler, limit = bounded_sampler(
            tiny_model, cache_tokens, max_rows=max_rows, max_prefill_tokens=max_prefill_tokens
        )
        submitted, finished = [], []
        for action in actions:
            if action == "step":
                finished += sampler.step()
            else:
                request = Request(prompts[action], each[action], tag=action)
                sampler.submit(request)
                submitted.append(request)
            assert cache_bytes(sampler) <= limit
            assert len(sampler.active) == len(sampler.cache.lengths) <= max_rows
        while sampler.has_work:
            finished += sampler.step()
            assert cache_bytes(sampler) <= limit
        assert sorted(map(id, finished)) == sorted(map(id, submitted))  # each is returned exactly once
        assert sampler.cache.lengths == []
        assert_same_completions(
            [sampler.completion(request) for request in submitted],
            [alone[request.tag] for request in submitted],
        )

    check()


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


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_an_error_that_names_it(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"{name} is {field[name]}; it must"):
        SamplingParams(**({"max_new_tokens": 1} | field))


def test_released_cache_takes_no_memory_and_comes_back(tiny_model):
    sampler = Sampler(tiny_model)
    params = SamplingParams(5, temperature=0)
    before = sampler.generate([[1, 2, 3]], params)
    sampler.cache.release()
    assert all(tensor.numel() == 0 for tensor in (*sampler.cache.k, *sampler.cache.v))
    assert sampler.generate([[1, 2, 3]], params)[0].ids == before[0].ids
