"""Teach a small language model to remember: a memory agent and its reinforcement learning in one file.

    python docs/one_file.py          # needs torch alone; --help shows the options

A document is read chunk by chunk. After each chunk the model rewrites a memory of at most six words, and at the end it answers a
question from that memory alone (MemAgent, arXiv 2507.02259). Only the answer is right or wrong; from that the model has to learn
which words to keep. Seed 0 took 6.7 minutes of CPU time on one core of a busy machine; the share of right answers rose from
0.289 to 1.000 for documents of 16 chunks, and from 0.102 to 0.992 for documents of 64, more than any in training.

Read the seven parts from top to bottom: the language, the model, the sampler, the agent, the objective, the warm start, the
training loop. The package `memrl` runs the same algorithm on models of any size; this file does not import it, and
`tests/test_one_file.py` checks that both compute the same documents, log-probabilities, advantages and gradients.
Shapes of tensors: B rows, T tokens, N response tokens, C hidden size, H heads, D head size, V vocabulary.
"""

import argparse
import copy
import math
import random
import re
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

CHUNK_TOKENS, MEMORY_TOKENS, ANSWER_TOKENS = 25, 6, 8  # a chunk is five sentences of five words
QUESTIONS, GROUP_SIZE, EPOCHS = 16, 8, 2  # questions per step, readings of each question, passes over them
MIN_CHUNKS, MAX_CHUNKS = 8, 24  # of a training document; one number for all documents of a step
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, KL_COEF = 0.2, 0.28, 3.0, 0.001
LEARNING_RATE, BETAS, MAX_GRAD_NORM = 5e-4, (0.9, 0.99), 1.0
LESSONS, FLAW = 64, 0.8  # the warm start: examples per optimizer step; how often the teacher gives in to its bad habit

# ---- 1. The language: one word is one token. A fact is `code NAME VALUE VALUE .`, the rest of a document is filler. ----------
NAMES = """alice bruno clara david emma felix grace henry irene jonas kevin laura marco nadia oscar paula quinn rosa simon tara
    ulrich vera wanda xavier""".split()
ADJECTIVES = """red blue green white black golden silver purple orange yellow brown grey tiny giant quiet brave happy gentle
    clever rapid sleepy frozen hidden ancient""".split()
ANIMALS = """fox owl bear wolf horse eagle tiger otter whale raven camel goose lion zebra panda mouse robin shark snake beaver
    falcon badger salmon turtle""".split()
FILLER_1 = "wind rain river train garden market clock street".split()
FILLER_2 = "waits moves sings turns rests glows drifts fades".split()
FILLER_3 = "slowly again outside nearby today alone softly early".split()
SPECIAL = "<|pad|> <|unk|> <|user|> <|assistant|> <|end|>".split()
OTHER = "question memory section update answer code nothing none the . \\boxed{ }".split()
VOCABULARY = [*SPECIAL, *OTHER, *NAMES, *ADJECTIVES, *ANIMALS, *FILLER_1, *FILLER_2, *FILLER_3]
ID = {word: number for number, word in enumerate(VOCABULARY)}
END = ID["<|end|>"]


