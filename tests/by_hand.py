"""A recorded run's training computed again, slowly: turn by turn, in plain PyTorch, from its requests and settings alone.

Covers what `tests/test_wiring_values.py` compares: losses ppo and gspo, estimators k2 and k3, aggregations constant and
token_mean, mismatch off and truncate, and all values of on_error and denominator.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch

from memrl.model import PackedContext, Transformer, load_model
from memrl.sampler import Request, SamplingParams
from memrl.utils.seeds import row_seed
from tests.recorded_run import FAILING_WORDS, RecordedRun


@dataclass
class Reading:
    """One trajectory: its turns, the last of which is the answer; without a reward it is left out."""

    turns: list[Request]
    reward: float | None
    penalty: float = 0.0
    advantage: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    turn_advantages: list[float] = field(default_factory=list)


@dataclass
class Term:
    """A turn in the loss: the weight of each of its tokens, and the frozen policies' log-probabilities.

    One that is not trained on counts in the denominators alone.
    """

    turn: Request
    advantage: float
    group: int
    trained: bool
    weight: float = 0.0
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    correction: torch.Tensor | None = None


def sampled(run: RecordedRun, s: dict[str, Any], step: int) -> tuple[dict[int, list[Reading]], list[list[Reading]]]:
    """The step's groups by index, and those that dynamic sampling replaced, found by the seeds that their turns must have."""
    by_seed = {request.params.seed: request for request in run.requests()}
    kept: dict[int, list[Reading]] = {}
    replaced = []
    for round_number in range(s["rl.dynamic_rounds"] + 1):
        for index in range(s["rl.prompts_per_step"]):
            if index in kept and not is_flat(kept[index]):
                continue
            group = round_number * s["rl.prompts_per_step"] + index
            identities = [(s["seed"], step, group, rollout) for rollout in range(s["rl.group_size"])]
            readings = [reading(run, by_seed, identity, s["reward.on_error"]) for identity in identities]
            replaced += [kept[index]] if index in kept else []
            kept[index] = readings
    return kept, replaced


def is_flat(group: list[Reading]) -> bool:
    return len({reading.reward for reading in compared(group)}) < 2 and not any(any(r.turn_advantages) for r in group)


def compared(group: list[Reading]) -> list[Reading]:
    return [reading for reading in group if reading.reward is not None]


def reading(run: RecordedRun, by_seed: dict[int, Request], identity: tuple[int, ...], on_error: str) -> Reading:
    turns = []
    while (request := by_seed.get(row_seed(*identity, len(turns)))) is not None:
        turns.append(request)
    words = len(run.text_of(turns[-1].content_ids).split())
    failed = None if on_error == "skip" else 0.0
    return Reading(turns, failed if words == FAILING_WORDS else float(words % 3))


def set_advantages(groups: list[list[Reading]], s: dict[str, Any]) -> None:
    """Rewards less penalties, against the mean of the others, over the group's standard deviation."""
    memory = (s["agent.memory_tokens"], s["rl.overlong_buffers"]["memory"])
    answer = (s["agent.answer_tokens"], s["rl.overlong_buffers"]["answer"])
    for group in groups:
        for r in group:
            overlong = mean(excess(turn, *memory) for turn in r.turns[:-1]) + excess(r.turns[-1], *answer)
            r.penalty = -s["rl.overlong_penalty"] * overlong
        scores = {id(r): r.reward + r.penalty for r in compared(group)}
        for r in compared(group) if len(scores) > 1 else []:
            others = mean(score for key, score in scores.items() if key != id(r))
            r.advantage = (scores[id(r)] - others) / (stdev(scores.values()) + 1e-6)


def set_turn_advantages(
    run: RecordedRun, kept: dict[int, list[Reading]], step: int, model: Transformer, s: dict[str, Any]
) -> None:
    """Rewards of turns by TURN_REWARD and memory_gain; their discounted returns against the mean of the others at the same turn.

    All readings of a document have the same turns.
    """
    for index, group in kept.items():
        sample = run.trainer.source.sample(step, index)
        for r in group:
            words = [len(run.text_of(turn.content_ids).split()) for turn in r.turns]
            r.turn_rewards = [0.0 if words[-1] == FAILING_WORDS else count / 4 for count in words]
            memories = ["none", *(run.text_of(turn.content_ids) for turn in r.turns[:-1])]
            levels = [answer_logprob(run, model, sample.question, memory, sample.answers[0], s) for memory in memories]
            for t in range(len(levels) - 1):
                r.turn_rewards[t] += levels[t + 1] - levels[t]
        returns = [
            [sum(s["rl.turn_discount"] ** k * reward for k, reward in enumerate(r.turn_rewards[t:])) for t in range(len(r.turns))]
            for r in group
        ]
        for i, r in enumerate(group):
            for t, own in enumerate(returns[i]):
                others = [row[t] for j, row in enumerate(returns) if j != i]
                spread = stdev([own, *others])
                r.turn_advantages.append((own - mean(others)) / (spread + 1e-6) if spread else 0.0)


