"""Run an agent through a `LocalLLM` whose responses come from a function of the prompt's text."""

from collections.abc import Callable

from memrl.llm import Decoding, LocalLLM
from memrl.types import Trajectory, Turn
from tests.test_agent import ScriptedSampler

IN_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class InOrder(ScriptedSampler):
    """Completes the earliest request first; `ScriptedSampler` the latest."""

    def step(self):
        self.waiting.reverse()
        done = super().step()
        self.waiting.reverse()
        return done


def run_agent(agent, tokenizer, sample, config, respond: Callable[[str], str], sampler_class=ScriptedSampler) -> Trajectory:
    """The trajectory when every prompt is answered by `respond(its text without the chat template)`, ended by a stop token."""

    def ids(request) -> list[int]:
        return [*tokenizer.encode(respond(unwrap(tokenizer, request.prompt_ids))), tokenizer.hf.eos_token_id]

    llm = LocalLLM(sampler_class(ids), tokenizer, Decoding())
    return llm.run([agent(llm.session(0), sample, config)])[0]


def unwrap(tokenizer, prompt_ids: list[int]) -> str:
    text = tokenizer.hf.decode(prompt_ids, skip_special_tokens=False)
    head, tail = IN_CHAT.split("{}")
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : len(text) - len(tail)]


def prompts_of(tokenizer, trajectory: Trajectory) -> list[str]:
    return [unwrap(tokenizer, turn.prompt_ids) for turn in trajectory.turns]


def kinds(trajectory: Trajectory) -> list[str]:
    return [turn.kind for turn in trajectory.turns]


def memories(turns: list[Turn]) -> list[str | None]:
    return [turn.memory for turn in turns]
