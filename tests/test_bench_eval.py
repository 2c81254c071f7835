"""`eval.py --task bench`: both languages by the tokenizer, all methods with a miniature, rows for oracle and chance."""

import json
from collections import Counter

import pytest

from memrl.__main__ import main
from memrl.agents import AgentConfig
from memrl.agents.agent_file import save_agent
from memrl.data import needle
from memrl.data.bench import ENGLISH, NAMES
from memrl.data.bench.miniature import build_tokenizer
from memrl.data.ruler import RulerFiles
from memrl.evaluation.baselines import chance, oracle
from memrl.evaluation.runner import variation_of
from memrl.evaluation.tasks import choose_lengths, length_units, make_tasks
from memrl.miniature.start import build_model
from memrl.model import save_model
from memrl.prompts import load_prompts
from memrl.scoring.scores import score_response
from memrl.tokenizer import Tokenizer
from memrl.training.miniature_report import GeneratedTasks
from memrl.types import Sample
from tests.test_ruler import make_essay, tokenizer  # noqa: F401 (fixture)

AGENT = AgentConfig(load_prompts("miniature"), 25, 6, 8, 4)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """An untrained miniature that knows the bench's words; its window has 1,024 tokens."""
    tokenizer = Tokenizer(build_tokenizer())  # noqa: F811
    folder = tmp_path_factory.mktemp("models") / "miniature"
    save_model(build_model(tokenizer.vocab_size, 0), folder, tokenizer, finish=lambda new: save_agent(AGENT, new))
    return folder


def test_every_method_reads_the_bench_with_a_miniature_of_a_small_window(miniature, tmp_path):
    words = ["eval", "--model", miniature, "--task", "bench", "--methods", "memory,one_shot,retrieval,oracle,chance"]
    words += ["--lengths", "2,42", "--samples", "1", "--retrieval_tokens", "100", "--passage_tokens", "25", "--max_rows", "64"]
    assert main([*map(str, words), "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = list(map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()))
    assert Counter((row["task"], row["method"], row["length"]) for row in rows) == {
        (task, method, length): 1 for task in NAMES for method in words[6].split(",") for length in (2, 42)
    }
    assert not [row for row in rows if row["error"]]
    by_method = {name: [row for row in rows if row["method"] == name] for name in words[6].split(",")}
    assert all(row["strict"] == 1 and row["chunks"] == row["prompt_tokens"] == 0 for row in by_method["oracle"])
    assert sum(row["strict"] for row in by_method["chance"]) <= 2  # of 10, of which 2 are counts
    assert all(row["chunks"] == row["length"] and row["tokens"] == 25 * row["length"] for row in by_method["memory"])
    assert all((row["cut_tokens"] > 0) == (row["length"] == 42) for row in by_method["one_shot"])
    assert all(row["prompt_tokens"] < 1024 for row in by_method["one_shot"] + by_method["retrieval"])
    assert {tuple(row["variation"]) for row in rows if row["task"] == "bench_two_hop"} == {("order", "gap", "needed")}
    assert all(set(row["variation"]) == {"needed"} for row in rows if row["task"] != "bench_two_hop")


def test_the_tokenizer_chooses_the_language(tokenizer, tmp_path):  # noqa: F811
    closed = make_tasks(["bench"], Tokenizer(build_tokenizer()), AGENT)
    assert [task.name for task in closed] == list(NAMES)
    assert choose_lengths(closed, None) == {name: [4, 16, 64] for name in NAMES}
    open_ = make_tasks(["bench"], tokenizer, AGENT)
    assert [task.name for task in open_] == list(ENGLISH)
    assert [task.name for task in make_tasks(["bench_update", "bench_listing_english"], tokenizer, AGENT)] == [
        "bench_update_english",
        "bench_listing_english",
    ]
    for task in (*closed, *open_):
        assert length_units()[task.name] == task.length_unit
        length = 3 if task.length_unit == "chunks" else 2000
        task.check([length], 0)
        samples = [task.sample(length, index, 0) for index in range(6)]
        assert samples[1] == task.sample(length, 1, 0) != task.sample(length, 1, 1)
        assert all(sample.metadata["task"] == task.name for sample in samples)
        variations = [json.dumps(variation_of(sample)) for sample in samples]
        assert len(set(variations)) > 1 or "distractors" in task.name
    with pytest.raises(ValueError, match="only the words of the task needle"):
        make_tasks(["bench_update"], Tokenizer(needle.build_tokenizer()), AGENT)
    (tmp_path / "essay.txt").write_text(make_essay(400))
    (other,) = make_tasks(["bench_update"], tokenizer, AGENT, RulerFiles(essays=str(tmp_path)))
    assert other.version != open_[1].version and len({task.version for task in closed}) == 1


def test_documents_of_the_miniature_fill_the_agents_chunks():
    tokenizer = Tokenizer(build_tokenizer())  # noqa: F811
    (task,) = make_tasks(["bench_two_hop"], tokenizer, AgentConfig(AGENT.prompts, 50, 6, 8, 4))
    sample = task.sample(7, 4, 0)
    assert len(tokenizer.encode(sample.context)) == task.num_tokens(7) == 350
    places = [len(sample.context[: round(depth * len(sample.context))].split()) // 50 for depth in sample.metadata["depths"]]
    assert places == sample.metadata["evidence_chunks"] and places[1] - places[0] == sample.metadata["variation"]["gap"] == 2


def test_only_the_bench_has_a_variation_in_its_rows():
    assert variation_of(needle.make_sample(2, 0)) == {}
    assert variation_of(Sample("x", "q", "c", metadata={"variation": "mine"})) == {}
    found = variation_of(Sample("x", "q", "c", metadata={"variation": {"gap": 3, "order": [1], "other": 2}}))
    assert found == {"variation": {"gap": 3}}


def test_oracle_and_chance_know_no_other_questions():
    sample = make_tasks(["bench_counting"], Tokenizer(build_tokenizer()), AGENT)[0].sample(4, 0, 0)
    assert score_response(oracle(sample).response, sample.answers, sample.match)["strict"] == 1 and oracle(sample).turns == []
    assert chance(sample) == chance(sample)
    assert chance(sample).response.startswith(f"\\boxed{{{sample.question.split()[1]} ")
    for baseline in (oracle, chance):
        with pytest.raises(ValueError, match="no question of the bench"):
            baseline(Sample("x", "who is it?", "nobody"))


def test_the_report_of_a_run_reads_the_tasks_of_the_run():
    task = GeneratedTasks(["bench_update", "needle"], 25)
    assert [task.sample(2, index, 0).metadata.get("task") for index in range(4)] == ["bench_update", None] * 2
    assert task.sample(2, 0, 0) != task.sample(2, 0, 1) and task.num_tokens(2) == 50
