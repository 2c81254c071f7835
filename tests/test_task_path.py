"""Random numbers of chats that an agent awaits at once: they depend on the agent's tasks, not on which chat ends first."""

import asyncio

import pytest

from memrl.llm import Decoding, LocalLLM
from memrl.utils.seeds import row_seed
from memrl.utils.task_pool import TaskPool, task_path
from tests.test_tokenizer import character_tokenizer


class Reordering:
    """A sampler that answers the waiting requests one at a time: the first, or the last."""

    max_rows, cache_tokens = 8, 10_000

    def __init__(self, tokenizer, place):
        self.tokenizer, self.place, self.waiting, self.seeds = tokenizer, place, [], {}

    @property
    def has_work(self):
        return bool(self.waiting)

    def submit(self, request):
        self.waiting.append(request)

    def step(self):
        request = self.waiting.pop(self.place)
        self.seeds[self.tokenizer.decode(request.prompt_ids)] = request.params.seed
        request.append(self.tokenizer.hf.eos_token_id, 0.0, 0.0)
        return [request]

    def abort(self):
        assert not self.waiting


def seeds_of(place):
    tokenizer = character_tokenizer()
    sampler = Reordering(tokenizer, place)
    llm = LocalLLM(sampler, tokenizer, Decoding())

    async def agent():
        session = llm.session(5, 7)

        async def ask(text):
            await session.chat(tokenizer.encode(text), kind="ask", max_new_tokens=2)

        async def branch(name):
            await ask(f"{name} one")
            await asyncio.gather(ask(f"{name} two"), ask(f"{name} three"))

        await ask("first")
        await asyncio.gather(branch("left"), branch("right"))
        await ask("last")

    llm.run([agent(), agent()])
    return sampler.seeds


def test_seeds_do_not_depend_on_which_chat_ends_first():
    first, last = seeds_of(0), seeds_of(-1)
    assert first == last and len(set(first.values())) == len(first) == 8


def test_an_agent_without_tasks_has_the_seeds_of_its_turns_numbers():
    found = seeds_of(0)
    assert found["first"] == row_seed(5, 7, 0) and found["last"] == row_seed(5, 7, 1)
    assert found["left one"] == row_seed(5, 7, -1, 0) and found["right two"] == row_seed(5, 7, -2, -1, 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_pools_own_tasks_are_roots(limit):
    async def paths():
        async def inner():
            return task_path()

        async def outer():
            return [task_path(), *await asyncio.gather(inner(), inner())]

        pool = TaskPool([outer() for _ in range(3)], limit)
        while pool.start():
            await asyncio.sleep(0)
            pool.collect()
        return pool.results()

    assert asyncio.run(paths()) == [[(), (0,), (1,)]] * 3
