"""`memrl data filter`: drop the questions of a data set that a model answers without the document."""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memrl.utils.bounds import bounded
from memrl.utils.command_line import Command, allow_files_flag, argument, check_out

if TYPE_CHECKING:
    from memrl.data.custom import Samples
    from memrl.data.filtering import Answers, AnswersFile, Outcome, Rule
    from memrl.endpoint import RemoteLLM
    from memrl.llm import LocalLLM


@dataclass(kw_only=True)
class Filter(Command):
    """Put each question to a model without its document, several times, and drop it if the responses are right.

    All responses are kept in OUT.answers.jsonl: the same command continues if it was stopped, and another criterion needs no new
    responses.
    """

    input: Path = argument("input", type=Path, metavar="IN", help=".jsonl or .parquet file, or a folder of .parquet files")
    out: Path = argument("out", type=Path, metavar="OUT", help="data set to write, .jsonl or .parquet")
    model: Path | None = None
    """Hugging Face folder of the model; give this or --endpoint."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server; its key is taken from OPENAI_API_KEY."""
    name: str | None = None
    """Name of the model on the server."""
    samples: int = bounded(2, 1, 1000)
    """Responses to each question."""
    criterion: Literal["strict", "lenient", "either"] = "either"
    """What makes a response right."""
    drop_when: Literal["any", "all"] = "any"
    """Drop a question if any of its responses is right, or only if all are."""
    limit: int | None = bounded(None, at_least=1)
    """Use only this many questions, the first ones."""
    keep: int | None = bounded(None, at_least=1)
    """Write only this many of the questions that stay, the first ones."""
    keep_failed: bool = argument(
        "--keep_failed", action="store_true", default=False, help="keep questions that fail again and again, instead of stopping"
    )
    allow_files: bool = allow_files_flag()
    temperature: float = bounded(1.0, at_least=0)
    """Sampling temperature."""
    top_p: float = bounded(0.7, above=0, at_most=1)
    """Sample from the smallest set of most likely tokens that reaches this probability."""
    max_new_tokens: int = bounded(512, at_least=1)
    """Largest number of tokens of a response."""
    seed: int = bounded(0, 0, 2**63 - 1)
    """Seed of the sampling."""
    concurrency: int | None = bounded(None, at_least=1)
    """Questions in work at the same time; 128 if not given, with a server 32."""
    device: str = "auto"
    """Device of --model: auto, cpu, cuda, cuda:N or map."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights of --model; auto keeps the checkpoint's own."""
    cache_gib: float = bounded(4.0, above=0)
    """Largest size of the key/value cache of --model, in GiB."""

    def run(self) -> None:
        from memrl.data import load_samples, write_samples
        from memrl.data.filtering import AnswersFile, Rule, decide, first, is_answered
        from memrl.utils.files import fingerprint

        check(self)
        samples = load_samples(self.input, self.allow_files)
        rule = Rule(self.criterion, self.drop_when)
        asked_about = asked_of(self)
        with AnswersFile(self.out.with_name(f"{self.out.name}.answers.jsonl"), asked_about) as journal:
            if not is_answered(first(samples, self.limit), journal, rule, self.keep):
                if self.out.exists():  # before any question is put to the model
                    raise ValueError(f"{self.out}: exists, and questions are left to ask; delete it or choose another name")
                ask(self, samples, journal, rule)
            ids = samples.ids[: self.limit]
            outcome = decide(ids, journal, rule, self.keep)
            asked = sum(sample_id in journal.lines for sample_id in ids)
        if outcome.failed and not self.keep_failed:
            raise ValueError(
                f"{outcome.failed} questions failed, the first one {outcome.error}; the same command asks them again, and with "
                "--keep_failed they stay in the data set"
            )
        report = describe(outcome, rule, asked)
        if not outcome.kept:
            raise ValueError(f"nothing stays: {report}")
        kept = hashlib.sha256("\n".join(map(str, outcome.kept)).encode()).hexdigest()
        recipe = {"command": "filter", "input": fingerprint(samples.paths), **asked_about, **vars(rule)}
        recipe |= {"keep": self.keep, "kept": kept}
        write_samples(self.out, lambda index: samples[outcome.kept[index]], len(outcome.kept), recipe, "filter")
        print(f"{self.out}: {report}")


