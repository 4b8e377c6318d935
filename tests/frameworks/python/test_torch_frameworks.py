"""Runs the programs of docs/FRAMEWORKS.md as printed, and compares them with training without compression."""

import os
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import in_turn, on_ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
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
    """Trains one model with all ranks' batches. `together`: number of passes in a step."""
    model, world = Model(), dist.get_world_size()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), [batches(rank) for rank in range(world)]
    for step in range(0, len(own[0]), together):
        of_step = [one for its in own for one in its[step : step + together]]
        for images, labels in of_step:
            (mse_loss(model(images), labels) / len(of_step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Optimizer:
    """SGD of the parameters that the model has at the first step: fully_shard() replaces them."""

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
        "loss": mse_loss, "DistributedDataParallel": DistributedDataParallel, "device": "cpu",
        "fully_shard": fully_shard, "FSDPModule": FSDPModule, "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "init_device_mesh": init_device_mesh, "ranks": dist.get_world_size(), "replicas": 2,
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **names,
    }  # fmt: skip
    exec(SECTIONS[section], given)
    return model, given


def is_near(model, compression, together, most=0.01):
    """Checks that the codec's rounding is small, but not zero, in comparison with the changes by training."""
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
    is_near(model, names["compression"], 1, 0.02)  # a part's mean is encoded again, and so is the mean of the replicas


def is_mean_and_sent_once(train):
    """Checks that train(passes), which returns a model and its Compression, trains as without compression, with one
    exchange a step. The bytes sent when the training begins do not depend on the number of passes."""
    sent = {}
    for passes in 1, 2, 4:
        model, compression = train(passes)
        is_near(model, compression, passes)
        sent[8 // passes] = compression.bytes_sent
    assert sent[8] - sent[4] == 2 * (sent[4] - sent[2]) > 0, sent


class OfThisRank(torch.utils.data.IterableDataset):
    """Data set with this rank's batches, unchanged."""

    def __init__(self, *names):
        self._names = names

    def __iter__(self):
        for pair in batches(dist.get_rank()):
            yield dict(zip(self._names, pair)) if self._names else pair


def as_a_launcher_says():
    own = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(number) for name, number in own.items()}, MASTER_ADDR="localhost", MASTER_PORT="0")


def accelerate(passes):
    from accelerate import Accelerator

    accelerator, model = Accelerator(gradient_accumulation_steps=passes, cpu=True), Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, names = run("Accelerate", accelerator=accelerator, model=model, optimizer=optimizer)
    return model, names["compression"]


def transformers(passes):
    from transformers import Trainer, TrainingArguments

    class WithLoss(Model):
        def forward(self, images, labels):
            return {"loss": mse_loss(super().forward(images), labels)}

    class Plain(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(OfThisRank("images", "labels"), batch_size=None)

    model = WithLoss()
    arguments = TrainingArguments(
        "checkpoints", use_cpu=True, gradient_accumulation_steps=passes, max_steps=8 // passes, max_grad_norm=0,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)
    trainer = Plain(model, arguments, train_dataset=OfThisRank(), optimizers=(optimizer, constant))
    run("Trainer of Hugging Face", trainer=trainer)
    (compression,) = (own.compression for own in trainer.callback_handler.callbacks if hasattr(own, "compression"))
    return model, compression


def lightning(passes):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, number):
            return mse_loss(self.model(batch[0]), batch[1])

        def train_dataloader(self):
            return torch.utils.data.DataLoader(OfThisRank(), batch_size=None)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", accumulate_grad_batches=passes, max_epochs=1,
        plugins=[LightningEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    run("Lightning", trainer=trainer, module=module)
    return module.model, trainer.callbacks[-1].compression


def one_exchange_a_step(train, folder):
    os.chdir(folder)  # Trainer makes a folder for checkpoints
    as_a_launcher_says()
    is_mean_and_sent_once(train)


def test_programs(tmp_path):
    on_ranks(("gloo", "cpu", 2), in_turn, tmp_path, distributed_data_parallel, fsdp2)


def test_replicas(tmp_path):
    on_ranks(("gloo", "cpu", 4), in_turn, tmp_path, replicas)


@pytest.mark.parametrize(
    "package, train", [("accelerate", accelerate), ("transformers", transformers), ("lightning", lightning)]
)
def test_a_trainer_that_accumulates_passes_has_one_exchange_a_step(tmp_path, package, train):
    pytest.importorskip(package)
    on_ranks(("gloo", "cpu", 2), one_exchange_a_step, tmp_path, train, tmp_path)


def test_each_program_is_run():
    assert len(SECTIONS) == len(re.findall("(?m)^## ", (ROOT / "docs" / "FRAMEWORKS.md").read_text())) == 7
