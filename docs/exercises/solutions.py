"""STOP: the solutions of the ten exercises. Solve them first; `python docs/exercises/check.py 3` says whether 3 is right."""

import torch


def advantages(rewards, group_ids):  # 1: the mean belongs to the question, not to neighbours
    result = torch.empty_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        result[members] = rewards[members] - rewards[members].mean()
    return result


def response_logprobs(logits, ids, prompt_len):  # 2: the output after token t - 1 predicts token t
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs[prompt_len - 1 : -1].gather(1, ids[prompt_len:, None])[:, 0]


def mean_loss(losses, prompt_lens, lens):  # 3: the model did not write its prompts
    place = torch.arange(losses.shape[1])
    is_trained = (place >= prompt_lens[:, None]) & (place < lens[:, None])
    return (losses * is_trained).sum() / is_trained.sum()


def clipped_loss(ratio, advantages, clip_low, clip_high):  # 4: each bound on its own side
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def kl_penalty(logprobs, ref_logprobs):  # 5: d is the reference minus the policy
    d = ref_logprobs - logprobs
    return d.exp() - d - 1


def step_loss(turn_losses):  # 6: tokens weigh the same, turns do not
    return torch.cat(turn_losses).mean()


def read(question, document, nothing, generate, chunk_tokens, memory_tokens):  # 7: the first tokens are written, then it stops
    prompts, memory = [], nothing
    for start in range(0, len(document), chunk_tokens):
        prompts.append((question, memory, document[start : start + chunk_tokens]))
        memory = generate(prompts[-1])[:memory_tokens]
    return [*prompts, (question, memory, None)]


def training_row(prompt, response, end_id):  # 8: to stop is a decision like any other
    inputs = prompt + response[:-1]
    return inputs, list(range(len(prompt) - 1, len(inputs))), response


def update(logits, words, advantages, passes, learning_rate):  # 9: the policy that sampled stays the same for all passes
    old_logprobs = torch.log_softmax(logits, dim=-1)[words]
    for _ in range(passes):
        logits = logits.detach().clone().requires_grad_()
        rho = (torch.log_softmax(logits, dim=-1)[words] - old_logprobs).exp()
        torch.maximum(-advantages * rho, -advantages * rho.clamp(0.8, 1.28)).mean().backward()
        logits = logits - learning_rate * logits.grad
    return logits.detach()


def decode(q, k, v, prompt_len, speeds):  # 10: the first token after a prompt of n tokens has position n
    def rotate(x, first):
        angles = torch.arange(first, first + len(x))[:, None] * speeds
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    keys, outputs = rotate(k[:prompt_len], 0), []
    for slot in range(prompt_len, len(q)):
        keys = torch.cat((keys, rotate(k[slot : slot + 1], slot)))
        scores = rotate(q[slot : slot + 1], slot) @ keys.T / q.shape[1] ** 0.5
        outputs.append(scores.softmax(dim=-1) @ v[: slot + 1])
    return torch.cat(outputs)
