"""One optimizer step on the same rollouts: memrl's update against TRL's GRPOTrainer.

16 turns, ragged as a memory agent's are: prompts of 512 to 2,048 tokens, responses of 16 to 256; ids, lengths and advantages from
a fixed seed. The policy has the shape of Qwen2.5-0.5B cut to 6 layers, and random weights. Old log-probabilities are the policy's
own plus noise, so that some ratios are clipped. Both sides take the token mean over the step of the loss with clip 0.2, no KL
term, fp32 masters under bf16 products, AdamW, gradients cut at norm 1, no activation checkpointing.

    memrl    what train.py runs: turns packed without padding, DeepSpeed ZeRO-3 on one rank
    TRL      GRPOTrainer.train() for one step, 4 rows at a time, 4 gradient accumulation steps, everything else as its
             defaults are (fp32 weights under bf16 autocast); its sampling is replaced by the rollouts

Each side runs in a process of its own. Seconds are those of forward, backward and the optimizer step; peak memory is the whole
process's. TRL shuffles the rows, which changes none of the sums. Gradient norm and loss of both sides have to agree.

    pip install trl
    python benchmarks/update.py                    both sides in bf16; on a CPU without bf16 instructions TRL takes hours
    python benchmarks/update.py --dtype float32    both sides in fp32
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import (
    QWEN_0_5B,
    SMALL,
    Bars,
    answer,
    make_parser,
    measure,
    median,
    model_folder,
    peak_gib,
    print_table,
    report,
    run_part,
    shown,
    write_json,
)

SIDES = ("TRL", "memrl")
SPEEDUP, MEMORY, AGREEMENT = 4.0, 0.5, 0.05
ROWS_AT_A_TIME = 4
LR, CLIP, MAX_NORM = 1e-6, 0.2, 1.0
NOISE = 0.15  # standard deviation of log ratios; a sixth of them lies beyond the clip bounds


# The parts.


def rollouts(folder: str, rows: int, prompt: list[int], response: list[int]) -> dict:
    """Write FOLDER/rollouts.json: ids, old log-probabilities and advantages of each row."""
    import torch

    from memrl.model import load_model
    from memrl.model.attention_context import PackedContext

    model = load_model(Path(folder) / "model", dtype="float32")
    rng = random.Random(0)
    rewards = [rng.randrange(2) for _ in range(rows - 2)] + [0, 1]
    turns = []
    for reward in rewards:
        lengths = rng.randint(*prompt), rng.randint(*response)
        ids = [rng.choices(range(model.config.vocab_size), k=length) for length in lengths]
        inputs = torch.tensor(ids[0] + ids[1][:-1])
        select = torch.arange(lengths[0] - 1, len(inputs))
        with torch.no_grad():
            logprobs, _ = model(inputs, PackedContext([len(inputs)]), select, torch.tensor(ids[1]))
        turns.append(
            {
                "prompt_ids": ids[0],
                "response_ids": ids[1],
                "old_logprobs": [value + rng.gauss(0, NOISE) for value in logprobs.tolist()],
                "advantage": reward - statistics.mean(rewards),
            }
        )
    (Path(folder) / "rollouts.json").write_text(json.dumps(turns), encoding="utf-8")
    longest = [max(len(turn[key]) for turn in turns) for key in ("prompt_ids", "response_ids")]
    real = sum(len(turn["prompt_ids"]) + len(turn["response_ids"]) for turn in turns)
    return {"tokens": real, "padded": rows * sum(longest)}


def read_rollouts(folder: str) -> list[dict]:
    return json.loads((Path(folder) / "rollouts.json").read_text(encoding="utf-8"))


def memrl(folder: str, dtype: str, micro_batch_tokens: int) -> dict:
    import torch.distributed

    from memrl.config import EngineOptions, OptimOptions, RLOptions
    from memrl.engine import distributed
    from memrl.engine.deepspeed_engine import Engine
    from memrl.model import load_model
    from memrl.rl.packing import TrainTurn
    from memrl.rl.update import accumulate_gradients, prepare_update
    from memrl.types import Turn

    distributed.init("cpu")
    optim = OptimOptions(lr=LR, warmup_updates=0, weight_decay=0.0, grad_clip=MAX_NORM)
    engine = Engine(load_model(Path(folder) / "model", dtype=dtype), optim, EngineOptions(), total_updates=1)
    rl = RLOptions(clip_low=CLIP, clip_high=CLIP, dual_clip=None, kl_coef=0.0, micro_batch_tokens=micro_batch_tokens)
    turns = [
        TrainTurn(Turn("memory", row["prompt_ids"], row["response_ids"], row["old_logprobs"], "stop"), row["advantage"])
        for row in read_rollouts(folder)
    ]
    loaded = peak_gib()
    began = time.perf_counter()
    update = prepare_update(turns, rl)
    metrics = accumulate_gradients(engine, update, rl, temperature=1.0)
    computed = time.perf_counter()
    norm, _ = engine.step()
    seconds = time.perf_counter() - began
    figures = {
        "seconds": seconds,
        "optimizer_s": began + seconds - computed,
        "peak_gib": peak_gib(),
        "loaded_gib": loaded,
        "grad_norm": norm,
        "loss": metrics["pg_loss"],
    }
    engine.close()
    torch.distributed.destroy_process_group()
    return figures


def trl(folder: str, dtype: str) -> dict:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = read_rollouts(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    # Never read. With a fingerprint of its own, because datasets 5.2 cannot compute one with pyarrow 26.
    table = InMemoryTable.from_pydict({"prompt": ["<eos>"] * len(rows)})
    marks: dict[str, float] = {}

    class Prepared(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return padded(rows)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            marks["loaded_gib"] = peak_gib()
            marks["began"] = time.perf_counter()

        def on_pre_optimizer_step(self, *_, **__):
            marks["computed"] = time.perf_counter()

        def on_step_end(self, *_, **__):
            marks["ended"] = time.perf_counter()

    with tempfile.TemporaryDirectory() as output:
        trainer = Prepared(
            model=str(Path(folder) / "model"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=ROWS_AT_A_TIME,
                gradient_accumulation_steps=len(rows) // ROWS_AT_A_TIME,
                num_generations=len(rows),
                max_steps=1,
                lr_scheduler_type="constant",
                learning_rate=LR,
                epsilon=CLIP,
                max_grad_norm=MAX_NORM,
                bf16=dtype == "bfloat16",
                gradient_checkpointing=False,
                use_cpu=True,
                dataloader_pin_memory=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset(table, fingerprint="rollouts"),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
            callbacks=[Clock()],
        )
        trainer.train()
    [logged] = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "seconds": marks["ended"] - marks["began"],
        "optimizer_s": marks["ended"] - marks["computed"],
        "peak_gib": peak_gib(),
        "loaded_gib": marks["loaded_gib"],
        "grad_norm": logged["grad_norm"],
        "loss": logged["loss"],
    }


def padded(rows: list[dict]) -> dict:
    """What GRPOTrainer's own sampling returns: prompts padded on the left, completions on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def pad(key, side, dtype=torch.int64):
        return pad_sequence([torch.tensor(row[key], dtype=dtype) for row in rows], batch_first=True, padding_side=side)

    def mask(key, side):
        ones = [torch.ones(len(row[key]), dtype=torch.int64) for row in rows]
        return pad_sequence(ones, batch_first=True, padding_side=side)

    return {
        "prompt_ids": pad("prompt_ids", "left"),
        "prompt_mask": mask("prompt_ids", "left"),
        "completion_ids": pad("response_ids", "right"),
        "completion_mask": mask("response_ids", "right"),
        "old_per_token_logps": pad("old_logprobs", "right", torch.float32),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(len(row["response_ids"]) for row in rows)),
    }


