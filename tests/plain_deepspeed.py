"""What `memrl.engine` needs of DeepSpeed, for one rank, in plain PyTorch, with a record of what reached it."""

import contextlib
from pathlib import Path

import torch
from torch import nn


class PlainDeepSpeed:
    """Takes the place of the module `deepspeed`: each `initialize` makes a PlainEngine, kept in `engines`."""

    def __init__(self):
        self.engines: list[PlainEngine] = []
        self.zero = self

    @staticmethod
    def GatheredParameters(parameters, modifier_rank=None, enabled=True):
        return contextlib.nullcontext()

    def initialize(self, *, model, optimizer, lr_scheduler, config):
        self.engines.append(PlainEngine(model, optimizer, lr_scheduler, config))
        return self.engines[-1], optimizer, None, lr_scheduler


class PlainEngine:
    """Sums gradients until the boundary, clips as `gradient_clipping` says, and steps.

    Attributes:
        settings, start: the optimizer's settings, and the parameters, before the first step.
        forwards: the tokens of each forward pass with gradient, and the name of its attention.
        rates: the learning rate that each optimizer step had.
    """

    def __init__(self, model: nn.Module, optimizer, lr_scheduler, config: dict):
        self.module, self.optimizer, self.lr_scheduler, self.config = model, optimizer, lr_scheduler, config
        self.settings = {name: value for name, value in optimizer.defaults.items() if value is not None}
        self.start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.forwards: list[tuple[int, str]] = []
        self.rates: list[float] = []
        self.global_steps = self.skipped_steps = 0
        self.checkpoint_engine = self
        self._norm, self._is_last = torch.tensor(0.0), True

    def __call__(self, ids, context, *arguments):
        if torch.is_grad_enabled():
            self.forwards.append((len(ids), context.attention.name))
        return self.module(ids, context, *arguments)

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self._is_last = is_last

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        assert not scale_wrt_gas
        loss.backward()

    def step(self) -> None:
        assert self._is_last, "the step came before the last micro-batch"
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._norm = nn.utils.clip_grad_norm_(parameters, self.config["gradient_clipping"])
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.global_steps += 1

    def get_global_grad_norm(self) -> torch.Tensor:
        return self._norm

    def save_checkpoint(self, folder: str, tag: str, **_: object) -> None:
        path = Path(folder) / tag / "state.pt"
        path.parent.mkdir(parents=True)
        parts = {"module": self.module, "optimizer": self.optimizer, "schedule": self.lr_scheduler}
        self.checkpoint_engine.save({name: part.state_dict() for name, part in parts.items()}, str(path))

    def save(self, state, path: str) -> None:
        torch.save(state, path)

    def load_checkpoint(self, folder: str, tag: str, **_: object):
        path = Path(folder) / tag / "state.pt"
        state = torch.load(path)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["schedule"])
        return str(path), {}

    def destroy(self) -> None:
        pass
