"""Open the model under test, a local folder or a model on an endpoint; mistakes are found before the weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memrl.agents.agent_config import AgentConfig
from memrl.agents.limits import check_turn
from memrl.evaluation.methods import LOWER, Method
from memrl.evaluation.options import Options
from memrl.evaluation.tasks import Task
from memrl.reading.open_model import ReaderOptions, decoding, load_settings, model_window, open_llm, stretch
from memrl.utils.plain_text import printable

if TYPE_CHECKING:
    from memrl.llm import LLM
    from memrl.tokenizer import Tokenizer

LONGEST_LABEL = 200  # characters; the longest name of a model on the Hub has 96
_GENERIC = ("model", "best")  # names that `memrl train` gives to every model folder, so the run's name is added


def check_options(options: Options, reader: ReaderOptions) -> None:
    """Raise a ValueError for options that exclude each other."""
    label = options.label
    if label is not None and (not label.strip() or printable(label, LONGEST_LABEL) != label):
        shown = printable(label, 40)
        raise ValueError(f"label is {shown!r}; give one line of at most {LONGEST_LABEL} characters, or leave --label out")
    if options.repeats > 1 and reader.temperature == 0:
        raise ValueError(
            f"repeats is {options.repeats}, but at temperature 0 all readings of a document are the same; give --temperature 1, "
            "or leave --repeats out"
        )
    if options.endpoint is None and options.tokenizer is not None:
        raise ValueError("tokenizer is given without an endpoint; a model folder has its own, so leave --tokenizer out")
    if options.endpoint is not None and options.tokenizer is None:
        raise ValueError("endpoint is given without a tokenizer; give --tokenizer DIR, the served model's Hugging Face folder")
    if options.endpoint is not None and reader.yarn:
        raise ValueError("yarn applies to a model on this machine; start the server with it, and leave --yarn out")


@dataclass(frozen=True)
class ModelUnderTest:
    """A model that is described, but not loaded.

    Attributes:
        name: path of the model folder, or the model's name on the server.
        endpoint: address of the server; None for a local model.
        label: the model's name in rows and tables.
        tokenizer_folder: the model folder, or the folder given for an endpoint.
    """

    name: str
    endpoint: str | None
    label: str
    reader: ReaderOptions
    agent: AgentConfig
    tokenizer: Tokenizer
    tokenizer_folder: Path

    def default_folder(self) -> Path:
        """Folder of the results if none is given."""
        if self.endpoint is not None:
            return Path("eval") / (self.label.replace("/", "-").lstrip(".") or "model")
        model = Path(self.name).resolve()
        return model.parent / "eval" / model.name

    def open_llm(self, methods: Iterable[Method], tasks: Iterable[Task]) -> LLM:
        """Load the weights, or connect to the server.

        Raises:
            ValueError: the model cannot be used, or its window or the cache is too small for a method's turns.
        """
        window = None if self.endpoint is not None else model_window(self.name, self.reader)
        for method in methods:
            method.check_window(self.tokenizer, window, stretch(self.name))
        if self.endpoint is not None:
            from memrl.endpoint import RemoteLLM

            settings, system = decoding(self.reader), self.agent.prompts.system
            remote = RemoteLLM(self.endpoint, self.name, self.tokenizer, settings, system, concurrency=self.reader.max_rows)
            remote.check()
            return remote
        llm = open_llm(self.name, self.tokenizer, self.agent, self.reader)
        # A file's documents may all be short, and tokenising all of them takes a while. One that does not fit fails when it is
        # read, and a command with a larger cache reads it again.
        least = {} if any(task.length_unit for task in tasks) else {"document_tokens": 0, "question_tokens": 0}
        for method in methods:
            if (longest := method.longest_turn(self.tokenizer, **least)) is not None:
                check_turn(llm.sampler, longest, LOWER.get(method.name, LOWER["memory"]))
        return llm


def read_model_settings(options: Options, reader: ReaderOptions) -> ModelUnderTest:
    """Check the options, and read the agent settings and the tokenizer, but not the weights.

    Raises:
        ValueError: no such folder, a mistake in it, a number out of range, or options that exclude each other.
    """
    check_options(options, reader)
    name, endpoint = options.model, options.endpoint
    folder = name if options.tokenizer is None else options.tokenizer
    if endpoint is not None and not Path(folder).is_dir():
        raise ValueError(f"tokenizer {folder}: there is no such folder; give the served model's Hugging Face folder")
    agent, tokenizer = load_settings(folder, reader)
    path = Path(name).resolve()
    local = f"{path.parent.name}/{path.name}" if path.name in _GENERIC else path.name
    label = options.label or (local if endpoint is None else name)
    return ModelUnderTest(name, endpoint, label, reader, agent, tokenizer, Path(folder))
