"""Say whether an exercise is solved: `python docs/exercises/check.py 3`; without a number, all ten.

Your function and the package's get the same random inputs. They must agree on all of them, so a function that knows the answers
of one example does not pass.
"""

import argparse
import ast
import asyncio
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from memrl.agents import AgentConfig, memory_agent
from memrl.kernels.elementwise import apply_rope
from memrl.kernels.logprob import token_logprobs
from memrl.model import PackedContext
from memrl.prompts import Prompts
from memrl.rl.advantage import group_advantages
from memrl.rl.aggregation import token_weights
from memrl.rl.loss import LossOptions, clipped_surrogate, k3, policy_loss
from memrl.rl.packing import MicroBatch, TrainTurn, pack_turns
from memrl.types import Sample, Turn

TRIALS = 20
END = 1


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        file, function: what the student repairs.
        inputs: random arguments.
        expected: the package's result for the same arguments.
        hint: one line, shown when they differ.
        gradient: compare the gradient of the result's sum by the first argument too.
    """

    file: str
    function: str
    inputs: Callable[[random.Random], tuple]
    expected: Callable[..., Any]
    hint: str
    gradient: bool = False


def as_micro_batch(prompt: list[int], response: list[int]) -> MicroBatch:
    turn = Turn("memory", prompt, response, [0.0] * len(response), "stop")
    return pack_turns([TrainTurn(turn, advantage=0.0)], max_tokens=turn.num_tokens)[0]


def draw_words(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(2, 30) for _ in range(rng.randint(least, most))]


def draw_response(rng: random.Random) -> list[int]:
    return draw_words(rng, 1, 6) + [END] * rng.randrange(2)


# The random inputs of each exercise, and the package's result for them.


def rewards_of_groups(rng: random.Random) -> tuple[Tensor, Tensor]:
    group_ids = [group for group in range(rng.randint(2, 5)) for _ in range(4)]
    rng.shuffle(group_ids)
    return torch.tensor([float(rng.randrange(3)) for _ in group_ids]), torch.tensor(group_ids)


def logits_and_ids(rng: random.Random) -> tuple[Tensor, Tensor, int]:
    prompt, response = draw_words(rng, 1, 6), draw_response(rng)
    ids = torch.tensor(prompt + response)
    return torch.randn(len(ids), 30), ids, len(prompt)


def package_logprobs(logits: Tensor, ids: Tensor, prompt_len: int) -> Tensor:
    batch = as_micro_batch(ids[:prompt_len].tolist(), ids[prompt_len:].tolist())
    return token_logprobs(logits[batch.select], torch.eye(logits.shape[1]), batch.targets)[0]


def losses_of_turns(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    prompt_lens = torch.tensor([rng.randint(1, 6) for _ in range(5)])
    lens = prompt_lens + torch.tensor([rng.randint(1, 6) for _ in range(5)])
    return torch.randn(5, int(lens.max())), prompt_lens, lens


def package_mean(losses: Tensor, prompt_lens: Tensor, lens: Tensor) -> Tensor:
    pairs = zip(losses, prompt_lens.tolist(), lens.tolist(), strict=True)
    return package_step_loss([row[prompt_len:length] for row, prompt_len, length in pairs])


def package_step_loss(turn_losses: list[Tensor]) -> Tensor:
    turn_lens, zeros = torch.tensor([len(losses) for losses in turn_losses]), torch.zeros(len(turn_losses), dtype=torch.int64)
    weights, count = token_weights("token_mean", turn_lens, zeros, zeros)
    return (torch.cat(turn_losses) * weights.repeat_interleave(turn_lens)).sum().float() / count


def ratios(rng: random.Random) -> tuple[Tensor, Tensor, float, float]:
    return torch.randn(50).exp(), torch.randn(50), rng.choice([0.1, 0.2]), rng.choice([0.28, 0.4])


def package_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return clipped_surrogate(ratio, advantages, LossOptions(clip_low=clip_low, clip_high=clip_high, dual_clip=None))[0]


def a_document(rng: random.Random) -> tuple:
    memory_tokens, salt = rng.randint(1, 4), rng.randrange(1000)

    def generate(prompt) -> list[int]:
        return draw_words(random.Random(f"{salt} {prompt}"), 1, 8)  # the same response to the same prompt

    return draw_words(rng, 1, 3), draw_words(rng, 1, 30), [5], generate, rng.randint(2, 7), memory_tokens


def package_read(question, document, nothing, generate, chunk_tokens, memory_tokens) -> list[tuple]:
    """What `memory_agent` shows to a model that answers as `generate`, word by word up to its cap."""
    prompts = []

    class Listener:
        def encode(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

        def render(self, text: str, **slots: list[int]) -> list[int]:
            prompts.append((slots["question"], slots["memory"], slots.get("section")))
            return [0]

        def content_ids(self, turn: Turn) -> list[int]:
            return turn.response_ids

        async def chat(self, prompt: list[int], *, kind: str, max_new_tokens: int, **_: Any) -> Turn:
            return Turn(kind, prompt, generate(prompts[-1])[:max_new_tokens], [], "length")

        def remember(self, turn: Turn, memory_ids: list[int]) -> list[int]:
            return memory_ids

    listener: Any = Listener()
    texts = Prompts(memory="{question} {memory} {section}", answer="{question} {memory}", no_memory=listener.decode(nothing))
    sample = Sample("exercise", listener.decode(question), listener.decode(document))
    config = AgentConfig(texts, chunk_tokens=chunk_tokens, memory_tokens=memory_tokens, answer_tokens=1, question_tokens=9)
    asyncio.run(memory_agent(listener, sample, config))
    return prompts


def a_turn(rng: random.Random) -> tuple[list[int], list[int], int]:
    return draw_words(rng, 1, 6), draw_response(rng), END


def package_row(prompt: list[int], response: list[int], end_id: int) -> tuple[list[int], list[int], list[int]]:
    batch = as_micro_batch(prompt, response)
    return batch.ids.tolist(), batch.select.tolist(), batch.targets.tolist()


def words_of_a_policy(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, int, float]:
    return torch.randn(8), torch.randint(0, 8, (12,)), torch.randn(12), rng.randint(2, 6), 3.0


def package_update(logits: Tensor, words: Tensor, advantages: Tensor, passes: int, learning_rate: float) -> Tensor:
    options, weights = LossOptions(clip_high=0.28, dual_clip=None), torch.full((len(words),), 1 / len(words))
    old_logprobs = torch.log_softmax(logits, dim=-1)[words]
    for _ in range(passes):
        logits = logits.clone().requires_grad_()
        logprobs = torch.log_softmax(logits, dim=-1)[words]
        loss, _ = policy_loss(logprobs, old_logprobs, advantages, options, weights=weights)
        logits = (logits - learning_rate * torch.autograd.grad(loss, logits)[0]).detach()
    return logits


def a_head(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    prompt_len = rng.randint(1, 6)
    q, k, v = torch.randn(3, prompt_len + rng.randint(1, 5), 8)
    return q, k, v, prompt_len, torch.tensor([1.0, 0.3, 0.1, 0.03])


def package_attention(q: Tensor, k: Tensor, v: Tensor, prompt_len: int, speeds: Tensor) -> Tensor:
    angles = torch.arange(len(q))[:, None] * torch.cat((speeds, speeds))
    rotated = (apply_rope(x[:, None], angles.cos(), angles.sin()) for x in (q, k))
    return PackedContext([len(q)]).attend(0, *rotated, v[:, None])[prompt_len:, 0]


def logprob_pairs(rng: random.Random) -> tuple[Tensor, Tensor]:
    return -torch.rand(20) * 3, -torch.rand(20) * 3


def turns_of_losses(rng: random.Random) -> tuple[list[Tensor]]:
    return ([torch.randn(rng.randint(1, 9)) for _ in range(4)],)


EXERCISES = {
    1: Exercise("ex01_baseline", "advantages", rewards_of_groups, group_advantages, "Which readings does each mean stand for?"),
    2: Exercise(
        "ex02_shift", "response_logprobs", logits_and_ids, package_logprobs, "Which row of logits has not seen the token yet?"
    ),
    3: Exercise("ex03_mask", "mean_loss", losses_of_turns, package_mean, "Who wrote the tokens that are counted?"),
    4: Exercise("ex04_clip", "clipped_loss", ratios, package_clip, "How far may the ratio rise, and how far may it fall?", True),
    5: Exercise("ex05_kl", "kl_penalty", logprob_pairs, k3, "Compare d with its definition, for a word that p likes more.", True),
    6: Exercise(
        "ex06_mean",
        "step_loss",
        turns_of_losses,
        package_step_loss,
        "What does one token of a long turn weigh, and of a short one?",
    ),
    7: Exercise(
        "ex07_memory", "read", a_document, package_read, "The model stops when its tokens are used up. Which tokens exist then?"
    ),
    8: Exercise("ex08_stop", "training_row", a_turn, package_row, "From what does the model learn when to stop?"),
    9: Exercise("ex09_old", "update", words_of_a_policy, package_update, "Which policy drew the words of the second pass?"),
    10: Exercise(
        "ex10_cache", "decode", a_head, package_attention, "A prompt of 1 token has position 0. What has the next token?"
    ),
}


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """The function of this name; ValueError if the file imports the package: the exercise would be done by it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    if any(module.split(".")[0] in ("memrl", "kernels", "solutions", "importlib") for module in imported):
        raise ValueError(f"{path.name} imports the package or the solutions; write the function with torch alone")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path.name} has no function {name}; keep its name")
    return getattr(module, name)


