"""TRL's GRPOTrainer and RLOOTrainer on the same numbers: equal where the definitions coincide, and shown to differ where not.

The trainers are real ones around a tiny model, and so is every line of theirs that runs. Most comparisons hand `_compute_loss`
log-probabilities in fp64 instead of a model's, of one ragged batch of single-turn trajectories: padded rows there, packed here.
"""

import pytest
import torch

from memrl.rl.advantage import group_advantages
from memrl.rl.aggregation import token_weights
from memrl.rl.mismatch import correction
from tests.test_loss import loss_of
from tests.tiny_folder import make_tokenizer

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL calls its rollout_func experimental

LENS = [3, 7, 1, 5, 2, 6]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
WIDTH = 7  # of TRL's rows, and its max_completion_length
REWARDS = [1.0, 0.0, 0.25, 0.5, 0.5, 0.0]
BOUND = 1.4
# TRL's loss type -> the aggregation that is the same on single-turn trajectories, in one batch and one process
SAME = {"grpo": "seq_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}


def rollouts(prompts, trainer):
    """Completions of the lengths above, with what a sampler that is not quite the trainer would say of their probabilities."""
    generator = torch.Generator().manual_seed(1)
    completions = [torch.randint(4, 29, (n,), generator=generator).tolist() for n in LENS]
    logprobs = [(-3.4 + 0.8 * torch.randn(n, generator=generator)).tolist() for n in LENS]
    return {"prompt_ids": [[5, 6]] * len(LENS), "completion_ids": completions, "logprobs": logprobs}


def make_trainer(folder, kind, **options):
    import trl
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer().hf
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(tokenizer), **shape, num_attention_heads=2, num_key_value_heads=1)
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        num_generations=3,
        steps_per_generation=1,
        max_completion_length=WIDTH,
        beta=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=Qwen2ForCausalLM(config),
        args=args,
        reward_funcs=lambda completions, **_: REWARDS,
        train_dataset=Dataset.from_dict({"prompt": ["red blue"] * 2}),
        processing_class=tokenizer,
        **options,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer._last_loaded_step = 0  # "vLLM has these weights": there is none, the rollouts are given
    return trainer


@pytest.fixture(scope="module")
def shared_trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("trl"), "GRPO", rollout_func=rollouts)


@pytest.fixture
def configure(shared_trainer, monkeypatch):
    """Sets TRL's options for one test, on the trainer and its arguments, and gives the trainer."""

    def apply(**options):
        options = {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.3, "delta": None} | options
        for name, value in options.items():
            owners = [owner for owner in (shared_trainer, shared_trainer.args) if hasattr(owner, name)]
            assert owners, f"TRL has no option {name}"
            for owner in owners:
                monkeypatch.setattr(owner, name, value)
        return shared_trainer

    return apply


def trl_loss(trainer, monkeypatch, logprobs, entropies, mask, **inputs):
    """`_compute_loss` on given log-probabilities, [rows, width]."""
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (logprobs, entropies, None))
    prompt = torch.ones(len(mask), 1, dtype=torch.int64)
    rows = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(), "completion_mask": mask.long()}
    return trainer._compute_loss(trainer.model, rows | {"num_items_in_batch": mask.sum()} | inputs)