def check(options: Filter) -> None:
    """Raise ValueError for options that exclude each other."""
    check_out(options.out, [options.input], (".jsonl", ".parquet"))
    if (options.model is None) == (options.endpoint is None):
        raise ValueError("give the model: either --model DIR, or --endpoint URL with --name NAME")
    if options.endpoint is not None and not options.name:
        raise ValueError("endpoint is given without a name; name the model on the server: --name NAME")
    if options.model is not None and options.name:
        raise ValueError(f"name is {options.name!r}, which only a server's models have; leave it out, or give --endpoint")
    if options.samples > 1 and options.temperature == 0:
        raise ValueError(f"samples is {options.samples}, but at temperature 0 all are the same; give --samples 1")
    if options.model is not None and not options.model.is_dir():
        raise ValueError(f"there is no model folder {options.model}; give a Hugging Face folder, or --endpoint URL --name NAME")


def asked_of(options: Filter) -> dict[str, Any]:
    """All that the responses depend on except the question."""
    from memrl.data.filtering import QUESTION_ALONE
    from memrl.endpoint.addresses import public_url
    from memrl.tokenizer import TOKENIZER_FILES
    from memrl.utils.checksums import hash_files
    from memrl.utils.files import fingerprint

    if options.model is None:
        source = {"endpoint": public_url(options.endpoint or ""), "model": options.name}
    else:
        weights = sorted(options.model.glob("*.safetensors"))
        files = ("config.json", "generation_config.json", "memrl_agent.yaml", *TOKENIZER_FILES)
        others = [options.model / name for name in files if (options.model / name).is_file()]
        source = {"weights": hash_files(weights), "model_files": fingerprint(others), "dtype": options.dtype}
    names = ("samples", "temperature", "top_p", "max_new_tokens", "seed")
    return {**source, "prompt": QUESTION_ALONE, **{name: getattr(options, name) for name in names}}


def ask(options: Filter, samples: "Samples", journal: "AnswersFile", rule: "Rule") -> None:
    from memrl.data.filtering import ask_questions, first
    from memrl.utils.progress import Progress

    llm = open_model(options)
    print(*llm.about, sep="\n", file=sys.stderr)
    total = len(samples) if options.limit is None else min(options.limit, len(samples))
    done = sum(sample_id in journal.lines and not journal.lines[sample_id]["error"] for sample_id in samples.ids[:total])
    counts = {"dropped": 0, "failed": 0}
    with Progress("filter", total, "questions", start=done) as progress:

        def on_question(line: "Answers") -> None:
            counts["failed" if line["error"] else "dropped"] += bool(line["error"]) or rule.drops(line)
            progress.advance(**counts)

        ask_questions(
            llm,
            first(samples, options.limit),
            journal,
            rule,
            num_samples=options.samples,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            keep=options.keep,
            on_question=on_question,
        )
    if usage := getattr(llm, "usage", None):
        counted = f"{usage['prompt_tokens']} prompt and {usage['completion_tokens']} response tokens"
        print(f"{counted}, as the server counts", file=sys.stderr)


def open_model(options: Filter) -> "LocalLLM | RemoteLLM":
    from memrl.reading.open_model import ReaderOptions, decoding, load_settings, open_llm

    names = ("temperature", "top_p", "cache_gib", "dtype", "device")
    reader = ReaderOptions(**{name: getattr(options, name) for name in names}, max_rows=options.concurrency or 128)
    if options.model is not None:
        agent, tokenizer = load_settings(options.model, reader)
        return open_llm(options.model, tokenizer, agent, reader)
    from memrl.data.filtering import Characters
    from memrl.endpoint import RemoteLLM

    assert options.endpoint is not None and options.name is not None, "check() refuses a missing one"
    llm = RemoteLLM(options.endpoint, options.name, Characters(), decoding(reader), concurrency=options.concurrency or 32)
    llm.check()
    return llm


def describe(outcome: "Outcome", rule: "Rule", asked: int) -> str:
    """One line of counts. `asked` questions are more than `--keep` needs, as several are asked at a time."""
    counts = ", ".join(f"{name} {count}" for name, count in outcome.right.items())
    failed = f", {outcome.failed} of them failed" if outcome.failed else ""
    number = len(outcome.kept) + outcome.dropped
    questions = f"{asked} questions asked" + (f", the first {number} of them decide" if number < asked else "")
    words = "any response" if rule.drop_when == "any" else "all responses"
    return (
        f"{questions}; {words} right: {counts}; by the criterion {rule.criterion} {outcome.dropped} dropped, "
        f"{len(outcome.kept)} kept{failed}"
    )