def answer_logprob(run: RecordedRun, model: Transformer, question: str, memory: str, answer: str, s: dict[str, Any]) -> float:
    vocabulary = run.sampler.tokenizer.hf.get_vocab()
    texts = f"<|im_start|> A Q {question} M {memory} <|im_end|> <|im_start|> \\boxed{{", f"{answer} }}"
    prompt, ids = ([vocabulary.get(word, vocabulary["<|unk|>"]) for word in text.split()] for text in texts)
    turn = Request(prompt, SamplingParams(1), ids=ids)
    with torch.no_grad():
        return logprobs_and_entropies(model, turn, s["rollout.temperature"])[0].mean().item()


def excess(turn: Request, cap: int, buffer: int) -> float:
    return max(0.0, len(turn.ids) - (cap - buffer)) / buffer


def optimizer_steps(kept: dict[int, list[Reading]], s: dict[str, Any]) -> list[list[Term]]:
    """The turns of each optimizer step: whole groups, the largest first, each to the step with fewest tokens.

    Without the groups that have no signal there are fewer steps, so that none has fewer groups than with all of them.
    """
    terms: dict[int, list[Term]] = {index: [] for index in kept}
    for index, group in kept.items():
        for r in compared(group) if not is_flat(group) or s["rl.denominator"] == "all" else []:
            share = 1 / len(r.turns) if s["rl.credit"] == "split" else 1.0
            for turn in r.turns:
                kind = "answer" if turn is r.turns[-1] else "memory"
                if not (kind in s["rl.overlong_filter"] and turn.finish_reason == "length"):
                    advantage = r.advantage * share
                    if r.turn_advantages:
                        alpha, own = s["rl.outcome_weight"], r.turn_advantages[r.turns.index(turn)]
                        advantage = alpha * advantage + (1 - alpha) * own
                    terms[index].append(Term(turn, advantage, index, not is_flat(group)))
    sizes = {index: sum(len(t.turn.prompt_ids) + len(t.turn.ids) - 1 for t in group) for index, group in terms.items()}
    groups_left = sum(size > 0 for size in sizes.values())
    steps: list[list[Term]] = [[] for _ in range(max(1, s["rl.updates_per_step"] * groups_left // len(kept)))]
    loads = [0] * len(steps)
    for index in sorted(sizes, key=lambda index: -sizes[index]):
        smallest = loads.index(min(loads))
        loads[smallest] += sizes[index]
        steps[smallest] += terms[index]
    for step in steps:
        of_constant = s["rl.aggregation"] == "constant"
        divisor = count_readings(kept, step) * s["rl.aggregation_tokens"] if of_constant else sum(len(t.turn.ids) for t in step)
        for term in step:
            term.weight = 1 / divisor
    trained = [[term for term in step if term.trained] for step in steps]
    return [step for step in trained if step]


def count_readings(kept: dict[int, list[Reading]], step: list[Term]) -> int:
    """Trajectories with a turn in the step."""
    turns = {id(term.turn) for term in step}
    return sum(any(id(turn) in turns for turn in r.turns) for group in kept.values() for r in group)


def logprobs_and_entropies(model: Transformer, turn: Request, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = turn.prompt_ids + turn.ids[:-1]
    logits = model(torch.tensor(ids), PackedContext([len(ids)]))[len(turn.prompt_ids) - 1 :]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(turn.ids)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)


def loss_of(term: Term, model: Transformer, s: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """The turn's part of the loss, and sums over its tokens by the metrics' names."""
    now, entropies = logprobs_and_entropies(model, term.turn, s["rollout.temperature"])
    difference = now - term.old
    token_ratio = difference.exp()
    ratio = difference.mean().exp().expand_as(now) if s["rl.loss"] == "gspo" else token_ratio
    gain = ratio * term.advantage
    clipped = ratio.clamp(1 - s["rl.clip_low"], 1 + s["rl.clip_high"]) * term.advantage
    pg = -torch.minimum(gain, clipped)
    if term.advantage < 0 and s["rl.dual_clip"] is not None:
        pg = pg.clamp(max=-s["rl.dual_clip"] * term.advantage)
    d = term.reference - now
    kl = d.square() / 2 if s["rl.kl_estimator"] == "k2" else d.exp() - d - 1
    correction = torch.ones_like(now) if term.correction is None else term.correction
    loss = term.weight * (correction * pg + s["rl.kl_coef"] * kl - s["rl.entropy_coef"] * entropies).sum()
    off = now - torch.tensor(term.turn.logprobs)
    sums = {"loss/pg_loss": correction * pg, "loss/kl": kl, "loss/entropy": entropies, "loss/ratio": ratio}
    sums |= {"loss/approx_kl": token_ratio - 1 - difference, "rollout/logprob_diff_mean": off.abs()}
    sums |= {"rollout/mismatch_kl": off.exp() - off - 1}
    if term.correction is not None:
        sums["loss/correction"] = term.correction
    return loss, {name: values.sum().item() for name, values in sums.items()} | {"largest": off.abs().max().item()}


def learning_rate(done: int, planned: int, s: dict[str, Any]) -> float:
    """Warm-up over the steps done, and never above the line over the planned ones."""
    total = s["rl.steps"] * s["rl.updates_per_step"] * s["rl.epochs"]
    warmup = s["optim.warmup_updates"]
    line = 1 - (1 - s["optim.min_lr_ratio"]) * max(0, planned - warmup) / (total - warmup)
    return s["optim.lr"] * min(line, (done + 1) / warmup)


def train_by_hand(run: RecordedRun, s: dict[str, Any], start: str) -> tuple[Transformer, list[dict[str, float]], list[float]]:
    """The trained model, the metrics of each step, and the rates of all optimizer steps."""
    model, frozen = load_model(start, "float32"), load_model(start, "float32")
    betas, decay = (s["optim.beta1"], s["optim.beta2"]), s["optim.weight_decay"]
    optimizer = torch.optim.AdamW(model.train().parameters(), betas=betas, weight_decay=decay)
    records, rates = [], []
    for step in range(s["rl.steps"]):
        kept, replaced = sampled(run, s, step)
        set_advantages(list(kept.values()), s)
        if s.get("reward.turns") == "memory_gain":
            set_turn_advantages(run, kept, step, model, s)
        steps = optimizer_steps(kept, s)
        for term in (term for terms in steps for term in terms):
            freeze(term, model, frozen, s)
        record = metrics_of_rewards(kept, replaced)
        sums: dict[str, list[float]] = defaultdict(list)
        planned = step * s["rl.updates_per_step"] * s["rl.epochs"]
        for number, terms in enumerate(steps * s["rl.epochs"]):
            rates.append(learning_rate(len(rates), planned + number, s))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            for name, value in optimizer_step(model, optimizer, terms, s).items():
                sums[name].append(value)
        of_first = [name for name in sums if name.startswith("rollout/")]
        record |= {name: values[0] if name in of_first else mean(values) for name, values in sums.items()}
        records.append(record | {"optim/lr": rates[-1], "optim/updates": len(steps) * s["rl.epochs"]})
    return model, records, rates


def freeze(term: Term, model: Transformer, frozen: Transformer, s: dict[str, Any]) -> None:
    with torch.no_grad():
        term.reference = logprobs_and_entropies(frozen, term.turn, s["rollout.temperature"])[0]
        term.old = torch.tensor(term.turn.logprobs)
        if s["rl.mismatch"] == "truncate":
            own = logprobs_and_entropies(model, term.turn, s["rollout.temperature"])[0]
            term.correction, term.old = (own - term.old).exp().clamp(max=s["rl.mismatch_bound"]), own


def optimizer_step(model: Transformer, optimizer, terms: list[Term], s: dict[str, Any]) -> dict[str, float]:
    """One step; the metrics are means over its tokens."""
    optimizer.zero_grad()
    sums: dict[str, float] = defaultdict(float)
    largest = 0.0
    for term in terms:
        loss, of_turn = loss_of(term, model, s)
        loss.backward()
        largest = max(largest, of_turn.pop("largest"))
        for name, value in of_turn.items():
            sums[name] += value
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["optim.grad_clip"])
    optimizer.step()
    tokens = sum(len(term.turn.ids) for term in terms)
    own = {"optim/grad_norm": float(norm), "update/tokens": tokens, "update/turns": len(terms)}
    return {name: value / tokens for name, value in sums.items()} | own | {"rollout/logprob_diff_max": largest}


def metrics_of_rewards(kept: dict[int, list[Reading]], replaced: list[list[Reading]]) -> dict[str, float]:
    groups = [*kept.values(), *replaced]
    rewards = [reward for group in groups for r in group for reward in r.turn_rewards]
    return {
        **({"reward/turn_mean": mean(rewards)} if rewards else {}),
        "reward/mean": mean(r.reward for group in groups for r in compared(group)),
        "reward/penalty": mean(r.penalty for group in kept.values() for r in group),
        "reward/signal": mean(not is_flat(group) for group in groups),
        "reward/replaced_groups": len(replaced),
        "rollout/turns": sum(len(r.turns) for group in groups for r in group),
    }