class Batch:
    """Single-turn trajectories: [row, width] with garbage in the padding for TRL, [T] for memrl."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        rows = len(LENS)
        self.mask = torch.arange(WIDTH) < torch.tensor(LENS)[:, None]
        self.old = -2 + draw(rows, WIDTH)
        self.logprobs = (self.old + 0.4 * draw(rows, WIDTH) + 0.8 * draw(rows, 1)).requires_grad_()
        self.ref = self.old + 0.5 * draw(rows, WIDTH)
        self.entropies = draw(rows, WIDTH).abs()
        self.advantages = draw(rows)
        self.turn_index = torch.arange(rows).repeat_interleave(torch.tensor(LENS))

    def trl(self, trainer, monkeypatch, **inputs):
        """TRL's loss and its gradient, [T]."""
        inputs |= {"advantages": self.advantages, "old_per_token_logps": self.old, "ref_per_token_logps": self.ref}
        return self.with_gradient(trl_loss(trainer, monkeypatch, self.logprobs, self.entropies, self.mask, **inputs))

    def ours(self, aggregation="token_mean", constant=WIDTH, with_ref=False, **options):
        lens, ids = torch.tensor(LENS), torch.arange(len(LENS))
        weights, count = token_weights(aggregation, lens, ids, GROUPS, constant)
        loss, _ = loss_of(
            self.logprobs[self.mask],
            self.old[self.mask],
            self.advantages[self.turn_index],
            self.ref[self.mask] if with_ref else None,
            weights=(weights / count)[self.turn_index],
            turn_index=self.turn_index,
            entropies=self.entropies[self.mask],
            **{"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None} | options,
        )
        return self.with_gradient(loss)

    def with_gradient(self, loss):
        (gradient,) = torch.autograd.grad(loss, [self.logprobs], retain_graph=True)
        assert (gradient[~self.mask] == 0).all()
        return loss.detach(), gradient[self.mask]


def assert_equal(theirs, ours):
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, atol=1e-9, rtol=1e-9)
    assert theirs[1].abs().max() > 1e-3


def assert_differ(theirs, ours):
    assert (theirs[1] - ours[1]).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", SAME)
def test_ppo_equals_trls_losses_under_the_same_aggregation(configure, monkeypatch, loss_type, seed):
    batch = Batch(seed)
    theirs = batch.trl(configure(loss_type=loss_type), monkeypatch)
    assert_equal(theirs, batch.ours(SAME[loss_type]))
    for other in {"token_mean", "seq_mean", "constant", "prompt_mean"} - {SAME[loss_type]}:
        assert_differ(theirs, batch.ours(other))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_gspo_equals_trls_sequence_level_ratio(configure, monkeypatch, loss_type, seed):
    batch = Batch(seed)
    theirs = batch.trl(configure(loss_type=loss_type, importance_sampling_level="sequence"), monkeypatch)
    assert_equal(theirs, batch.ours(SAME[loss_type], kind="gspo"))
    assert_differ(theirs, batch.ours(SAME[loss_type], kind="ppo"))


@pytest.mark.parametrize("seed", range(3))
def test_cispo_equals_trls_whose_epsilon_high_is_the_bound_itself(configure, monkeypatch, seed):
    batch = Batch(seed)
    theirs = batch.trl(configure(loss_type="cispo", epsilon_high=1.3), monkeypatch)
    assert_equal(theirs, batch.ours(kind="cispo", clip_high=0.3))
    assert_differ(theirs, batch.ours(kind="cispo", clip_high=1.3))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dual_clip_equals_trls_delta_above_the_upper_bound(configure, monkeypatch, seed, level):
    # For A < 0 both are |A| min(rho, delta) there; for A > 0 neither does anything.
    batch = Batch(seed)
    batch.advantages = torch.where(torch.arange(len(LENS)) == 4, 1, -1) * batch.advantages.abs()
    kind = {"token": "ppo", "sequence": "gspo"}[level]
    theirs = batch.trl(configure(delta=1.35, importance_sampling_level=level), monkeypatch)
    assert_equal(theirs, batch.ours(kind=kind, dual_clip=1.35))
    assert_differ(theirs, batch.ours(kind=kind, dual_clip=None))


def test_dual_clip_differs_from_trls_delta_below_the_upper_bound(configure, monkeypatch):
    # TRL takes the maximum with the ordinary clip after it has cut at delta, so a ratio up to 1 + epsilon_high still passes; the
    # dual clip (arXiv 1912.09729) is the last word.
    batch = Batch(1)
    batch.advantages = -batch.advantages.abs()
    assert_differ(batch.trl(configure(delta=1.1), monkeypatch), batch.ours(dual_clip=1.1))


@pytest.mark.parametrize("loss_type", SAME)
def test_k3_equals_trls_beta_without_its_bias_correction(configure, monkeypatch, loss_type):
    batch = Batch()
    trainer = configure(loss_type=loss_type, beta=0.3, use_bias_correction_kl=False)
    theirs = batch.trl(trainer, monkeypatch)
    assert_equal(theirs, batch.ours(SAME[loss_type], with_ref=True, kl_coef=0.3))
    for estimator in ("k1", "k2"):
        assert_differ(theirs, batch.ours(SAME[loss_type], with_ref=True, kl_coef=0.3, kl_estimator=estimator))