# The process that measures nothing itself.


def main() -> int:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help=f"turns; a multiple of {ROWS_AT_A_TIME}")
    parser.add_argument("--prompt", type=int, nargs=2, default=[512, 2048], metavar=("LEAST", "MOST"))
    parser.add_argument("--response", type=int, nargs=2, default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--micro-batch-tokens", type=int, default=2304, help="memrl's bound (default 2304, the longest turn)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both sides")
    parser.add_argument("--trl-dtype", choices=("bfloat16", "float32"), help="of TRL alone; default: --dtype")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    arguments = parser.parse_args()
    if arguments.rows % ROWS_AT_A_TIME:
        parser.error(f"--rows {arguments.rows} must be a multiple of {ROWS_AT_A_TIME}")
    standard = not arguments.small and (arguments.layers, arguments.rows) == (6, 16)
    if arguments.small:
        arguments.prompt, arguments.response, arguments.layers = [16, 64], [2, 8], 2
    with tempfile.TemporaryDirectory() as shape:
        if arguments.shape is None:
            arguments.shape = Path(shape) / "config.json"
            raw = (SMALL if arguments.small else QWEN_0_5B) | {"num_hidden_layers": arguments.layers}
            arguments.shape.write_text(json.dumps(raw), encoding="utf-8")
        with model_folder(__file__, arguments) as folder:
            return compare(arguments, str(folder.parent), standard)


def compare(arguments, folder: str, standard: bool) -> int:
    sizes = {"rows": arguments.rows, "prompt": arguments.prompt, "response": arguments.response}
    drawn = run_part(__file__, "rollouts", arguments.threads, {"folder": folder} | sizes)
    if "error" in drawn:
        raise SystemExit(f"error: the rollouts could not be made: {drawn['error']}")
    share = 1 - drawn["tokens"] / drawn["padded"]
    report(f"rollouts: {arguments.rows} turns, {drawn['tokens']:,} tokens; {share:.0%} of the padded rows is padding")
    options = {
        "TRL": {"dtype": arguments.trl_dtype or arguments.dtype},
        "memrl": {"dtype": arguments.dtype, "micro_batch_tokens": arguments.micro_batch_tokens},
    }
    parts = {
        f"{side} {options[side]['dtype']}": (side, {"folder": folder} | options[side], arguments.repeats)
        for side in arguments.sides
    }
    runs = measure(__file__, arguments.threads, parts)
    write_json(arguments, {"rollouts": drawn, "runs": runs})
    keys = ("seconds", "optimizer_s", "peak_gib", "loaded_gib", "grad_norm", "loss")
    print_table(
        ["", "step s", "of it optimizer", "peak GiB", "before the step", "gradient norm", "loss"],
        [[name, *(shown(median(results, key)) for key in keys)] for name, results in runs.items()],
    )
    if len(runs) < len(SIDES):
        return 0
    theirs, ours = ({key: median(results, key) for key in keys} for results in runs.values())
    bars = Bars(enforced=standard)
    speedup, memory = theirs["seconds"] / ours["seconds"], ours["peak_gib"] / theirs["peak_gib"]
    apart = abs(ours["grad_norm"] / theirs["grad_norm"] - 1)
    rows = [
        ["TRL's time over memrl's", shown(speedup), bars.cell("speedup", speedup, least=SPEEDUP)],
        ["memrl's peak memory over TRL's", shown(memory), bars.cell("memory", memory, most=MEMORY)],
    ]
    bars.enforced = True  # the sides must compute the same thing at any size
    rows.append(["relative difference of the gradient norms", shown(apart), bars.cell("gradient", apart, most=AGREEMENT)])
    print_table(["", "", "bar"], rows)
    return bars.close()


if __name__ == "__main__":
    answer({"rollouts": rollouts, "memrl": memrl, "TRL": trl})
    sys.exit(main())
