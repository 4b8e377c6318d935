"""The programs of docs/FRAMEWORKS.md, as printed, beside the same training without compression."""

import contextlib
import pathlib
import re
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import in_turn, on_ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradcodec.torch import Compression  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
SECTIONS = dict(re.findall(r"(?ms)^## (.*?)\n.*?^```python\n(.*?)^```", (ROOT / "docs" / "FRAMEWORKS.md").read_text()))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.silu(layer(x.to(layer.weight.dtype)))
        return x.float()


def batches(rank, steps=8):
    torch.manual_seed(1 + rank)
    return [(torch.randn(16, 64), torch.randn(16, 64)) for _ in range(steps)]


def trained_plainly(together):
    """All ranks' batches by one model; `together`: of how many passes a step is."""
    model, world = Model(), dist.get_world_size()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), [batches(rank) for rank in range(world)]
    for step in range(0, len(own[0]), together):
        of_step = [one for its in own for one in its[step : step + together]]
        for images, labels in of_step:
            (torch.nn.functional.mse_loss(model(images), labels) / len(of_step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Optimizer:
    """SGD, of the parameters that the model has at the first step: after fully_shard() they are others."""

    def __init__(self, model):
        self._model, self._optimizer = model, None

    def step(self):
        self._optimizer = self._optimizer or torch.optim.SGD(self._model.parameters(), 0.1)
        self._optimizer.step()

    def zero_grad(self):
        self._model.zero_grad()


def run(section, **names):
    model = Model()
    given = {
        "torch": torch, "model": model, "optimizer": Optimizer(model), "batches": batches(dist.get_rank()),
        "loss": torch.nn.functional.mse_loss, "DistributedDataParallel": DistributedDataParallel, "device": "cpu",
        "fully_shard": fully_shard, "FSDPModule": FSDPModule, "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "init_device_mesh": init_device_mesh, "ranks": dist.get_world_size(), "replicas": 2,
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **names,
    }  # fmt: skip
    exec(SECTIONS[section], given)
    return model, given


def is_near(model, compression, together, most=0.01):
    """Beside what training has changed, the codec's rounding is small, and not nothing."""
    assert isinstance(compression, Compression) and compression.bytes_sent > 0 and compression.taken_back == 0
    others = trained_plainly(together).parameters(), Model().parameters()
    for (name, one), plain, first in zip(model.named_parameters(), *others):
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        lost = (one - plain).norm() / (plain - first).norm()
        assert lost < most and (lost > 0 or one.dim() < 2), (name, float(lost))


def distributed_data_parallel():
    model, names = run("DistributedDataParallel with accumulation")
    is_near(model, names["compression"], 2)


def fsdp2():
    model, names = run("FSDP2, as torchtitan calls it")
    is_near(model, names["compression"], 2, 0.05)  # it computes in bfloat16


def replicas():
    model, names = run("Replicas of a sharded model (HSDP)")
    is_near(model, names["compression"], 1, 0.02)  # a part's mean is encoded, too, and the mean of that


class Accelerator:
    """What the program uses of Accelerate, with two passes in a step."""

    def __init__(self):
        self._passes = 0

    def prepare(self, model, optimizer):
        step, zero_grad = self._last(optimizer.step), self._last(optimizer.zero_grad)
        return DistributedDataParallel(model), types.SimpleNamespace(step=step, zero_grad=zero_grad)

    def _last(self, call):
        return lambda: self._passes % 2 == 0 and call()

    def accumulate(self, model):
        self._passes += 1
        return model.no_sync() if self._passes % 2 else contextlib.nullcontext()

    def backward(self, loss):
        (loss / 2).backward()


def accelerate():
    model, names = run("Accelerate", accelerator=Accelerator())
    is_near(model, names["compression"], 2)


def module_of(name, **content):
    """A module that a program imports, whether or not the package is installed."""
    parts = name.split(".")
    for number in range(len(parts)):
        sys.modules[".".join(parts[: number + 1])] = types.ModuleType(parts[number])
    vars(sys.modules[name]).update(content)


def trained(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for images, labels in batches(dist.get_rank()):
        torch.nn.functional.mse_loss(ddp(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class Trainer:
    """What the program uses of Trainer, which wraps the model before callbacks hear of the beginning."""

    def __init__(self):
        self.model, self.callbacks = Model(), []

    def add_callback(self, callback):
        self.callbacks.append(callback())

    def train(self):
        self.model_wrapped = DistributedDataParallel(self.model)
        for callback in self.callbacks:
            callback.on_train_begin(None, None, None, model=self.model)
        trained(self.model_wrapped)


def trainer_of_hugging_face():
    module_of("transformers", TrainerCallback=object)
    trainer = Trainer()
    run("Trainer of Hugging Face", trainer=trainer)
    is_near(trainer.model, trainer.callbacks[0].compression, 1)


class LightningTrainer:
    def __init__(self):
        self.callbacks, self.strategy = [], types.SimpleNamespace(model=None)

    def fit(self, module):
        self.strategy.model = DistributedDataParallel(module)
        for callback in self.callbacks:
            callback.on_train_start(self, module)
        trained(self.strategy.model)


def lightning():
    module_of("lightning.pytorch.callbacks", Callback=object)
    trainer, module = LightningTrainer(), Model()
    run("Lightning", trainer=trainer, module=module)
    is_near(module, trainer.callbacks[0].compression, 1)


def test_programs(tmp_path):
    on_ranks(
        ("gloo", "cpu", 2), in_turn, tmp_path, distributed_data_parallel, fsdp2, accelerate, trainer_of_hugging_face,
        lightning,
    )  # fmt: skip


def test_replicas(tmp_path):
    on_ranks(("gloo", "cpu", 4), in_turn, tmp_path, replicas)


def test_each_program_is_run():
    assert len(SECTIONS) == len(re.findall("(?m)^## ", (ROOT / "docs" / "FRAMEWORKS.md").read_text())) == 7