def test_trls_bias_corrected_kl_differs_token_by_token(configure, monkeypatch):
    # TRL's default multiplies k3 by the ratio and differentiates both (DeepSeek-V3.2, arXiv 2512.02556).
    batch = Batch()
    theirs = batch.trl(configure(beta=0.3, use_bias_correction_kl=True), monkeypatch)
    for estimator in ("k1", "k2", "k3"):
        assert_differ(theirs, batch.ours(with_ref=True, kl_coef=0.3, kl_estimator=estimator))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_on_policy_trls_bias_corrected_kl_has_the_expected_gradient_of_k1_and_k2(configure, monkeypatch, estimator):
    # Both are in expectation the gradient of KL(policy || reference): each outcome once, weighed by its probability.
    trainer = configure(beta=0.3, use_bias_correction_kl=True)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0)
    zero = torch.zeros(1, dtype=torch.float64)
    theirs = ours = 0.0
    for outcome in range(6):
        policy = logits.log_softmax(0)[outcome : outcome + 1]
        old, frozen_ref = policy.detach(), ref[outcome : outcome + 1]
        inputs = {"advantages": zero, "old_per_token_logps": old[None], "ref_per_token_logps": frozen_ref[None]}
        loss = trl_loss(trainer, monkeypatch, policy[None], zero[None], torch.ones(1, 1, dtype=torch.bool), **inputs)
        theirs = theirs + old.exp() * loss
        options = {"num_tokens": 1, "kl_coef": 0.3, "kl_estimator": estimator}
        ours = ours + old.exp() * loss_of(policy, old, zero, frozen_ref, **options)[0]
    gradients = [torch.autograd.grad(loss, [logits], retain_graph=True)[0] for loss in (theirs, ours)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
    assert gradients[0].abs().max() > 1e-2


def test_the_entropy_bonus_equals_trls_under_the_token_mean_and_follows_the_aggregation_elsewhere(configure, monkeypatch):
    # TRL's bonus is the mean over tokens whatever the loss; ours is weighed like the rest of a token's loss.
    batch = Batch()
    batch.entropies = batch.logprobs.exp()  # anything that the gradient can reach
    options = {"entropy_coef": 0.4, "_entropy_bonus_enabled": True, "use_adaptive_entropy": False}
    theirs = batch.trl(configure(loss_type="dapo", **options), monkeypatch)
    assert_equal(theirs, batch.ours(entropy_coef=0.4))
    theirs = batch.trl(configure(loss_type="grpo", **options), monkeypatch)
    assert_differ(theirs, batch.ours("seq_mean", entropy_coef=0.4))


def prepared(trainer):
    """What TRL makes of the rollouts: advantages, log-probabilities and importance ratios by its own code and model."""
    return trainer._generate_and_score_completions([{"prompt": "red blue"}] * len(LENS))


@pytest.fixture
def corrected(configure):
    """TRL's prepared batch under one of its modes against the mismatch of sampler and trainer."""

    def prepare(mode, low, high):
        options = {"mode": mode, "clip_min": low, "clip_max": high}
        options = {f"vllm_importance_sampling_{name}": value for name, value in options.items()}
        output = prepared(configure(use_vllm=True, vllm_importance_sampling_correction=True, **options))
        mask = output["completion_mask"].bool()
        columns = [output[name][mask] for name in ("old_per_token_logps", "sampling_per_token_logps")]
        return output, mask, columns, torch.arange(len(LENS)).repeat_interleave(torch.tensor(LENS))

    return prepare


def test_truncate_equals_trls_token_truncate(corrected):
    output, mask, columns, turn_index = corrected("token_truncate", None, BOUND)
    ours = correction(*columns, turn_index, "truncate", BOUND)
    torch.testing.assert_close(ours, output["importance_sampling_ratio"][mask], atol=1e-6, rtol=1e-6)
    assert ours.max() == torch.tensor(BOUND)
    assert ours.min() < 0.9


def test_mask_differs_from_trls_sequence_mask_in_mean_and_in_weight(corrected):
    # TRL's sequence ratio is the product over the row, which leaves any bound as rows grow, and rows that are kept keep it as a
    # weight; `mask` asks for the geometric mean, and weighs what is kept by 1. Rows of one token are kept by the same rule.
    output, _, columns, turn_index = corrected("sequence_mask", 1 / BOUND, BOUND)
    theirs = output["importance_sampling_ratio"].squeeze(1)
    ours = torch.stack([row[0] for row in correction(*columns, turn_index, "mask", BOUND).split(LENS)])
    ratios = [(trainer - sampler).exp() for trainer, sampler in zip(*(x.split(LENS) for x in columns), strict=True)]
    expected = torch.stack([ratio.prod() for ratio in ratios])
    inside = (expected <= BOUND) & (expected >= 1 / BOUND)
    torch.testing.assert_close(theirs, torch.where(inside, expected, 0.0), atol=1e-6, rtol=1e-5)
    assert ((theirs > 0) == (ours > 0))[LENS.index(1)]
    assert ((theirs > 0) != (ours > 0)).any()
    assert set(ours.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_correction_enters_the_loss_as_in_trl(configure, monkeypatch, loss_type):
    batch = Batch()
    weights = torch.rand(len(LENS), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    options = {"use_vllm": True, "vllm_importance_sampling_correction": True, "beta": 0.3, "use_bias_correction_kl": False}
    trainer = configure(loss_type=loss_type, **options)
    theirs = batch.trl(trainer, monkeypatch, importance_sampling_ratio=weights)
    assert_equal(theirs, batch.ours(SAME[loss_type], with_ref=True, kl_coef=0.3, correction=weights[batch.mask]))


def test_group_advantages_equal_trls_without_and_with_the_standard_deviation(configure):
    rewards = torch.tensor(REWARDS)
    theirs = prepared(configure(scale_rewards="none"))["advantages"]
    torch.testing.assert_close(group_advantages(rewards, GROUPS), theirs, atol=1e-6, rtol=0)
    # TRL adds 1e-4 to the standard deviation, memrl, as the original, 1e-6: the only difference.
    theirs = prepared(configure(scale_rewards="group"))["advantages"]
    std = torch.stack([rewards[GROUPS == g].std() for g in GROUPS])
    ours = group_advantages(rewards, GROUPS, normalize_std=True)
    torch.testing.assert_close(ours * (std + 1e-6) / (std + 1e-4), theirs, atol=1e-6, rtol=0)
    assert (ours - theirs).abs().max() > 1e-5


def test_leave_one_out_advantages_equal_trls_rloo(tmp_path):
    theirs = prepared(make_trainer(tmp_path, "RLOO"))["advantages"]
    ours = group_advantages(torch.tensor(REWARDS), GROUPS, baseline="leave_one_out")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_gradient_of_a_models_weights_equals_trls_from_rollout_to_backward(configure):
    """Nothing is handed to TRL but the rollouts: it scores, corrects, runs the padded model and differentiates."""
    options = {"use_vllm": True, "vllm_importance_sampling_correction": True, "scale_rewards": "none"}
    options |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": None}
    trainer = configure(**options, vllm_importance_sampling_clip_max=BOUND)
    model = trainer.model
    batch = prepared(trainer)
    model.zero_grad()
    theirs = trainer._compute_loss(model, batch)
    theirs.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    sampled = rollouts(None, None)
    model.zero_grad()
    logprobs = []
    for prompt, completion in zip(sampled["prompt_ids"], sampled["completion_ids"], strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1))
    logprobs = torch.cat(logprobs)
    old, sampler = logprobs.detach(), torch.cat([torch.tensor(row) for row in sampled["logprobs"]])
    turn_index = torch.arange(len(LENS)).repeat_interleave(torch.tensor(LENS))
    ours, _ = loss_of(
        logprobs,
        old,
        group_advantages(torch.tensor(REWARDS), GROUPS)[turn_index],
        num_tokens=sum(LENS),
        correction=correction(old, sampler, turn_index, "truncate", BOUND),
    )
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-6, rtol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    model.zero_grad()
