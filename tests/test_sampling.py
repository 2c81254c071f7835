"""Sampling from logits against naive references and transformers; random numbers; stop strings."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.sampler import top_k_top_p as truncation
from memrl.sampler.sampling import BLOCK, RowParams, SamplingParams, sample_tokens, uniform
from memrl.sampler.stop_strings import StopStrings
from memrl.utils.seeds import row_seed

VOCABULARIES = [1, 7, 1023, 1024, 1025, 2048, 151_936]
FILTERS = [
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"top_k": 4},
    {"top_k": 99},
    {"min_p": 0.2},
    {"top_p": 0.8, "top_k": 3},
    {"top_p": 0.3, "top_k": 6},
    {"top_p": 0.9, "min_p": 0.3},
    {"top_k": 5, "min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


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


def sample(logits, uniforms, *each, **options):
    """sample_tokens with one SamplingParams per row, or the same for all, made from options."""
    params = [SamplingParams(1, **options)] * len(logits) if options or not each else list(each)
    return sample_tokens(logits, RowParams.of(params, logits.device), uniforms)


def draw(logits, num_draws, seed=11, **options):
    """Many tokens of one distribution, each row with a seed of its own."""
    seeds = torch.tensor([row_seed(seed, i) for i in range(num_draws)])
    return sample(logits.expand(num_draws, -1), uniform(seeds, torch.zeros_like(seeds)), **options)


def random_logits(*shape, seed=0, std=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def random_uniforms(num, seed=0):
    return torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kept_naively(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The ids that are kept and their probabilities, by the definitions, in Python's floats."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        mass, nucleus = sum(weights[i] for i in kept), []
        while not nucleus or sum(weights[i] for i in nucleus) < top_p * mass:
            nucleus.append(kept[len(nucleus)])
        kept = nucleus
    kept = [i for i in kept if weights[i] >= min_p]
    mass = sum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in kept}


def kept_by_sampling(logits, **options):
    """The ids that a fine grid of numbers reaches, and the log-probability that each reports."""
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    ids, logprobs, _ = sample(logits.expand(len(grid), -1), grid, **options)
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))


@pytest.fixture(params=["reads are free", "no reads", "a head that is too short"])
def every_path(request, monkeypatch):
    """Runs a test once for each way to find the tokens that are kept; on a CPU the first is what happens."""
    if request.param == "no reads":
        monkeypatch.setattr(truncation, "_reads_are_free", lambda values: False)
    elif request.param == "a head that is too short":
        monkeypatch.setattr(truncation, "HEAD", 2)


# Distributions


@pytest.mark.parametrize("temperature", [1.0, 1.6, 0.5])
def test_samples_follow_the_softmax_at_a_temperature(temperature):
    logits = random_logits(12, std=1.5 * temperature)
    ids, logprobs, full = draw(logits, 20_000, temperature=temperature)
    assert_drawn_from(ids, (logits / temperature).softmax(-1))
    torch.testing.assert_close(logprobs, (logits / temperature).log_softmax(-1)[ids], atol=1e-6, rtol=0)
    assert torch.equal(logprobs, full)


def test_samples_follow_the_softmax_over_several_blocks():
    # Three blocks; a token's block and its place within the block are found separately, so counts of both must be right.
    logits = torch.full((3 * BLOCK - 5,), -torch.inf)
    places = torch.tensor([0, 5, BLOCK - 1, BLOCK, BLOCK + 7, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 6])
    logits[places] = random_logits(len(places), seed=1)
    ids, _, _ = draw(logits, 4000)
    assert_drawn_from(ids, logits.softmax(-1))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_truncated_samples_follow_the_renormalised_distribution(filters, every_path):
    logits = random_logits(12, seed=2, std=1.2)
    kept = kept_naively(logits.tolist(), **filters)
    assert len(kept) < 12 or filters == {"top_k": 99}
    expected = torch.tensor([kept.get(i, 0.0) for i in range(12)])
    ids, logprobs, full = draw(logits, 12_000, **filters)
    assert_drawn_from(ids, expected)
    torch.testing.assert_close(logprobs, expected.log()[ids], atol=1e-6, rtol=0)
    torch.testing.assert_close(full, logits.log_softmax(-1)[ids], atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=14),  # in quarters, so that ties are frequent
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.1, 0.37, 0.77, 0.93, 1.0]),
    st.integers(0, 16),
    st.sampled_from([0.0, 0.07, 0.31, 0.97]),
)
def test_what_is_kept_and_its_probabilities_are_those_of_the_definitions(quarters, temperature, top_p, top_k, min_p):
    logits = [q / 4 for q in quarters]
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    expected = kept_naively(logits, **options)
    got = kept_by_sampling(torch.tensor(logits), **options)
    likely = {i for i, p in expected.items() if p > 1e-3}  # the others may fall between the grid's numbers
    assert likely <= set(got) <= set(expected)
    for token, logprob in got.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=2e-6)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kept_sets_are_those_of_transformers(filters, temperature, every_path):
    from transformers import generation

    warpers = [generation.TemperatureLogitsWarper(temperature)]
    warpers += [generation.TopKLogitsWarper(filters["top_k"])] if "top_k" in filters else []
    warpers += [generation.TopPLogitsWarper(filters["top_p"])] if "top_p" in filters else []
    warpers += [generation.MinPLogitsWarper(filters["min_p"])] if "min_p" in filters else []
    logits = random_logits(8, 1500, seed=3, std=4.0)
    theirs = logits
    for warper in warpers:
        theirs = warper(None, theirs)
    expected = theirs.log_softmax(-1)
    num_draws = 500
    ids, logprobs, _ = sample(
        logits.repeat_interleave(num_draws, 0), random_uniforms(8 * num_draws), temperature=temperature, **filters
    )
    # A reported log-probability is right only if the whole kept set's mass is.
    reference = expected.repeat_interleave(num_draws, 0).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, reference, atol=2e-6, rtol=0)


def test_the_filters_apply_one_after_the_other():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the three most likely (0.444, 0.333, 0.222) the first two reach 0.75; of all four they do not.
    assert set(kept_by_sampling(logits, top_k=3, top_p=0.75)) == {0, 1}
    assert set(kept_by_sampling(logits, top_p=0.75)) == {0, 1, 2}
    # The nucleus comes before min_p: were 0.1 dropped first, {0, 1} would reach 0.75 of what is left.
    assert set(kept_by_sampling(logits, top_p=0.75, min_p=0.4)) == {0, 1, 2}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 3, "top_p": 0.99}, {"top_p": 0.3}], ids=str)
@pytest.mark.parametrize("vocab_size", [8, 151_936])
def test_of_equal_tokens_the_lowest_ids_are_kept(filters, vocab_size, every_path):
    logits = torch.full((vocab_size,), -30.0)
    logits[[1, 3, 4, 5, 7, *((70, 90_000, 151_935) if vocab_size > 8 else ())]] = 2.0
    kept = 3 if "top_k" in filters else math.ceil(0.3 * int((logits == 2).sum()))
    numbers = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    assert sorted(set(sample(logits.expand(16, -1), numbers, **filters).ids.tolist())) == [1, 3, 4][:kept]


@pytest.mark.parametrize("num", [1, 2, 50, 700, 1024, 5000, 40_000, 151_936])
def test_the_most_likely_tokens_are_those_of_a_full_stable_sort(num):
    coarse = (random_logits(3, 151_936, seed=num) * 8).round() / 8  # many ties, as logits computed in bf16 have
    scaled = torch.full((3, 152_576), -torch.inf)
    scaled[:, :151_936] = coarse - coarse.amax(-1, keepdim=True)
    scaled[2, 100:151_936] = -torch.inf
    keys = truncation.most_likely(scaled, num)
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(truncation.ids_of(keys), ids[:, :num])
    assert torch.equal(truncation.scaled_of(keys), values[:, :num])


# Inverting the distribution


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_token_is_where_the_plain_cumulative_distribution_says(vocab_size):
    logits = random_logits(5, vocab_size, seed=vocab_size, std=2.0)
    uniforms = torch.cat([torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), random_uniforms(3)])
    cdf = (logits - logits.amax(-1, keepdim=True)).exp().double().cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    ids, logprobs, full = sample(logits, uniforms)
    assert torch.equal(ids, torch.searchsorted(cdf, target, right=True).squeeze(1))
    reference = logits.double().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), reference, atol=2e-6, rtol=0)
    assert torch.equal(logprobs, full)


@pytest.mark.parametrize("vocab_size", [300, 2500])
@pytest.mark.parametrize("temperature", [1.0, 0.05, 4.0, 1e-44, 1e38, 1e300, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 1e-3}, {"top_k": 299}], ids=str)
def test_a_token_of_probability_zero_is_never_picked(vocab_size, temperature, filters):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, vocab_size, generator=generator) * 10  # at temperature 0.05 most of them underflow to 0
    rows[torch.rand(rows.shape, generator=generator) < 0.5] = -torch.inf
    rows[:, 0] = rows[:, -1] = -torch.inf  # the two ends are what a search that is off by one runs into
    rows[1, : vocab_size // 2] = -torch.inf  # blocks without any possible token
    rows[0] = -torch.inf
    rows[0, 150] = -3.0  # one possible token
    for number in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        uniforms = torch.full((16,), number, dtype=torch.float64)
        ids, logprobs, full = sample(rows, uniforms, temperature=temperature, **filters)
        assert torch.isfinite(rows.gather(1, ids[:, None])).all()
        p = ((rows - rows.amax(-1, keepdim=True)).double() / temperature).softmax(-1).gather(1, ids[:, None])
        assert (p > 0).all()
        assert torch.isfinite(logprobs).all()
        assert torch.isfinite(full).all()
        assert (ids[0], logprobs[0], full[0]) == (150, 0, 0)


@pytest.mark.parametrize(("temperature", "expected"), [(1e-300, [1, 1]), (1e-30, [1, 1]), (1e38, [0, 3]), (1e300, [0, 3])])
def test_extreme_temperatures_are_greedy_or_uniform(temperature, expected):
    logits = torch.tensor([-3e38, 3e38, -torch.inf, 1.0]).expand(2, -1)
    ids, logprobs, _ = sample(logits / 1e10, torch.tensor([0.2, 0.9], dtype=torch.float64), temperature=temperature)
    assert ids.tolist() == expected
    torch.testing.assert_close(logprobs, torch.full((2,), 0.0 if temperature < 1 else -math.log(3)))


def test_the_ends_of_a_large_vocabulary_are_reachable_and_in_range():
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for filters in ({}, {"top_p": 0.999999999999}, {"min_p": 1.0}):
        assert sample(torch.zeros(2, 151_936), ends, **filters).ids.tolist() == [0, 151_935]


@pytest.mark.parametrize("filters", [{}, {"min_p": 1e-30}, {"top_k": 151_936}], ids=str)
def test_every_token_of_a_long_flat_tail_can_be_picked(filters):
    # A tail token has a probability of 7e-10, but fp32 sums near 1 are 6e-8 apart: most would never come up.
    logits = torch.zeros(151_936)
    logits[0] = math.log(1e4 * 151_935)
    cdf = (logits - logits[0]).exp().double().cumsum(-1)
    tokens = torch.arange(1, 151_936, 7777)
    between = (cdf[tokens - 1] + cdf[tokens]) / 2 / cdf[-1]
    assert torch.equal(sample(logits.expand(len(tokens), -1), between, **filters).ids, tokens)


def test_rows_that_are_not_numbers_give_an_id_in_range_and_no_log_probability():
    logits = torch.zeros(3, 1500)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    for filters in ({}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0}):
        ids, logprobs, _ = sample(logits, random_uniforms(3), **filters)
        assert ((ids >= 0) & (ids < 1500)).all()
        assert logprobs.isnan().tolist() == [True, True, False]


# Rows among rows

MIXED = [
    {},
    {"temperature": 0.0},
    {"top_k": 20},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 2000, "temperature": 1.3},
    {"min_p": 0.01, "temperature": 2.0},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("vocab_size", [1000, 1025, 50_000])
def test_a_rows_result_is_bitwise_the_same_alone_and_in_any_batch(vocab_size, every_path):
    logits, uniforms = random_logits(len(MIXED), vocab_size, std=3.0), random_uniforms(len(MIXED))
    each = [SamplingParams(1, **options) for options in MIXED]
    together = sample(logits, uniforms, *each)
    alone = [sample(logits[i : i + 1], uniforms[i : i + 1], each[i]) for i in range(len(each))]
    for values, single in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(values, torch.cat(single))
    plain = [i for i, params in enumerate(each) if not params.truncated]
    assert together.ids[plain].tolist() == sample(logits[plain], uniforms[plain], *(each[i] for i in plain)).ids.tolist()
    assert torch.equal(together.logprobs[plain], together.full_logprobs[plain])


@pytest.mark.parametrize("vocab_size", [1000, 50_000])
def test_all_ways_to_find_the_kept_tokens_agree(vocab_size, monkeypatch):
    logits = random_logits(36, vocab_size, std=3.0)
    logits[18:] = (logits[18:] * 4).round() / 4  # ties
    uniforms = random_uniforms(36)
    each = [SamplingParams(1, **options) for options in MIXED * 4]
    usual = sample(logits, uniforms, *each)
    monkeypatch.setattr(truncation, "HEAD", 1)
    again = sample(logits, uniforms, *each)
    monkeypatch.setattr(truncation, "_reads_are_free", lambda values: False)
    monkeypatch.setattr(truncation, "_SORT_ELEMENTS", 5 * vocab_size)
    for values, second, third in zip(usual, again, sample(logits, uniforms, *each), strict=True):
        assert torch.equal(values, second)
        assert torch.equal(values, third)


@pytest.mark.parametrize("each", [[{}], [{"top_k": 5}], MIXED], ids=["plain", "top_k", "mixed"])
def test_no_value_is_read_on_other_devices(each):
    # Tensors of the meta device have no values, so whatever would wait for one is an error.
    rows = RowParams.of([SamplingParams(1, **options) for options in each], "meta")
    sampled = sample_tokens(torch.empty(len(each), 50_000, device="meta"), rows, uniform(rows.seed, torch.ones_like(rows.seed)))
    assert [values.dtype for values in sampled] == [torch.int64, torch.float32, torch.float32]
    assert all(values.shape == (len(each),) for values in sampled)


def test_a_greedy_row_takes_the_first_of_the_most_likely_tokens_and_reports_temperature_one():
    logits = torch.tensor([[0.0, 1.0, 0.5, 1.0]] * 3)
    each = [SamplingParams(1, temperature=0), SamplingParams(1), SamplingParams(1, temperature=0, top_k=1)]
    ids, logprobs, full = sample(logits, torch.tensor([0.9, 0.0, 0.9]).double(), *each)
    assert ids.tolist() == [1, 0, 1]
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[ids])
    assert torch.equal(logprobs, full)


def test_logits_are_left_as_they_are():
    logits = random_logits(len(MIXED), 2000)
    before = logits.clone()
    sample(logits, random_uniforms(len(MIXED)), *(SamplingParams(1, **options) for options in MIXED))
    assert torch.equal(logits, before)


# Parameters


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
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": math.nan},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_an_error_that_names_it(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"{name} is {field[name]}; it must"):
        SamplingParams(**({"max_new_tokens": 1} | field))


@pytest.mark.parametrize(("stop", "message"), [("END", r"list of strings: \['END'\]"), (["a", ""], "''"), ([7], "holds 7")])
def test_stop_must_be_a_list_of_strings(stop, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(1, stop=stop)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1}], ids=str)
def test_params_know_whether_they_truncate(options):
    assert SamplingParams(1, temperature=0.5, **options).truncated == bool(options)


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
    pairs = [(s, i) for s in (0, 1, 1234567, 2**62 + 12345, 2**63 - 1, -1, -(2**63)) for i in (0, 1, 2, 1000, 10**9)]
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


# Stop strings


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is a token without text, and what follows are longer pieces."""

    def __init__(self, pieces=()):
        self.pieces = [*(bytes([i]) for i in range(256)), b"", *(piece.encode() for piece in pieces)]

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