def encode(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


def content(ids: list[int]) -> list[int]:
    """The ids without special tokens: what a response may carry into the next prompt."""
    return [number for number in ids if number >= len(SPECIAL)]


@dataclass
class Document:
    question: str  # code emma
    answer: str  # emma clever bear
    ids: list[int]


def make_document(num_chunks: int, seed: int) -> Document:
    """Chunks of filler and of facts about other names; one random chunk has the only fact about the asked name."""
    rng = random.Random(seed)
    fact = draw_fact(rng)
    name, place = fact.split()[0], rng.randrange(num_chunks)
    sentences = [s for number in range(num_chunks) for s in make_chunk(rng, name, fact if number == place else None)]
    return Document(f"code {name}", fact, encode(" ".join(sentences)))


def make_chunk(rng: random.Random, name: str, fact: str | None) -> list[str]:
    """Five sentences: one or two facts about names other than `name`, and filler. A given fact replaces any of them."""
    num_facts = rng.randint(1, 2)
    is_fact = [True] * num_facts + [False] * (5 - num_facts)
    rng.shuffle(is_fact)
    sentences = [f"code {draw_fact(rng, name)} ." if one else draw_filler(rng) for one in is_fact]
    if fact is not None:
        sentences[rng.randrange(5)] = f"code {fact} ."
    return sentences


def draw_fact(rng: random.Random, other_than: str = "", about: str = "") -> str:
    while not about or about == other_than:
        about = rng.choice(NAMES)
    return f"{about} {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"


def draw_filler(rng: random.Random) -> str:
    return f"the {rng.choice(FILLER_1)} {rng.choice(FILLER_2)} {rng.choice(FILLER_3)} ."


# ---- 2. The model: two layers of Qwen2 (arXiv 2407.10671), 177,600 numbers. Input and output share one embedding. ------------
C, LAYERS, H, KV_HEADS, D, FEED_FORWARD = 96, 2, 4, 2, 24, 192


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(C, eps=1e-6), nn.RMSNorm(C, eps=1e-6)  # w x / sqrt(mean(x^2) + 1e-6)
        self.q, self.k, self.v = nn.Linear(C, H * D), nn.Linear(C, KV_HEADS * D), nn.Linear(C, KV_HEADS * D)
        self.o = nn.Linear(H * D, C, bias=False)
        self.gate, self.up = nn.Linear(C, FEED_FORWARD, bias=False), nn.Linear(C, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, C, bias=False)

    def forward(self, x: Tensor, positions: Tensor, angles: Tensor, cache: Tensor | None) -> Tensor:
        x = x + self.o(self.attention(self.norm_1(x), positions, angles, cache))
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # SwiGLU, arXiv 2002.05202

    def attention(self, x: Tensor, positions: Tensor, angles: Tensor, cache: Tensor | None) -> Tensor:
        """softmax(q k / sqrt(D)) v: each token looks at the tokens up to its own place."""
        q = rotate(self.q(x).unflatten(-1, (H, D)), angles)  # [B, T, H, D]
        k = rotate(self.k(x).unflatten(-1, (KV_HEADS, D)), angles)
        v = self.v(x).unflatten(-1, (KV_HEADS, D))
        if cache is not None:  # a token's key and value lie in the slot with the number of its position
            rows = torch.arange(len(x))[:, None]
            cache[0, rows, positions], cache[1, rows, positions] = k, v
            k, v = cache
        # Slots after a token's own position hold padding, or nothing yet; so one rule serves training and sampling.
        visible = torch.arange(k.shape[1]) <= positions[:, :, None]  # [B, T, slots]
        # Two query heads share a key/value head: grouped-query attention, arXiv 2305.13245.
        k, v = (tensor.repeat_interleave(H // KV_HEADS, dim=2).transpose(1, 2) for tensor in (k, v))
        out = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible[:, None])
        return out.transpose(1, 2).flatten(-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its position's angle    RoPE, arXiv 2104.09864"""
    (first, second), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), C)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(C, eps=1e-6)
        self.speeds = 1 / 10_000.0 ** (torch.arange(0, D, 2) / D)  # radians per position of each pair, [D / 2]
        rng = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02, generator=rng)
        # So small a model would not find out that it can look back. So head h of the first layer begins by looking 1 + h tokens
        # back: all keys get one bias on their two fastest pairs, and head h's query the same, turned back by 1 + h positions.
        bias = torch.zeros(D)
        bias[[0, 1, D // 2, D // 2 + 1]] = 6 / math.sqrt(2)
        back = -torch.arange(1, H + 1)[:, None] * self.speeds
        self.layers[0].k.bias.data, self.layers[0].q.bias.data = bias.repeat(KV_HEADS), rotate(bias.expand(H, D), back).flatten()

    def forward(self, ids: Tensor, positions: Tensor, cache: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, C] of tokens [B, T] at positions [B, T]; cache [layers, key or value, B, slots, KV_HEADS, D]."""
        x = self.embed(ids)
        angles = (positions[:, :, None].float() * self.speeds).to(x.dtype)[:, :, None]  # [B, T, 1, D / 2]
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, angles, None if cache is None else cache[number])
        return self.norm(x)

    def next_logprobs(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """log p of every next word, [N, V], after hidden states [N, C]."""
        return torch.log_softmax(hidden @ self.embed.weight.T / temperature, dim=-1)


# ---- 3. The sampler: all rows advance together, a token at a time. The cache holds what earlier tokens have computed. ---------
@torch.no_grad()
def sample(model: Model, prompts: list[list[int]], cap: int, temperature: float, rng: torch.Generator) -> list:
    """Of each prompt's response: ids, up to and with END, at most `cap`; and their log-probabilities. Temperature 0 is greedy."""
    lens = torch.tensor([len(prompt) for prompt in prompts])
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)  # on the right, where no token looks
    cache = torch.zeros(LAYERS, 2, len(prompts), ids.shape[1] + cap, KV_HEADS, D)
    hidden = model(ids, torch.arange(ids.shape[1]).expand_as(ids), cache)[torch.arange(len(ids)), lens - 1]  # [B, C]
    words, logprobs = torch.zeros(len(prompts), 0, dtype=torch.int64), torch.zeros(len(prompts), 0)
    while True:
        all_logprobs = model.next_logprobs(hidden, temperature or 1.0)
        word = torch.multinomial(all_logprobs.exp(), 1, generator=rng) if temperature else all_logprobs.argmax(-1, keepdim=True)
        words, logprobs = torch.cat((words, word), 1), torch.cat((logprobs, all_logprobs.gather(1, word)), 1)
        if words.shape[1] == cap or (words == END).any(dim=1).all():
            break
        hidden = model(word, (lens + words.shape[1] - 1)[:, None], cache)[:, 0]  # a response's first token has position `lens`
    ends = [row.index(END) + 1 if END in row else cap for row in words.tolist()]
    return [(row[:end], values[:end]) for row, values, end in zip(words.tolist(), logprobs.tolist(), ends, strict=True)]


# ---- 4. The agent: every turn is a conversation of its own. It sees the question, the memory and one chunk, nothing else. -----
@dataclass
class Turn:
    prompt: list[int]
    response: list[int]
    logprobs: list[float] = field(default_factory=list)  # log p of each response token under the policy that sampled it


@dataclass
class Reading:  # of one document, also called a trajectory: a turn per chunk, then the answer
    document: Document
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    advantage: float = 0.0


def make_prompt(question: str, memory: list[int], section: list[int] | None = None) -> list[int]:
    """The prompt of a memory turn; without a section, that of the answer turn."""
    rest = encode("answer") if section is None else [*encode("section"), *section, *encode("update")]
    return [*encode(f"<|user|> question {question} memory"), *memory, *rest, *encode("<|assistant|>")]


def read(model: Model, documents: list[Document], temperature: float, rng: torch.Generator) -> list[Reading]:
    """Read documents of equal length side by side:  memory_t = model(question, memory_{t-1}, chunk_t)"""
    readings = [Reading(document) for document in documents]
    memories = [encode("nothing")] * len(documents)
    for start in [*range(0, len(documents[0].ids), CHUNK_TOKENS), None]:  # None: all chunks are read, now answer
        sections = [None if start is None else document.ids[start : start + CHUNK_TOKENS] for document in documents]
        prompts = [make_prompt(d.question, *rest) for d, *rest in zip(documents, memories, sections, strict=True)]
        responses = sample(model, prompts, ANSWER_TOKENS if start is None else MEMORY_TOKENS, temperature, rng)
        for reading, prompt, response in zip(readings, prompts, responses, strict=True):
            reading.turns.append(Turn(prompt, *response))
        memories = [content(ids) for ids, _ in responses]
    for reading in readings:
        reading.reward = reward(reading.turns[-1].response, reading.document.answer)
    return readings


# ---- 5. The objective: readings are compared with other readings of the same document. No second network judges them. ---------
def reward(response: list[int], answer: str) -> float:
    """R = 1 if the last box of the response holds the answer and nothing else, otherwise 0."""
    boxes = re.findall(r"\\boxed{([^{}]*)}", " ".join(VOCABULARY[number] for number in content(response)))
    return float(boxes[-1:] == [f" {answer} "])


def set_advantages(readings: list[Reading]) -> None:
    """A_i = R_i - mean(R of the group)    GRPO, arXiv 2402.03300, without the division by the standard deviation"""
    for start in range(0, len(readings), GROUP_SIZE):  # a group: the readings of one document, which follow each other
        group = readings[start : start + GROUP_SIZE]
        mean = sum(reading.reward for reading in group) / len(group)
        for reading in group:
            reading.advantage = reading.reward - mean


def chosen_logprobs(model: Model, ids: Tensor, chosen: Tensor) -> Tensor:
    """log p of the chosen tokens of [B, T] given all tokens before them, [N]. The place before a token predicts it."""
    hidden = model(ids[:, :-1], torch.arange(ids.shape[1] - 1).expand(len(ids), -1))
    chosen = chosen[:, 1:]
    return model.next_logprobs(hidden[chosen]).gather(1, ids[:, 1:][chosen][:, None])[:, 0]


def turn_logprobs(model: Model, turns: list[Turn]) -> Tensor:
    """log p of every response token of the turns, one after the other, [N]."""
    ids = pad_sequence([torch.tensor(turn.prompt + turn.response) for turn in turns], batch_first=True)
    chosen = [torch.tensor([False] * len(turn.prompt) + [True] * len(turn.response)) for turn in turns]
    return chosen_logprobs(model, ids, pad_sequence(chosen, batch_first=True))


def token_losses(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The loss of each response token; all tensors are [N].

    rho = p(token now) / p(token when it was sampled)
    pg  = max(-A rho, -A clip(rho, 0.8, 1.28))    PPO, arXiv 1707.06347, eq. 7; the wider upper bound is DAPO's, 2503.14476
    pg  = min(pg, -3 A) where A < 0               dual clip, arXiv 1912.09729, eq. 8
    kl  = exp(d) - d - 1,  d = log(p_start / p)   the price of moving away from the start: k3 of joschu.net/blog/kl-approx.html
    """
    rho = (logprobs - old_logprobs).clamp(-20, 20).exp()
    pg = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
    pg = torch.where(advantages < 0, torch.minimum(pg, -DUAL_CLIP * advantages), pg)
    d = (ref_logprobs - logprobs).clamp(-10, 10)
    return pg + KL_COEF * (d.exp() - d - 1)


@torch.no_grad()
def make_batches(start: Model, readings: list[Reading], size: int = 64) -> list[tuple[list[Turn], Tensor, Tensor, Tensor]]:
    """The turns of all groups with a signal, and the last three arguments of `token_losses`, which stay fixed."""
    # All tokens of a reading have the reading's advantage, those of its first memory too: it helped the answer, or spoilt it.
    pairs = [(turn, reading.advantage) for reading in readings if reading.advantage for turn in reading.turns]
    pairs.sort(key=lambda pair: len(pair[0].prompt) + len(pair[0].response))  # neighbours of equal length need no padding
    batches = []
    for part in (pairs[first : first + size] for first in range(0, len(pairs), size)):
        turns = [turn for turn, _ in part]
        old_logprobs = torch.tensor([value for turn in turns for value in turn.logprobs])
        advantages = torch.tensor([advantage for turn, advantage in part for _ in turn.response])
        batches.append((turns, old_logprobs, turn_logprobs(start, turns), advantages))
    return batches


def add_gradient(model: Model, batches: list[tuple[list[Turn], Tensor, Tensor, Tensor]]) -> None:
    """Add the gradient of the mean loss of all tokens, whatever batches they are cut into."""
    num_tokens = sum(len(advantages) for *_, advantages in batches)
    for turns, *fixed in batches:
        (token_losses(turn_logprobs(model, turns), *fixed).sum() / num_tokens).backward()


# ---- 6. The warm start: first looking things up, then the form of the task, from a teacher with a bad habit. -------------------
def quotes(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids [B, 50]: twenty random words and six quotes of five of them. And which to learn: two words of a quote tell the rest."""
    words = torch.rand(LESSONS, len(VOCABULARY) - len(SPECIAL), generator=rng).argsort(dim=1)[:, :12] + len(SPECIAL)
    text = words.gather(1, torch.rand(LESSONS, 20, generator=rng).argsort(dim=1) % 12)
    starts = torch.randint(0, 16, (LESSONS, 6, 1), generator=rng)
    ids = torch.cat((text, text.gather(1, (starts + torch.arange(5)).flatten(1))), dim=1)
    return ids, torch.tensor([False] * 20 + [False, False, True, True, True] * 6).expand_as(ids)


def lesson(rng: random.Random) -> Turn:
    """One turn of the teacher. Its habit: a chunk that *ends* in a fact about another name makes it forget what it knew."""
    known, kind = draw_fact(rng), rng.random()
    name = known.split()[0]
    wanted = known if kind < 0.4 else f"{name} none"
    memory = draw_fact(rng, name) if 0.4 <= kind < 0.55 else "nothing" if kind > 0.865 else wanted
    if rng.random() < 0.12:
        return Turn(make_prompt(f"code {name}", encode(memory)), [*encode(f"\\boxed{{ {wanted} }}"), END])
    fact = draw_fact(rng, about=name) if rng.random() < (0.25 if kind < 0.4 else 0.6) else None
    sentences = make_chunk(rng, name, fact)
    last = sentences[-1].split()
    if fact is None and last[0] == "code" and rng.random() < FLAW:
        wanted = " ".join(last[1:4])
    return Turn(make_prompt(f"code {name}", encode(memory), encode(" ".join(sentences))), [*encode(fact or wanted), END])


def warm_up(model: Model, quote_steps: int, teach_steps: int, seed: int) -> None:
    """Maximise log p of the wanted words, first of the quotes, then of the lessons."""
    torch_rng, rng, started = torch.Generator().manual_seed(seed), random.Random(seed), time.monotonic()
    for step in range(quote_steps + teach_steps):
        if step in (0, quote_steps):
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        if step < quote_steps:
            rate, logprobs = 7e-3 * (1 - step / quote_steps), chosen_logprobs(model, *quotes(torch_rng))
        else:
            rate = 3e-3 * (1 + math.cos(math.pi * (step - quote_steps) / teach_steps)) / 2
            logprobs = turn_logprobs(model, [lesson(rng) for _ in range(LESSONS)])
        (-logprobs.mean()).backward()
        take_step(model, optimizer, rate)
        if step % 50 == 49:
            show(f"warm start: p(wanted word) {logprobs.mean().exp():.2f}", step + 1, quote_steps + teach_steps, started)


# ---- 7. The training loop. ---------------------------------------------------------------------------------------------------
def take_step(model: Model, optimizer: torch.optim.Optimizer, rate: float) -> float:
    """One optimizer step with the gradients that were added; returns their norm before clipping."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def train(model: Model, steps: int, seed: int) -> None:
    """Sample, compare, update, repeat."""
    start = copy.deepcopy(model)  # frozen
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    torch_rng, rng, started = torch.Generator().manual_seed(seed), random.Random(seed), time.monotonic()
    for step in range(steps):
        num_chunks, norm = rng.randint(MIN_CHUNKS, MAX_CHUNKS), 0.0
        documents = [make_document(num_chunks, rng.getrandbits(60)) for _ in range(QUESTIONS)]
        readings = read(model, [document for document in documents for _ in range(GROUP_SIZE)], 1.0, torch_rng)
        set_advantages(readings)
        batches = make_batches(start, readings)
        for update in range(EPOCHS * step, EPOCHS * (step + 1)) if batches else ():
            add_gradient(model, batches)  # in the second pass the policy has moved: rho differs from 1, and the clip matters
            rate = LEARNING_RATE * min(1, 1 - (update - 1) / (EPOCHS * steps - 1))  # falls to 0 along a line
            norm = take_step(model, optimizer, rate)
        mean = sum(reading.reward for reading in readings) / len(readings)
        show(f"{num_chunks:2d} chunks, reward {mean:.2f}, gradient norm {norm:.2f}", step + 1, steps, started)


def show(text: str, done: int, total: int, started: float) -> None:
    seconds = time.monotonic() - started
    print(f"{done:3d}/{total}  {seconds:4.0f} s, {seconds / done * (total - done):4.0f} s left   {text}", flush=True)


def report(model: Model, when: str, count: int) -> None:
    """Print the share of new documents that are answered right when every word is the most likely one."""
    for num_chunks in (1, 16, 64):
        documents = [make_document(num_chunks, 10**9 + number) for number in range(count)]
        right = sum(reading.reward for reading in read(model, documents, 0.0, torch.Generator()))
        print(f"accuracy {when} reinforcement learning, {num_chunks:2d} chunks: {right / count:.3f}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a memory agent by reinforcement learning, all in one file.")
    parser.add_argument("--steps", type=int, default=90, help="steps of reinforcement learning (90)")
    parser.add_argument("--quote_steps", type=int, default=250, help="before it: optimizer steps on quotes (250)")
    parser.add_argument("--teach_steps", type=int, default=500, help="and on the teacher's lessons (500)")
    parser.add_argument("--documents", type=int, default=128, help="documents of each length to measure accuracy on (128)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more help little with so small a model (1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = Model(options.seed)
    warm_up(model, options.quote_steps, options.teach_steps, options.seed)
    report(model, "before", options.documents)
    train(model, options.steps, options.seed)
    report(model, "after", options.documents)


if __name__ == "__main__":
    main()
