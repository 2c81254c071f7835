r"""The turn reward `memory_gain`: how much more probable a memory makes the gold answer than the memory before it.

    L(m) = 1/|y| sum over j of ln p(y_j | answer prompt with the question and m, "\boxed{", y_<j)
    r_t  = L(m_t) - L(m_{t-1}), m_0 the text of an empty memory

y are the tokens of the gold answer and of the brace that closes the box, and p is the policy that sampled. The rewards of a
trajectory add up to L(m_K) - L(m_0), InfoMem's reward of the last memory (arXiv 2606.03329); IGPO (arXiv 2510.14967) takes
such differences turn by turn. A memory is encoded from its text, so it may be cut into other tokens than those that were sampled.
"""

from collections.abc import Sequence

import torch

from memrl.engine import distributed
from memrl.kernels.attention import AttentionBackend
from memrl.model import PackedContext, Transformer
from memrl.prompts import Prompts, PromptTemplate
from memrl.rl.packing import TrainTurn, fill_batches, pack
from memrl.tokenizer import Tokenizer
from memrl.types import Group, Sample, Trajectory, Turn


class MemoryGain:
    """Adds the reward to turns, by forward passes of this rank's replica over this rank's groups; no rank waits for another."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompts: Prompts,
        temperature: float,
        max_tokens: int,
        attention: AttentionBackend | None = None,
    ):
        """
        Args:
            temperature: of the rollouts.
            max_tokens: of one forward pass.

        Raises:
            ValueError: the prompt file has no answer prompt.
        """
        if not prompts.answer:
            raise ValueError(
                "reward.turns memory_gain asks for the answer, but the file of agent.prompts has no `answer`; give it one"
            )
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.max_tokens, self.attention = max_tokens, attention
        self.no_memory = prompts.no_memory
        self.template = PromptTemplate(prompts.answer, tokenizer, prompts.system)

    def add_to(self, groups: Sequence[Group]) -> None:
        """Add r_t to the reward of every turn that says what the memory is after it.

        The first memory is compared with no memory. The value of equal memories of a group is computed once, so their gains are
        equal to the last bit. Trajectories without a reward get nothing, nor do samples without gold answers.
        """
        values = self._values(groups)
        for number, group in enumerate(groups):
            for trajectory in rewarded(group):
                before = values[number, self.no_memory]
                for turn in trajectory.turns:
                    if turn.memory is not None:
                        after = values[number, turn.memory]
                        turn.reward += after - before
                        before = after

    def _values(self, groups: Sequence[Group]) -> dict[tuple[int, str], float]:
        """L(m) by the group's place in `groups` and the memory."""
        items = {
            (number, memory): self._items(group.sample, memory)
            for number, group in enumerate(groups)
            for trajectory in rewarded(group)
            for memory in [self.no_memory, *(turn.memory for turn in trajectory.turns if turn.memory is not None)]
        }
        means = iter(self.mean_logprobs([item for members in items.values() for item in members]))
        # Any of the gold answers is right alone, so the most probable one counts.
        return {key: max(next(means) for _ in members) for key, members in items.items()}

    def _items(self, sample: Sample, memory: str) -> list[TrainTurn]:
        """One prompt and answer for each way to be right."""
        encode = self.tokenizer.encode
        prompt = self.template.render(question=encode(sample.question), memory=encode(memory))
        # Box and answer are tokenised apart, so that the same tokens are scored whatever stands around them.
        prompt += encode("\\boxed{")
        answers = sample.answers if sample.match == "any" else [self._listing(sample.answers)]
        return [TrainTurn(Turn("gold", prompt, encode(answer) + encode("}"), [], "stop"), 0.0) for answer in answers]

    def _listing(self, answers: Sequence[str]) -> str:
        """All answers, separated as the verifier reads them; a closed vocabulary may have no comma."""
        has_comma = self.tokenizer.decode(self.tokenizer.encode(",")).strip() == ","
        return (", " if has_comma else " ").join(answers)

    @torch.no_grad()
    def mean_logprobs(self, items: Sequence[TrainTurn]) -> list[float]:
        """Mean log-probability of each item's response tokens, in nats."""
        means: dict[int, float] = {}
        device = distributed.device()
        for members in fill_batches(items, self.max_tokens):
            batch = pack(members).to(device)
            context = PackedContext(batch.seq_lens, device, self.attention)
            logprobs, _ = self.model(batch.ids, context, batch.select, batch.targets, self.temperature)
            parts = logprobs.cpu().split([len(item.turn.response_ids) for item in members])
            means |= {id(item): part.mean().item() for item, part in zip(members, parts, strict=True)}
        return [means[id(item)] for item in items]


def rewarded(group: Group) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if group.sample.answers and not trajectory.left_out]