PIECES = ["ab", "a b", "</", "</answer>", "answer>", "é", "é</", "中文", "中", "🙂", "🙂a", "\n\nQ", "\n", " " * 9, "bab"]
STOPS = ["</answer>", "\n\n", "ab", "🙂🙂", "文中", "é", "aab", " b", "a" * 30]


def first_naive_stop(tokenizer, ids, stops):
    """After how many tokens the decoded text contains a stop string; None if it never does."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if any(stop in text for stop in stops):
            return end
    return None


def first_push(tokenizer, ids, stops):
    matcher = StopStrings(tokenizer, stops)
    results = [matcher.push(token) for token in ids]
    first = results.index(True) if True in results else None
    assert first is None or all(results[first:])
    return None if first is None else first + 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stop_string_is_found_when_the_whole_text_contains_it(data):
    tokenizer = ByteTokenizer(PIECES)
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
    ingredients = [tokenizer.pieces.index(piece.encode()) for piece in PIECES]
    ingredients += [*b"ab \n", *"中🙂é</answer>".encode(), 256, 0xE4, 0x80]
    ids = data.draw(st.lists(st.sampled_from(ingredients), max_size=120))
    for stop in data.draw(st.lists(st.sampled_from(stops), max_size=1)):
        ids += stop.encode()
    assert first_push(tokenizer, ids, stops) == first_naive_stop(tokenizer, ids, stops)


def test_stop_strings_agree_with_whole_decoding_for_the_real_tokenizer(shared_data):
    from memrl.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shared_data / "tokenizer" / "qwen2.5-instruct")
    rng = random.Random(0)
    stops = ["</answer>", "\n\n", "東京 🙂", "👩‍👧", "END", "x=1;\n\nQuestion", "1,234 <", " naïve  ", "no such text"]
    special = sorted(tokenizer.special_ids)
    text = "The memory: Zürich, 東京 🙂👩‍👩‍👧 x=1;\n\nQuestion: 1,234 </answer> naïve  END of it. "
    found = 0
    for _ in range(35):
        words = [text[i : i + rng.randint(1, 12)] for i in (rng.randrange(len(text)) for _ in range(40))]
        # Pieces are encoded apart, so characters and stop strings are split in ways that the tokenizer itself never would.
        ids = [token for word in words for token in tokenizer.encode(word)]
        for place in sorted(rng.sample(range(len(ids)), 12), reverse=True):
            ids[place:place] = rng.choice([special[:1] * 12, [rng.randrange(tokenizer.vocab_size)], list("🙂".encode())])
        stop = rng.choice(stops)
        expected = first_naive_stop(tokenizer, ids, [stop])
        assert first_push(tokenizer, ids, [stop]) == expected
        found += expected is not None
    assert 7 < found < 35


@pytest.mark.parametrize("filler", [list(b"word "), [256], [0x80], [*"中".encode()], [0xF0, 0x9F, 0x99]], ids=str)
def test_the_cost_of_a_token_does_not_grow_with_the_response(filler):
    tokenizer = ByteTokenizer()
    decoded = []
    counting = SimpleNamespace(decode=lambda ids: decoded.append(len(ids)) or tokenizer.decode(ids))
    matcher = StopStrings(counting, ["</answer>", "\n\n"])
    for i in range(3000):
        assert not matcher.push(filler[i % len(filler)])
    assert max(decoded) < 400
    assert sum(decoded) < 3000 * 500
    for token in b"</answer":
        assert not matcher.push(token)
    assert matcher.push(ord(">"))


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two END", ["END"], "one "),
        ("one END two", ["two", "END"], "one "),
        ("xabcdy", ["abcd", "bc"], "x"),
        ("END", ["END"], ""),
        ("no stop here", ["END"], "no stop here"),
        ("no stops", [], "no stops"),
        ("à point 🙂 next", ["🙂"], "à point "),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stops, expected):
    ids = list(text.encode())
    assert StopStrings(ByteTokenizer(), stops).text(ids) == expected


def test_without_stop_strings_nothing_is_decoded():
    matcher = StopStrings(None, [])
    assert not any(matcher.push(token) for token in range(9))


def test_text_in_the_same_token_after_the_stop_string_is_cut():
    tokenizer = ByteTokenizer(["the end. But"])
    matcher = StopStrings(tokenizer, ["end."])
    assert matcher.push(257)
    assert matcher.text([257]) == "the "


def test_any_number_of_tokens_without_text_may_stand_inside_a_stop_string():
    matcher = StopStrings(ByteTokenizer(), ["END"])
    assert [matcher.push(token) for token in (*b"xE", *[256] * 1000, *b"ND")] == [False] * 1003 + [True]
