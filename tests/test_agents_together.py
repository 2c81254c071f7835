"""What holds for every agent that reads: seeds, a real model, an endpoint, caps, prompt files, configs, the longest turn."""

from pathlib import Path

import pytest

from memrl.agents import AgentConfig, gated, map_reduce, passes, recall
from memrl.agents.agent_file import load_agent, save_agent
from memrl.agents.agent_function import load_agent_function, make_config
from memrl.agents.limits import longest_turn
from memrl.commands.train import parse
from memrl.config import validate
from memrl.endpoint import RemoteLLM
from memrl.evaluation.methods import MethodOptions, make_methods
from memrl.llm import Decoding, LocalLLM
from memrl.model import Transformer
from memrl.prompts import PromptTemplate, load_prompts
from memrl.sampler import Sampler
from memrl.training.inputs import build_agent
from memrl.types import Sample
from tests.agent_script import InOrder, kinds
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.test_agent import ScriptedSampler
from tests.tiny_folder import make_tokenizer

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
WORDS = (
    "question memory section update answer check evidence merge recall keep stop code nothing none emma simon bear owl red . the"
)
AGENTS = {
    "gated": (gated, gated.gated_agent, {"tags": False}),
    "passes": (passes, passes.passes_agent, {"tags": False, "max_passes": 2, "between": "."}),
    "recall": (recall, recall.recall_agent, {"tags": False}),
    "map_reduce": (map_reduce, map_reduce.map_reduce_agent, {"between": "."}),
}
DOCUMENT = "code emma bear . the owl . code simon owl . the bear . red ."  # 16 words


def caps_of(name: str, cap: int) -> dict[str, int]:
    """A cap for each kind of turn that the agent caps itself."""
    return dict.fromkeys(load_agent_function(name).caps, cap)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(WORDS.split())


@pytest.fixture(params=AGENTS)
def name(request):
    return request.param


def config_of(name: str, chunk_tokens: int = 4) -> AgentConfig:
    _, _, options = AGENTS[name]
    limits = {"chunk_tokens": chunk_tokens, "memory_tokens": 6, "answer_tokens": 3, "question_tokens": 3}
    return make_config(f"miniature_{name}", function=name, caps=caps_of(name, 5), options=options, **limits)


def ids_of(turns) -> list:
    return [(turn.kind, turn.prompt_ids, turn.response_ids, turn.memory) for turn in turns]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_reading_does_not_depend_on_the_order_of_completion(tokenizer, name, seed):
    _, agent, _ = AGENTS[name]
    vocabulary = tokenizer.encode(WORDS)

    def respond(request) -> list[int]:
        number = request.params.seed
        length = number % 3 + 1
        return [*(vocabulary[(number >> 8 * i) % len(vocabulary)] for i in range(length)), tokenizer.hf.eos_token_id]

    readings = []
    for sampler in (ScriptedSampler, InOrder):
        llm = LocalLLM(sampler(respond), tokenizer, Decoding())
        samples = [Sample(f"s{i}", "code emma", DOCUMENT) for i in range(3)]
        readings.append(llm.run([agent(llm.session(seed, i), sample, config_of(name)) for i, sample in enumerate(samples)]))
    first, second = readings
    assert [ids_of(one.turns) for one in first] == [ids_of(other.turns) for other in second]
    assert ids_of(first[0].turns) != ids_of(first[1].turns)  # the sessions have seeds of their own


def test_a_reading_by_a_real_model_is_reproducible_and_keeps_to_its_caps(tokenizer, name, tiny_words_model):
    _, agent, _ = AGENTS[name]
    config = config_of(name)
    readings = []
    for _ in range(2):
        sampler = Sampler(tiny_words_model, max_rows=3)
        llm = LocalLLM(sampler, tokenizer, Decoding())
        readings.append(llm.run([agent(llm.session(3, i), Sample("s", "code emma", DOCUMENT), config) for i in range(2)]))
    assert [ids_of(one.turns) for one in readings[0]] == [ids_of(other.turns) for other in readings[1]]
    for trajectory in readings[0]:
        assert trajectory.response == trajectory.turns[-1].text and trajectory.turns[-1].kind == "answer"
        caps = {"memory": 6, "merge": 6, "map": 6, "reduce": 6, "check": 5, "answer": 3}
        assert all(1 <= len(turn.response_ids) <= caps[turn.kind] for turn in trajectory.turns)
        assert len(trajectory.turns) >= 2


