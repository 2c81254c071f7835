"""The files that a run reads besides its settings: model, prompts, questions and reward; checks and fingerprints of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from memrl.agents import AgentConfig, load_agent_function, make_config
from memrl.agents.agent_config import encode_question
from memrl.agents.limits import check_agent
from memrl.config import AgentOptions, DataOptions, TrainConfig
from memrl.data import Samples, load_samples
from memrl.data.training_source import FileSource, NeedleSource, Source
from memrl.model.hf_config import longest_text, read_config, yarn_for
from memrl.tokenizer import TOKENIZER_FILES, Tokenizer
from memrl.types import Sample
from memrl.utils.checksums import hash_files
from memrl.utils.files import fingerprint
from memrl.utils.user_file import imported_files

WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json")


def build_agent(options: AgentOptions) -> AgentConfig:
    return make_config(**asdict(options))


def check_window(model: str | Path, sizes: Mapping[str, int], agent: AgentConfig) -> None:
    """Raise ValueError if a turn can be longer than the window of the model in this folder."""

    def stretch(tokens: int) -> str:
        factor = yarn_for(model, tokens)
        return "" if factor is None else f'rope_scaling {{"rope_type": "yarn", "factor": {factor:g}}} in its config.json'

    check_agent(longest_text(read_config(model)), sizes, agent, stretch)


def make_source(data: DataOptions, prompts_per_step: int, seed: int) -> Source:
    """The questions to train on: a file's, or generated ones for the miniature."""
    if data.path is None:
        return NeedleSource(data, seed)
    return FileSource(data.path, prompts_per_step, data.shuffle, seed, data.allow_files)


def check_questions(path: str | None, samples: Sequence[Sample], tokenizer: Tokenizer, agent: AgentConfig) -> None:
    """Check the lengths of all questions before the run, because a question that is too long would end it later.

    Args:
        path: of the file that the samples come from, for the message.

    Raises:
        ValueError: a question is empty or longer than agent.question_tokens; names the file and the sample.
    """
    if isinstance(samples, Samples):  # a file: its documents need not be read
        questions = zip(samples.ids, samples.questions, strict=True)
    else:
        questions = ((sample.id, sample.question) for sample in samples)
    for sample_id, question in questions:
        try:
            encode_question(tokenizer.encode, question, agent)
        except ValueError as error:
            raise ValueError(f"{path}: sample {sample_id}: {error}") from error


def run_inputs(agent: AgentConfig, config: TrainConfig) -> dict[str, str]:
    """Fingerprints of all that the run reads, by name; a run is resumed only with the same ones.

    Files are read whole (0.6 s per GB and thread): another file of the same size is another run. Raises ValueError if the data
    cannot be read.
    """
    prompts = asdict(agent.prompts)
    if not prompts["texts"]:
        del prompts["texts"]  # runs from before there were such texts stay the same
    inputs = {"prompts": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()[:16]}
    if (file := load_agent_function(agent.function).file) is not None:
        inputs["agent"] = fingerprint([file])
        inputs["agent_modules"] = hash_files(imported_files(file))
    if config.model.path is not None:
        model = Path(config.model.path)
        inputs["weights"] = hash_files(_files(model, WEIGHTS))
        inputs["tokenizer"] = hash_files(_files(model, (*TOKENIZER_FILES, "generation_config.json")))
    if config.data.path is not None:
        inputs["data"] = fingerprint([config.data.path])
        inputs["documents"] = hash_files(load_samples(config.data.path, config.data.allow_files).paths)
    if config.reward.function is not None:
        file = Path(config.reward.function.rpartition(":")[0])
        inputs["reward"] = fingerprint([file])
        inputs["reward_modules"] = hash_files(imported_files(file))
    return inputs


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
