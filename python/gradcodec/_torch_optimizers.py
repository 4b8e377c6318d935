"""Optimizers that exchange their momentum between ranks, at one bit per element."""

import datetime
from typing import Any, Callable, Iterable

import torch
import torch.distributed as dist

from ._arguments import _said
from ._torch_eager import eager
from ._torch_groups import (
    Group, Handle, Verdict, check_tensor, check_transport, process_group,
)  # fmt: skip
from ._torch_states import check_optimizer, on_all_ranks

Tensors = list[torch.Tensor]


def _number(name: str, number: Any, least: float, below: float = float("inf")) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name}: a number expected, got {_said(number)}")
    if not least <= number < below:
        raise ValueError(f"{name}: at least {least} and below {below} expected, got {number}")
    return float(number)


class _OneBit(torch.optim.Optimizer):
    """Base of both: averages the sum of a momentum and a gradient over the ranks, at one bit per element."""

    # With this, GradScaler always calls step(), with found_inf and grad_scale as attributes.
    _step_supports_amp_scaling = True
    found_inf: torch.Tensor | None
    grad_scale: torch.Tensor | None

    def __init__(self, params: Any, defaults: dict[str, Any], group: Any, timeout: Any, transport: str) -> None:
        over = process_group(group)
        super().__init__(params, defaults)
        parameters = self._parameters()
        if not parameters:
            raise ValueError("params: one parameter expected at least, got none")
        self._group = Group(over, parameters[0].device, timeout, transport == "gloo", in_turns=True)
        check_transport(transport, self._group)
        self._handle, self._transport, self.taken_back = None, transport, 0
        self._verdict = Verdict(self._group, 1)

    _handle: Handle | None
    _group: Group

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, in all steps."""
        return self._group.bytes_sent

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, like any optimizer, before the first step."""
        if self.state:
            raise RuntimeError("param_group: parameters have to be there before the first step")
        super().add_param_group(param_group)
        parameters, added = self._parameters(), self.param_groups[-1]["params"]
        try:
            for number, one in enumerate(added, len(parameters) - len(added)):
                check_tensor(f"params[{number}]", one)
                if one.device != parameters[0].device:
                    first = parameters[0].device
                    raise ValueError(f"params[{number}]: on {first}, as the first, expected, got {one.device}")
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def _parameters(self) -> Tensors:
        return [one for each in self.param_groups for one in each["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like any optimizer, with the same state on every rank, or else it is refused on all. The errors are not
        in it: they begin with 0, as in a new optimizer."""
        check = lambda: (None, check_optimizer(state_dict, self.param_groups, self.defaults))  # noqa: E731
        on_all_ranks("state", self._group.group, check)
        super().load_state_dict(state_dict)
        saved = [number for each in state_dict["param_groups"] for number in each["params"]]
        for number, one in zip(saved, self._parameters()):
            for name, kept in state_dict["state"].get(number, {}).items():
                if name != "step":  # now in the parameter's dtype, in which small variances are 0
                    self.state[one][name] = kept.detach().to(one.device, torch.float32, copy=True)
        self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} belongs to its process: state_dict() is what can be saved or copied")

    def _gradients(self, parameters: Tensors) -> Tensors:
        """Returns them in float32 and without a loss scale; 0 where there is none, as another rank may have one."""
        found: Tensors = []
        scale = getattr(self, "grad_scale", None)
        for one in parameters:
            if one.grad is None:
                found.append(torch.zeros(one.shape, dtype=torch.float32, device=one.device))
                continue
            check_tensor("gradient", one.grad)
            gradient = one.grad.to(torch.float32, memory_format=torch.contiguous_format)
            found.append(gradient if scale is None else gradient / scale.to(one.device))
        return found

    def _state(self, parameters: Tensors, name: str) -> Tensors:
        """Returns the tensors of a state by name, in float32; creates them as 0."""
        for one in parameters:
            kept = self.state[one]
            if name not in kept:
                kept[name] = torch.zeros(one.shape, dtype=torch.float32, device=one.device)
        return [self.state[one][name] for one in parameters]

    def _sums(self, parameters: Tensors, name: str, of_state: float, of_gradient: float) -> Tensors:
        """Returns of_state * state + of_gradient * gradient; of a group without parameters an empty list."""
        if not parameters:
            return []
        sums = torch._foreach_mul(self._state(parameters, name), of_state)
        torch._foreach_add_(sums, self._gradients(parameters), alpha=of_gradient)
        return list(sums)

    @staticmethod
    def _frozen(one: torch.Tensor) -> bool:
        """Returns whether a parameter stays as it is, without weight decay, too."""
        return one.grad is None and not one.requires_grad

    def _overflowed(self) -> bool:
        """Returns whether a GradScaler has found a gradient that is not finite, on any rank."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        return bool(self._group.over_all(found.detach().to(self._group.device).clone(), dist.ReduceOp.MAX).item())

    def _mean(self, tensors: Tensors) -> Tensors | None:
        """Returns the mean over the ranks, uncompressed; None if it is not finite."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._group.over_all(flat).div_(self._group.size)
        parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(one) for part, one in zip(parts, tensors)] if flat.isfinite().all() else None

    def _mean_of_bits(self, tensors: Tensors) -> bool:
        """Averages at one bit per element, in place; returns whether the result is finite. If not, keeps the errors."""
        if self._handle is None:
            if self._group.nodes is None:
                self._group.take_topology(self._transport, "onebit", direct=False)
            sizes = [tensor.numel() for tensor in tensors]
            self._handle = Handle(self._group, "onebit", sizes, torch.float32, error="float32", transactional=True)
        handle = self._handle
        handle.rollback()  # a step that an exception has left pending
        verdict = self._verdict
        with self._group.turn() as stream:
            handle.run(tensors, stream)
            verdict.ask([handle], stream)
            verdict.carry_out([handle], stream)
        return not verdict.undone.item()

    def _advance(self) -> None:
        raise NotImplementedError

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, on every rank. All ranks leave it out if a gradient is not finite on one: see taken_back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overflowed():
            self.taken_back += 1
        else:
            self._advance()
        return loss


class OneBitSGD(_OneBit):
    """SGD with momentum that exchanges the momentum, at one bit per element with error feedback:

        m = mean over the ranks of (momentum * m + gradient)
        p = p - lr * m - lr * weight_decay * p

    Gradients are those of this rank: in DistributedDataParallel, call backward() within model.no_sync(). Every rank
    calls step(), with the same parameters; one that requires no gradient and has none stays as it is.

    `group`: of torch.distributed; None: the default one. `timeout`: of an exchange, in seconds or as a timedelta; None:
    the group's own. `transport`: as in compress(). `taken_back`: number of steps that were left out, because a gradient
    was not finite on some rank.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.9, *, weight_decay: float = 0.0,
        group: Any = None, timeout: float | datetime.timedelta | None = None, transport: str = "auto",
    ) -> None:  # fmt: skip
        defaults = {
            "lr": _number("lr", lr, 0), "momentum": _number("momentum", momentum, 0, 1),
            "weight_decay": _number("weight_decay", weight_decay, 0),
        }  # fmt: skip
        super().__init__(params, defaults, group, timeout, transport)

    def _advance(self) -> None:
        parameters: list[Tensors] = [each["params"] for each in self.param_groups]
        sent: Tensors = []
        for each, own in zip(self.param_groups, parameters):
            sent += self._sums(own, "momentum_buffer", float(each["momentum"]), 1.0)
        if not self._mean_of_bits(sent):
            self.taken_back += 1
            return
        arrived = iter(sent)
        for each, own in zip(self.param_groups, parameters):
            for one in own:
                momentum, rate = next(arrived), float(each["lr"])
                self.state[one]["momentum_buffer"] = momentum
                if not self._frozen(one):
                    one.mul_(1 - rate * each["weight_decay"]).add_(momentum.to(one.dtype), alpha=-rate)


class OneBitAdam(_OneBit):
    """1-bit Adam (Tang et al., 2021): the momentum is exchanged at one bit per element with error feedback, once the
    variance is constant.

    The first `warmup_steps` steps are AdamW, with gradients that are averaged uncompressed. Then the variance stays as
    in the last of them, without its bias, and

        m = mean over the ranks of (beta1 * m + (1 - beta1) * gradient)
        p = p - lr * clip(m / (root of variance + eps), -1, 1) - lr * weight_decay * p

    without a correction of bias. An element whose variance is 0 by then does not change. AdamW's variance grows with
    the gradient, so its steps seldom exceed lr. Here the variance is constant, and the elements of a tensor arrive with
    one magnitude for the part of each rank. Without the clip an element with a tiny variance would take a huge step,
    and all elements would when gradients grow. Gradients and step() are those of OneBitSGD.

    `warmup_steps`: at least 1, one number for all parameter groups. `group`, `timeout`, `transport`, `taken_back`: as in
    OneBitSGD.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, warmup_steps: int = 1000, group: Any = None,
        timeout: float | datetime.timedelta | None = None, transport: str = "auto",
    ) -> None:  # fmt: skip
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int):
            raise TypeError(f"warmup_steps: a whole number expected, got {_said(warmup_steps)}")
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps: at least 1 expected, got {warmup_steps}; without one the variance is 0")
        try:
            first, second = betas
        except (TypeError, ValueError):
            raise TypeError(f"betas: a pair of numbers expected, got {_said(betas)}") from None
        defaults = {
            "lr": _number("lr", lr, 0), "betas": (_number("betas[0]", first, 0, 1), _number("betas[1]", second, 0, 1)),
            "eps": _number("eps", eps, 0), "weight_decay": _number("weight_decay", weight_decay, 0),
            "warmup_steps": warmup_steps,
        }  # fmt: skip
        super().__init__(params, defaults, group, timeout, transport)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, like any optimizer, before the first step, with the same `warmup_steps`."""
        expected = (self.param_groups or [self.defaults])[0]["warmup_steps"]
        steps = param_group.get("warmup_steps", self.defaults["warmup_steps"])
        if steps != expected:
            raise ValueError(f"warmup_steps: {expected}, as for all groups, expected, got {_said(steps)}")
        super().add_param_group(param_group)

    def _advance(self) -> None:
        first = self._parameters()[0]
        step = int(self.state[first]["step"]) + 1 if "step" in self.state[first] else 1
        warm = step > int(self.param_groups[0]["warmup_steps"])
        if not (self._compressed() if warm else self._uncompressed(step)):
            self.taken_back += 1
            return
        for each in self.param_groups:
            for one in each["params"]:
                self.state[one]["step"] = torch.tensor(float(step), dtype=torch.float32)  # bfloat16 counts to 256

    def _uncompressed(self, step: int) -> bool:
        gradients = self._mean([one for each in self.param_groups for one in self._gradients(each["params"])])
        if gradients is None:
            return False
        arrived = iter(gradients)
        for each in self.param_groups:
            (beta1, beta2), parameters = each["betas"], each["params"]
            momenta, variances = self._state(parameters, "exp_avg"), self._state(parameters, "exp_avg_sq")
            for one, momentum, variance in zip(parameters, momenta, variances):
                gradient = next(arrived)
                momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                unbiased = variance / (1 - beta2**step)
                update = momentum / (1 - beta1**step) / unbiased.sqrt().add_(each["eps"])
                if not self._frozen(one):
                    one.mul_(1 - each["lr"] * each["weight_decay"]).add_(update.to(one.dtype), alpha=-each["lr"])
                if step == int(self.param_groups[0]["warmup_steps"]):
                    variance.copy_(unbiased)  # constant from now on
        return True

    def _compressed(self) -> bool:
        sent: Tensors = []
        for each in self.param_groups:
            beta1 = float(each["betas"][0])
            sent += self._sums(each["params"], "exp_avg", beta1, 1 - beta1)
        if not self._mean_of_bits(sent):
            return False
        arrived = iter(sent)
        for each in self.param_groups:
            for one, variance in zip(each["params"], self._state(each["params"], "exp_avg_sq")):
                momentum = next(arrived)
                self.state[one]["exp_avg"] = momentum
                if self._frozen(one):
                    continue
                step = (momentum / variance.sqrt().add_(each["eps"])).clamp_(-1, 1)
                step += each["weight_decay"] * one
                one.add_(torch.where(variance > 0, step, 0).to(one.dtype), alpha=-each["lr"])
        return True