def test_the_same_function_reads_through_an_endpoint(tokenizer, name):
    _, agent, _ = AGENTS[name]

    def answer(body: dict) -> Reply:
        text = body["messages"][-1]["content"]
        last = text.split()[-1]
        words = {"answer": "red", "merge": "emma bear"}
        return Reply(words.get(last, "emma bear" if "code emma" in text.split("section")[-1] else "none"), seconds=0.02)

    with FakeEndpoint(answer) as server:
        llm = RemoteLLM(server.url, "fake", tokenizer, Decoding(), first_wait=0.01)
        [trajectory] = llm.run([agent(llm.session(0), Sample("s", "code emma", DOCUMENT), config_of(name))])
    assert trajectory.response == "red"
    expected = {
        "gated": ["memory"] * 4,
        "recall": ["memory"] * 4,
        "passes": [*["check"] * 4, "merge"] * 2,
        "map_reduce": ["map"] * 4,
    }
    assert kinds(trajectory) == [*expected[name], "answer"]
    assert (server.most_at_once > 1) == (name in ("passes", "map_reduce"))


def test_the_prompt_files_have_the_agents_texts_and_slots(tokenizer, name):
    module, _, _ = AGENTS[name]
    for file in (name, f"miniature_{name}"):
        prompts = load_prompts(file, module.PROMPTS)
        for text_name, slots in module.PROMPTS.items():
            text = prompts.text(text_name)
            assert text and set(PromptTemplate(text, tokenizer, None, slots).slots) == slots, (file, text_name)


def test_the_miniatures_prompts_use_few_words(tokenizer, name):
    texts = load_agent_function(name).texts
    prompts = load_prompts(f"miniature_{name}", texts)
    for text_name, slots in texts.items():
        pieces = PromptTemplate(prompts.text(text_name), tokenizer, None, slots).pieces
        assert tokenizer.hf.unk_token_id not in [token for piece in pieces for token in piece], text_name


@pytest.fixture(scope="module")
def tiny_words_model(tokenizer) -> Transformer:
    from memrl.model import TransformerConfig
    from memrl.model.loader import from_scratch

    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1,
        head_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    return from_scratch(config, 0)


@pytest.mark.parametrize("cap", [3, 40], ids=["small_caps", "large_caps"])
def test_no_turn_is_longer_than_the_agent_says_and_one_is_as_long(tokenizer, name, cap):
    # Every response fills its cap, so prompts are as long as they can be.
    _, agent, _ = AGENTS[name]
    limits = {"chunk_tokens": 4, "memory_tokens": cap, "answer_tokens": cap, "question_tokens": 2}
    config = make_config(f"miniature_{name}", function=name, caps=caps_of(name, cap), options=AGENTS[name][2], **limits)
    llm = LocalLLM(ScriptedSampler(lambda request: tokenizer.encode("emma " * cap)), tokenizer, Decoding())
    [trajectory] = llm.run([agent(llm.session(0), Sample("s", "code emma", DOCUMENT), config)])
    longest = max(turn.num_tokens for turn in trajectory.turns)
    bound = longest_turn(tokenizer, config)
    assert bound is not None and longest <= bound
    if name != "recall":  # whose query fills no slot here
        assert bound - longest <= 2, "the bound counts one token more for the text between two notes"


@pytest.mark.parametrize("base", ["tiny.yaml", "memagent_7b.yaml"])
def test_the_config_goes_over_those_of_the_miniature_and_of_7b(name, base):
    path = CONFIGS / "agents" / f"{name}.yaml"
    assert path.read_text().startswith("# ")
    settings = parse(["--config", str(CONFIGS / base), "--config", str(path), "--run_dir", "x"])
    validate(settings)
    agent = build_agent(settings.agent)
    assert agent.function == name and isinstance(agent.options, AGENTS[name][0].Options)


def test_an_evaluation_takes_the_agents_own_prompt_file_if_the_models_prompts_lack_its_texts(name):
    memory = make_config("question_first")
    method = make_methods(["memory", name], MethodOptions(), memory, 30_000)[name]
    assert method.agent.prompts == load_prompts(name, load_agent_function(name).texts)
    own = make_config(f"miniature_{name}", function=name)
    assert make_methods([name], MethodOptions(), own, 30_000)[name].agent == own


def test_the_agents_settings_come_back_from_a_model_folder(tmp_path, name):
    config = config_of(name)
    save_agent(config, tmp_path)
    assert load_agent(tmp_path) == config
