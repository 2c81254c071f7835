"""`python -m memrl.data filter`: a data set without the questions that a model answers without the document."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memrl.data.commands.options import SUFFIXES, check_out, positive

# Of a model's folder, beside the weights: what tells how text becomes tokens, how the model is run, and when a response ends.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "memrl_agent.yaml",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

if TYPE_CHECKING:
    from memrl.data.custom import Samples
    from memrl.data.filtering import Answers, AnswersFile, Outcome, Rule
    from memrl.endpoint import RemoteLLM
    from memrl.llm import LocalLLM
    from memrl.reading.open_model import ReaderOptions


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "filter",
        help="drop the questions that a model answers without the document",
        description="Asks each question alone, several times, and drops it where responses are right. All responses are kept in "
        "OUT.answers.jsonl: a command that was stopped goes on from there, and another criterion asks nothing again.",
    )
    parser.add_argument("input", type=Path, metavar="IN", help=".jsonl or .parquet file, or a folder of .parquet files")
    parser.add_argument("out", type=Path, metavar="OUT", help="what to write, .jsonl or .parquet")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", type=Path, metavar="DIR", help="the model to ask: a Hugging Face folder")
    who.add_argument("--endpoint", metavar="URL", help="or an OpenAI-compatible server; the key is taken from OPENAI_API_KEY")
    parser.add_argument("--name", help="the model's name on the server")
    parser.add_argument("--samples", type=positive, default=2, help="responses to each question (default: 2)")
    parser.add_argument(
        "--criterion",
        choices=["strict", "lenient", "either"],
        default="either",
        help="what makes a response right (default: either)",
    )
    parser.add_argument("--drop_when", choices=["any", "all"], default="any", help="how many have to be (default: any)")
    parser.add_argument("--limit", type=positive, help="only the first so many questions")
    parser.add_argument("--keep", type=positive, help="only the first so many that stay")
    parser.add_argument(
        "--keep_failed", action="store_true", help="keep questions that fail again and again, instead of stopping"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--top_p", type=float, default=0.7, help="(default: 0.7)")
    parser.add_argument("--max_new_tokens", type=positive, default=512, help="of a response (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--concurrency", type=positive, help="questions asked at a time (default: 128, of a server 32)")
    parser.add_argument("--device", default="auto", help="of --model: auto, cpu, cuda, cuda:N or map (default: auto)")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of --model's weights"
    )
    parser.add_argument("--cache_gib", type=float, default=4.0, help="of --model: bound on the key/value cache (default: 4)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from memrl.data import load_samples, write_samples
    from memrl.data.filtering import AnswersFile, Rule, decide, first, is_answered
    from memrl.utils.files import fingerprint

    reader = check(arguments)
    samples = load_samples(arguments.input)
    rule = Rule(arguments.criterion, arguments.drop_when)
    with AnswersFile(journal_path(arguments.out), asked_of(arguments)) as journal:
        if not is_answered(first(samples, arguments.limit), journal, rule, arguments.keep):
            if arguments.out.exists():  # now, and not when all is asked
                raise ValueError(f"{arguments.out}: exists, and questions are left to ask; delete it or choose another name")
            ask(arguments, reader, samples, journal, rule)
        ids = samples.ids[: arguments.limit]
        outcome = decide(ids, journal, rule, arguments.keep)
        asked = sum(sample_id in journal.lines for sample_id in ids)
    if outcome.failed and not arguments.keep_failed:
        raise ValueError(
            f"{outcome.failed} questions failed, the first one {outcome.error}; the same command asks them again, and with "
            "--keep_failed they stay in the data set"
        )
    report = describe(outcome, rule, asked)
    if not outcome.kept:
        raise ValueError(f"nothing stays: {report}")
    kept = hashlib.sha256("\n".join(map(str, outcome.kept)).encode()).hexdigest()
    recipe = {"command": "filter", "input": fingerprint(samples.paths), **asked_of(arguments), **vars(rule)}
    recipe |= {"keep": arguments.keep, "kept": kept}
    write_samples(arguments.out, lambda index: samples[outcome.kept[index]], len(outcome.kept), recipe, "filter")
    print(f"{arguments.out}: {report}")


def check(arguments: argparse.Namespace) -> ReaderOptions:
    """How a model is run; a ValueError for options that cannot be, or do not go together."""
    from memrl.reading.open_model import ReaderOptions, check_seed

    check_out(arguments.out, [arguments.input], SUFFIXES)
    check_seed(arguments.seed)
    if arguments.endpoint is not None and not arguments.name:
        raise ValueError("endpoint is given without a name; say which of its models to ask: --name NAME")
    if arguments.model is not None and arguments.name:
        raise ValueError(f"name is {arguments.name!r}, which only a server's models have; leave it out, or give --endpoint")
    if arguments.samples > 1 and arguments.temperature == 0:
        raise ValueError(f"samples is {arguments.samples}, but at temperature 0 all are the same; give --samples 1")
    if not 0 <= arguments.temperature < float("inf"):
        raise ValueError(f"temperature is {arguments.temperature}; it must be at least 0")
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"top_p is {arguments.top_p}; it must be above 0 and at most 1")
    if arguments.model is not None and not arguments.model.is_dir():
        raise ValueError(f"there is no model folder {arguments.model}; give a Hugging Face folder, or --endpoint URL --name NAME")
    return ReaderOptions(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_rows=arguments.concurrency or 128,
        cache_gib=arguments.cache_gib,
        dtype=arguments.dtype,
        device=arguments.device,
    )


def journal_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.answers.jsonl")


def asked_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that responses depend on beside the question."""
    from memrl.data.filtering import QUESTION_ALONE
    from memrl.utils.files import fingerprint

    if arguments.endpoint is not None:
        who = {"endpoint": arguments.endpoint, "model": arguments.name}
    else:
        weights = sorted(arguments.model.glob("*.safetensors"))
        others = [arguments.model / name for name in MODEL_FILES if (arguments.model / name).is_file()]
        who = {"weights": fingerprint(weights), "model_files": fingerprint(others), "dtype": arguments.dtype}
    names = ("samples", "temperature", "top_p", "max_new_tokens", "seed")
    return {**who, "prompt": QUESTION_ALONE, **{name: getattr(arguments, name) for name in names}}


