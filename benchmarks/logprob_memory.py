"""Working memory and time of the log-probability of response tokens, forward and backward, at a large vocabulary.

Two ways, each in a process of its own: memrl's `token_logprobs`, and the plain `F.log_softmax(F.linear(hidden, weight).float())`.
Peak memory is the process's own peak (VmHWM) less what it held before. Of that, the gradients of hidden and weight are results;
the rest is working memory, and that has to stay below 15% of what the full fp32 logits would take. The plain way is not run in
bf16 where PyTorch has no fast bf16 products: it would take minutes there, and no less memory than in fp32.

    python benchmarks/logprob_memory.py                    4,096 tokens, vocabulary 151,936, hidden size 896
"""

import sys
import time

from common import Bars, answer, make_parser, measure, median, peak_gib, print_table, shown, write_json

LIMIT = 0.15  # of the full fp32 logits
SIDES = ("memrl", "plain")
DTYPES = ("float32", "bfloat16")


def logprobs(side: str, dtype: str, tokens: int, vocab_size: int, hidden_size: int) -> dict:
    """A part: seconds and memory of one forward and backward pass, after a tiny one to warm up."""
    import torch
    import torch.nn.functional as F

    from memrl.kernels.logprob import token_logprobs

    def plain(hidden, weight, targets):
        log_p = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), None

    def draw(*shape):
        # Drawn in place: a copy would raise the peak before anything is measured.
        return torch.empty(*shape, dtype=getattr(torch, dtype)).normal_()

    if side == "plain" and dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {"skipped": True}
    function = {"memrl": token_logprobs, "plain": plain}[side]
    torch.manual_seed(0)
    function(draw(2, 8).requires_grad_(), draw(4, 8), torch.tensor([1, 2]))[0].sum().backward()
    hidden, weight = draw(tokens, hidden_size).requires_grad_(), draw(vocab_size, hidden_size).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,))
    before = peak_gib()
    began = time.perf_counter()
    values, _ = function(hidden, weight, targets)
    forward = time.perf_counter()
    values.sum().backward()
    ended = time.perf_counter()
    with_results = peak_gib() - before
    results = (hidden.grad.nbytes + weight.grad.nbytes) / 2**30
    return {
        "forward_s": forward - began,
        "backward_s": ended - forward,
        "with_results_gib": with_results,
        "working_gib": with_results - results,
    }


def main() -> int:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=896)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.tokens, arguments.vocab_size, arguments.hidden_size = 64, 2048, 32
    shape = {"tokens": arguments.tokens, "vocab_size": arguments.vocab_size, "hidden_size": arguments.hidden_size}
    parts = {
        f"{side} {dtype}": ("logprobs", {"side": side, "dtype": dtype} | shape, arguments.repeats)
        for dtype in DTYPES
        for side in SIDES
    }
    runs = measure(__file__, arguments.threads, parts)
    write_json(arguments, runs)
    full = 4 * arguments.tokens * arguments.vocab_size / 2**30
    print(f"\nfull fp32 logits: {full:.2f} GiB; working memory must stay below {LIMIT:.0%} of it, {LIMIT * full:.2f} GiB")
    bars, rows = Bars(enforced=not arguments.small), []
    for name, results in runs.items():
        if "skipped" in results[0]:
            rows.append([name, *["not run"] * 5, ""])
            continue
        working = median(results, "working_gib")
        verdict = bars.cell(name, working / full, most=LIMIT) if name.startswith("memrl") else ""
        cells = [shown(median(results, key)) for key in ("forward_s", "backward_s", "with_results_gib")]
        rows.append([name, *cells, shown(working), f"{working / full:.1%}", verdict])
    print_table(["", "forward s", "backward s", "peak GiB, gradients too", "working GiB", "of the logits", "bar"], rows)
    return bars.close()


if __name__ == "__main__":
    answer({"logprobs": logprobs})
    sys.exit(main())
