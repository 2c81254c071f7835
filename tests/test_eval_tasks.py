"""Evaluation tasks: made by name, their lengths and units, documents of the requested length."""

import json

import pytest

from memrl.agents import AgentConfig
from memrl.data.needle import build_tokenizer, fact, make_sample
from memrl.data.ruler import TASKS, RulerFiles
from memrl.evaluation.tasks import GeneratedTask, choose_lengths, make_tasks, parse_lengths
from memrl.prompts import load_prompts
from memrl.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def agent():
    return AgentConfig(load_prompts("question_first"), chunk_tokens=25)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(build_tokenizer())


class Fixed:
    """A generator that records its calls."""

    version, num_questions, answer_tokens = "7", 5, 32

    def __init__(self):
        self.asked = []

    def sample(self, length, index, seed):
        self.asked.append((length, index, seed))
        if length < 4:
            raise ValueError("length 3 is too short")
        return make_sample(1, index)


def test_lengths():
    assert parse_lengths("16, 1,4") == [1, 4, 16]
    assert parse_lengths("8k,1M,100") == [100, 8192, 1048576]
    for bad in ("", "1,", "0", "-4", "4,4", "8k,8192", "1.5", "x", "1e3", "4 8", "k"):
        with pytest.raises(ValueError, match="lengths"):
            parse_lengths(bad)


def test_needle_documents_have_the_requested_length(agent, tokenizer, request):
    (task,) = make_tasks(["needle"], tokenizer, agent)
    for length in (1, 7, 512):
        sample = task.sample(length, 0, 0)
        assert len(tokenizer.encode(sample.context)) == task.num_tokens(length) == 25 * length
        assert sample == make_sample(length, int(sample.id.split("-")[-1]))
        assert sample == task.sample(length, 0, 0) != task.sample(length, 1, 0)

    tokenizer = load_tokenizer(request.getfixturevalue("shared_data") / "tokenizer" / "qwen2.5-instruct")
    (task,) = make_tasks(["needle"], tokenizer, AgentConfig(agent.prompts, chunk_tokens=1000))
    for length in (1, 4, 16):
        for index in range(5):
            num_tokens = len(tokenizer.encode(task.sample(length, index, 0).context))
            assert -(-num_tokens // 1000) == length


def test_needle_depth_is_where_the_needle_begins():
    for seed in range(50):
        sample = make_sample(1 + seed % 9, seed)
        (depth,) = sample.metadata["depths"]
        name, *values = sample.answers[0].split()
        begin = round(depth * len(sample.context))
        assert sample.context[begin:].startswith(fact(name, " ".join(values)))
        assert int(len(sample.context[:begin].split()) // 25) == sample.metadata["needle_chunk"]


def test_needle_version_depends_on_the_chunk_size(agent, tokenizer):
    versions = {make_tasks(["needle"], tokenizer, AgentConfig(agent.prompts, size))[0].version for size in (25, 50)}
    assert len(versions) == 2


def test_ruler_is_all_of_its_tasks_with_a_tokenizer_of_their_own(agent, tokenizer, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("memrl.data.ruler.make_ruler", lambda *arguments: made.append(arguments) or Fixed())
    files = RulerFiles(essays=str(tmp_path))
    tasks = make_tasks(["needle", "ruler"], tokenizer, agent, files)
    assert [task.name for task in tasks] == ["needle", *TASKS] and len(TASKS) == 13
    assert all(given is files for _, _, given in made)
    # The tasks run in another thread, and a tokenizer is not thread-safe.
    assert {id(used) for _, used, _ in made} == {id(made[0][1])} != {id(tokenizer)}
    assert made[0][1].encode("code irene") == tokenizer.encode("code irene")
    assert (tasks[1].is_slow, tasks[0].is_slow, tasks[1].length_unit) == (True, False, "tokens")


def test_generated_task_calls_its_generator_and_has_as_many_documents_as_questions():
    generator = Fixed()
    task = GeneratedTask("qa_1", generator, "tokens", (8192,), 2**20)
    assert (task.version, task.num_tokens(8192)) == ("7", 8192)
    assert (task.count(8192, None), task.count(8192, 3), task.count(8192, 100)) == (5, 3, 5)
    generator.num_questions = None
    assert (task.count(8192, None), task.count(8192, 1000)) == (128, 1000)
    assert task.sample(16, 2, 9) == make_sample(1, 2) and generator.asked == [(16, 2, 9)]


def test_documents_that_cannot_be_made_are_found_before_anything_is_loaded():
    generator = Fixed()
    task = GeneratedTask("vt", generator, "tokens", (8,), 2**20)
    task.check([8, 16, 2**19], 1)
    assert generator.asked == [(8, 0, 1)]  # the long ones would take a while
    with pytest.raises(ValueError, match="length 3 is too short"):
        task.check([16, 3], 1)
    GeneratedTask("ruler_hotpotqa", generator, "documents", (8,), 2**20).check([800, 50, 6400], 1)
    assert generator.asked[-2:] == [(50, 0, 1), (6400, 0, 1)]


def test_lengths_apply_to_every_task_with_the_same_unit(tokenizer, agent, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "q", "context": "c", "answers": ["a"]}) + "\n")
    needle, mine = make_tasks(["needle", str(path)], tokenizer, agent)
    ruler, hotpotqa = (
        GeneratedTask(name, Fixed(), unit, (50, 60), 1000) for name, unit in (("vt", "tokens"), ("ruler_hotpotqa", "documents"))
    )
    everything = {"needle": [1, 4, 16], "mine": ["file"], "vt": [50, 60], "ruler_hotpotqa": [50, 60]}
    assert choose_lengths([needle, mine, ruler, hotpotqa], None) == everything
    assert choose_lengths([needle, mine], [2, 3]) == {"needle": [2, 3], "mine": ["file"]}
    with pytest.raises(ValueError, match="chunks of needle, tokens of vt at once; run the tasks by separate commands"):
        choose_lengths([needle, ruler], [50])
    with pytest.raises(ValueError, match="leave --lengths out"):
        choose_lengths([mine], [50])
    with pytest.raises(ValueError, match="at most 1000 tokens"):
        choose_lengths([ruler], [50, 1001])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_are_read_as_they_are(tokenizer, agent, tmp_path, suffix):
    from memrl.data import write_samples

    path = tmp_path / f"mine{suffix}"
    samples = [make_sample(2, seed) for seed in range(3)]
    write_samples(path, lambda index: samples[index], 3, {"made": "for a test"}, "test")
    (task,) = make_tasks([str(path)], tokenizer, agent)
    assert (task.name, task.default_lengths, task.count("file", None), task.count("file", 2)) == ("mine", ("file",), 3, 2)
    for index in range(3):
        read = task.sample("file", index, 0)
        assert (read.context, read.question, read.answers) == (
            samples[index].context,
            samples[index].question,
            samples[index].answers,
        )
        assert read.metadata["depths"] == samples[index].metadata["depths"]
    assert 0 < task.num_tokens("file") < len(samples[0].context)


def test_mistakes_name_the_known_tasks(tokenizer, agent, tmp_path):
    for names, message in (
        (["niah"], "there is no task 'niah'; give the path .* niah_single_1.* ruler_hotpotqa"),
        ([str(tmp_path / "none.parquet")], "there is no such file"),
        (["needle", "needle"], "two tasks named 'needle'"),
        (["vt", "ruler"], "two tasks|needs|essays"),
    ):
        with pytest.raises(ValueError, match=message):
            make_tasks(names, tokenizer, agent)
