"""Time to pick one token per row: sample_tokens against the usual torch code.

    python benchmarks/sampling.py [--batch 16] [--vocab 151936] [--threads 2] [--repeats 9]

The peer is what most code does: log_softmax and multinomial, after a topk threshold for top_k and after a full sort for top_p.
Peaked logits (normal, standard deviation 6) leave some dozens of tokens in a nucleus of 0.95, as trained models mostly do; flat
ones (standard deviation 1) leave most of the vocabulary in it, so nothing but a full sort can find it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memrl.sampler.sampling import RowParams, SamplingParams, sample_tokens, uniform

CASES = {
    "plain": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.95": {"top_p": 0.95},
    "top_p, top_k, min_p": {"top_p": 0.95, "top_k": 50, "min_p": 0.05},
}


def peer(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        values, order = logits.sort(descending=False)
        dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    if min_p:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    logprobs = logits.log_softmax(-1)
    ids = torch.multinomial(logprobs.exp(), 1)
    return ids, logprobs.gather(1, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(arguments.batch, arguments.vocab, generator=generator).to(arguments.device)

    def seconds(function, *args, **options) -> float:
        start = time.perf_counter()
        function(*args, **options)[0].tolist()  # the ids reach the host, as they must in a sampler
        return time.perf_counter() - start

    print(f"{arguments.batch} rows, {arguments.vocab:,} tokens, fp32, {arguments.device}, {arguments.threads} threads; median ms")
    print(f"{'filters':<22}{'logits':<9}{'memrl':>8}{'torch':>9}{'ratio':>8}")
    for name, filters in CASES.items():
        for kind, std in (("peaked", 6.0), ("flat", 1.0)):
            logits = noise * std
            params = [SamplingParams(1, seed=row, **filters) for row in range(arguments.batch)]
            rows = RowParams.of(params, arguments.device)
            uniforms = uniform(rows.seed, torch.ones_like(rows.seed))
            ours, theirs = [], []
            for _ in range(arguments.repeats + 1):
                ours.append(seconds(sample_tokens, logits, rows, uniforms))
                theirs.append(seconds(peer, logits, **filters))
            own, other = (statistics.median(times[1:]) * 1e3 for times in (ours, theirs))  # the first one warms up
            print(f"{name:<22}{kind:<9}{own:>8.1f}{other:>9.1f}{other / own:>7.1f}x")


if __name__ == "__main__":
    main()
