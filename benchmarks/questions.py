"""Several questions on one document: what do seven more cost the memory agent, and what does the order of the prompt change?

    python benchmarks/questions.py [--tokenizer DIR] [--chunks 2] [--chunk_tokens 4096] [--memory_tokens 128] [--json OUT]

It reads a synthetic text as infer.py does, for one question and for eight, with the prompts section_first (all but the question
and the notes is shared) and question_first (next to nothing is). Random bf16 weights, temperature 1, no stop ids, so every turn
is as long as its cap allows. Without --tokenizer the words of the text are the tokens.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import answer, make_parser, measure, median, model_folder, peak_gib, print_table, shown, timed, write_json

ORDERS = ("section_first", "question_first")
WORDS = "red blue green grey north south east west stone river cloud tree one two three four code name".split()


def read(
    folder: str, tokenizer: str | None, order: str, questions: int, chunks: int, chunk_tokens: int, memory_tokens: int
) -> dict:
    """A part: seconds and peak memory of reading one text of `chunks` chunks for `questions` questions."""
    from memrl.agents import AgentConfig
    from memrl.llm import Decoding, LocalLLM
    from memrl.model import load_model
    from memrl.prompts import load_prompts
    from memrl.reading.reader import read_documents
    from memrl.sampler import Sampler
    from memrl.tokenizer import load_tokenizer
    from memrl.types import Sample
    from tests.tiny_folder import make_tokenizer

    words = load_tokenizer(tokenizer) if tokenizer else make_tokenizer()
    agent = AgentConfig(load_prompts(order), chunk_tokens, memory_tokens, answer_tokens=memory_tokens)
    model = load_model(folder)
    if words.vocab_size > model.config.vocab_size:
        known = model.config.vocab_size
        raise SystemExit(f"the tokenizer has {words.vocab_size} tokens, the shape a vocabulary of {known}; give another --shape")
    llm = LocalLLM(Sampler(model, words), words, Decoding(), agent.prompts.system)
    llm.params = replace(llm.params, stop_ids=frozenset())

    def samples(tokens: int, count: int, seed: int) -> list[Sample]:
        rng = random.Random(seed)
        text = words.decode(words.encode(" ".join(rng.choices(WORDS, k=tokens)))[:tokens])
        asked = [" ".join(rng.choices(WORDS, k=24)) for _ in range(count)]
        return [Sample(f"question {place}", question, text) for place, question in enumerate(asked)]

    read_documents(llm, samples(8, 2, seed=1), replace(agent, memory_tokens=2, answer_tokens=2))
    asked = samples(chunks * chunk_tokens, questions, seed=2)
    readings = []
    seconds = timed(lambda: readings.extend(read_documents(llm, asked, agent)))
    for reading in readings:
        assert reading.error is None, reading.error
        assert [step.tokens for step in reading.steps] == [memory_tokens] * (chunks + 1), reading.steps
    return {"seconds": seconds, "peak_gib": peak_gib()}


def title(order: str, questions: int) -> str:
    return f"{order}, {questions} question{'s' if questions > 1 else ''}"


def main() -> int:
    answer({"read": read})
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--tokenizer", type=Path, help="folder of a real tokenizer")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--chunk_tokens", type=int, default=4096)
    parser.add_argument("--memory_tokens", type=int, default=128)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.chunk_tokens, arguments.memory_tokens = 128, 8
    size = {name: getattr(arguments, name) for name in ("chunks", "chunk_tokens", "memory_tokens")}
    tokenizer = str(arguments.tokenizer.absolute()) if arguments.tokenizer else None
    with model_folder(__file__, arguments) as folder:
        request = size | {"folder": str(folder), "tokenizer": tokenizer}
        parts = {
            title(order, count): ("read", request | {"order": order, "questions": count}, arguments.repeats)
            for order in arguments.orders
            for count in (1, arguments.questions)
        }
        runs = measure(__file__, arguments.threads, parts)
    write_json(arguments, runs)
    rows = []
    for order in arguments.orders:
        one, all_ = (runs[title(order, count)] for count in (1, arguments.questions))
        for name, key in (("seconds", "seconds"), ("peak GiB", "peak_gib")):
            figures = [median(each, key) for each in (one, all_)]
            rows.append([order, name, *map(shown, figures), shown(figures[1] / figures[0])])
    print_table(["prompt", "median of", "1 question", f"{arguments.questions} questions", "ratio"], rows)
    return int(any("error" in run for each in runs.values() for run in each))


if __name__ == "__main__":
    sys.exit(main())