def results(function: Callable[..., Any], arguments: tuple, gradient: bool) -> Any:
    """What the function returns; with `gradient`, also the gradient of its sum by the first argument."""
    if not gradient:
        return function(*arguments)
    first = arguments[0].clone().requires_grad_()
    result = function(first, *arguments[1:])
    if not result.requires_grad:  # a constant
        return result, torch.zeros_like(first)
    return result.detach(), torch.autograd.grad(result.sum(), first)[0]


def find_fault(exercise: Exercise, function: Callable[..., Any]) -> str | None:
    """The first difference between the function and the package, in one line; None if there is none."""
    for trial in range(TRIALS):
        torch.manual_seed(trial)
        arguments = exercise.inputs(random.Random(trial))
        expected = results(exercise.expected, arguments, exercise.gradient)
        try:
            result = results(function, arguments, exercise.gradient)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        except AssertionError:
            return f"the result is not the package's for random input {trial + 1} of {TRIALS}. Hint: {exercise.hint}"
        except Exception as error:
            return f"{exercise.function} raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def check(number: int, path: Path | None = None) -> str | None:
    """What is wrong with the solution of an exercise, in one line; None if it is solved."""
    exercise = EXERCISES[number]
    path = path or FOLDER / f"{exercise.file}.py"
    try:
        function = load_function(path, exercise.function)
    except Exception as error:
        return str(error).splitlines()[0]
    return find_fault(exercise, function)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Say whether an exercise is solved.")
    parser.add_argument("number", type=int, nargs="?", choices=EXERCISES, help="1 to 10; all of them if left out")
    number = parser.parse_args(arguments).number
    is_solved = True
    for each in [number] if number else EXERCISES:
        fault = check(each)
        is_solved &= fault is None
        print(f"exercise {each}: {'solved' if fault is None else f'not solved: {fault}'}")
    return 0 if is_solved else 1


if __name__ == "__main__":
    sys.exit(main())