def ask(arguments: argparse.Namespace, reader: ReaderOptions, samples: Samples, journal: AnswersFile, rule: Rule) -> None:
    from memrl.data.filtering import ask_questions, first
    from memrl.utils.progress import Progress

    llm = open_model(arguments, reader)
    print(*llm.about, sep="\n", file=sys.stderr)
    total = len(samples) if arguments.limit is None else min(arguments.limit, len(samples))
    done = sum(sample_id in journal.lines and not journal.lines[sample_id]["error"] for sample_id in samples.ids[:total])
    counts = {"dropped": 0, "failed": 0}
    with Progress("filter", total, "questions", start=done) as progress:

        def on_question(line: Answers) -> None:
            counts["failed" if line["error"] else "dropped"] += bool(line["error"]) or rule.drops(line)
            progress.advance(**counts)

        ask_questions(
            llm,
            first(samples, arguments.limit),
            journal,
            rule,
            num_samples=arguments.samples,
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            keep=arguments.keep,
            on_question=on_question,
        )
    if usage := getattr(llm, "usage", None):
        print(
            f"{usage['prompt_tokens']} prompt and {usage['completion_tokens']} response tokens, as the server counts",
            file=sys.stderr,
        )


def open_model(arguments: argparse.Namespace, reader: ReaderOptions) -> LocalLLM | RemoteLLM:
    from memrl.reading.open_model import decoding, load_settings, open_llm

    if arguments.endpoint is None:
        agent, tokenizer = load_settings(arguments.model, reader)
        return open_llm(arguments.model, tokenizer, agent, reader)
    from memrl.data.filtering import Characters
    from memrl.endpoint import RemoteLLM

    concurrency = arguments.concurrency or 32
    llm = RemoteLLM(arguments.endpoint, arguments.name, Characters(), decoding(reader), concurrency=concurrency)
    llm.check()
    return llm


def describe(outcome: Outcome, rule: Rule, asked: int) -> str:
    """`100 questions, 12 dropped (any response right: strict 8, lenient 12, either 12), 88 kept`

    Args:
        asked: questions; more than those that `--keep` needs, as several are asked at a time.
    """
    counts = ", ".join(f"{name} {count}" for name, count in outcome.right.items())
    failed = f", {outcome.failed} of them failed" if outcome.failed else ""
    number = len(outcome.kept) + outcome.dropped
    questions = f"{asked} questions asked" + (f", the first {number} of them decide" if number < asked else "")
    words = "any response" if rule.drop_when == "any" else "all responses"
    return (
        f"{questions}; {words} right: {counts}; by the criterion {rule.criterion} {outcome.dropped} dropped, "
        f"{len(outcome.kept)} kept{failed}"
    )
