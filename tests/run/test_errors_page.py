"""The texts of docs/errors.md are what the libraries say, and what it says of these recipes holds."""

import io
import logging
import mmap
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import wandb
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import get_logger

import memsave_recipes as memsave
from memsave_recipes.core.activations.streaming import leave_to_this_rank
from memsave_recipes.core.costs.memory import is_out_of_memory, resident_bytes
from memsave_recipes.core.errors import InputError
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.launch.processes import lost_worker
from memsave_recipes.training.launch.start import check_gradients, fix_buckets, refuse_gradients, unused_weights

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (.+)$", PAGE, re.M)
EXPLAINED = set()


def pattern_of(heading: str) -> str:
    """As the library says it, with any number in the place of each number."""
    return re.sub(r"\d+", r"\\d+", re.escape(heading))


def explains(words: str) -> pytest.MarkDecorator:
    """Give a test the ``text`` of the one heading that has these words."""
    (heading,) = [heading for heading in HEADINGS if words in heading]
    EXPLAINED.add(heading)
    return pytest.mark.parametrize("text", [pattern_of(heading)], ids=[words])


def blocks(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), *deepcopy(more), nn.Sigmoid()) for _ in range(3)))


def gpt2(**settings: object) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
    shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**shape, **settings})).train()


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.arange(12).view(2, 6)
    return model(input_ids=ids, labels=ids).loss


def output_of(model: nn.Module) -> Tensor:
    return model(torch.arange(32.0).view(8, 4) / 32).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def planned(model: nn.Module, batch: object = None) -> ExitStack:
    """``model`` under the plan that recomputes every block."""
    batch = torch.randn(8, 4) if batch is None else batch
    return memsave.apply_plan(model, memsave.make_plan(model, batch, strategy="full"))


def assert_a_plan_changes_no_gradient(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
    baseline, batch = deepcopy(model), {"input_ids": torch.arange(12).view(2, 6)} if loss_of is not output_of else None
    loss_of(baseline).backward()
    with planned(model, batch) as plan:
        loss_of(model).backward()
        assert plan is not None
    expected = gradients(baseline)
    assert expected
    assert gradients(model).keys() == expected.keys()
    assert all(gradient.equal(expected[name]) for name, gradient in gradients(model).items())


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_every_heading_has_a_test() -> None:
    assert len(HEADINGS) >= 20
    assert set(HEADINGS) == EXPLAINED


# Activation checkpointing


class Changing(nn.Module):
    """Applies a ReLU in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.forwards = nn.Linear(4, 4), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(inputs).relu() if self.forwards % 2 else self.linear(inputs)


@explains("A different number of tensors")
def test_a_second_forward_that_does_other_things(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        checkpoint(Changing(), torch.randn(2, 4), use_reentrant=False).sum().backward()
    assert_a_plan_changes_no_gradient(nn.Sequential(Changing(), Changing(), Changing()), output_of)


class Caching(nn.Module):
    """Adds its input to those before, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs)
        return self.linear(torch.cat(self.seen)).sigmoid()


@explains("Recomputed values")
def test_a_cache_that_grows(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        checkpoint(Caching(), torch.randn(2, 4), use_reentrant=False).sum().backward()
    assert_a_plan_changes_no_gradient(gpt2(use_cache=True), loss_of)


@explains("None of the inputs")
def test_inputs_without_gradients(text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        checkpoint(nn.Linear(4, 4), torch.randn(2, 4), use_reentrant=True)
    model = blocks()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_a_plan_changes_no_gradient(model, output_of)


@explains("element 0 of tensors")
def test_nothing_that_trains_is_reached(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        nn.Linear(4, 4).requires_grad_(False)(torch.randn(2, 4)).sum().backward()
    adapted = get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert_a_plan_changes_no_gradient(adapted, loss_of)


@explains("use_reentrant parameter")
def test_no_word_on_use_reentrant(text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        checkpoint(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_a_plan_changes_no_gradient(blocks(), output_of)


def logged_by(action: Callable[[], object]) -> str:
    """What transformers logs, also what it logs only once."""
    log, logger = io.StringIO(), get_logger("transformers")
    type(logger).warning_once.cache_clear()
    logger.addHandler(handler := logging.StreamHandler(log))
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return log.getvalue()


@explains("use_cache=True")
def test_a_cache_in_training(text: str) -> None:
    model = gpt2(use_cache=True)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert re.search(text, logged_by(lambda: loss_of(model)))
    assert "use_cache" not in logged_by(lambda: assert_a_plan_changes_no_gradient(gpt2(use_cache=True), loss_of))


@explains("BatchNorm")
def test_batchnorm_sees_a_batch_twice(text: str) -> None:
    baseline, twice, once = (blocks(nn.BatchNorm1d(4)) for _ in range(3))
    batch = torch.randn(8, 4)
    baseline(batch).sum().backward()
    checkpoint(twice, batch, use_reentrant=False).sum().backward()
    with planned(once, batch):
        once(batch).sum().backward()
    assert [int(model[0][1].num_batches_tracked) for model in (baseline, twice, once)] == [1, 2, 1]
    assert once[0][1].running_mean.equal(baseline[0][1].running_mean)
    assert not twice[0][1].running_mean.equal(baseline[0][1].running_mean)


# The backward


@explains("a second time")
@pytest.mark.parametrize("with_plan", [False, True])
def test_a_loss_that_keeps_the_step_before(text: str, with_plan: bool) -> None:
    model = blocks()
    with ExitStack() as stack:
        if with_plan:
            stack.enter_context(planned(model))
        total = output_of(model)
        total.backward()
        total = total + output_of(model)
        with pytest.raises(RuntimeError, match=text):
            total.backward()


@explains("modified by an inplace operation")
def test_a_step_between_forward_and_backward(text: str) -> None:
    def second_gradient(model: nn.Module, forward: Callable[[], Tensor], *, steps: bool) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        first, second = forward(), forward()
        first.sum().backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()
        second.sum().backward()
        return model[0][0].weight.grad

    batch = torch.randn(8, 4)
    plain, checkpointed, with_plan = (blocks() for _ in range(3))
    expected = second_gradient(plain, lambda: plain(batch), steps=False)
    with pytest.raises(RuntimeError, match=text):
        second_gradient(plain, lambda: plain(batch), steps=True)
    silent = second_gradient(checkpointed, lambda: checkpoint(checkpointed, batch, use_reentrant=False), steps=True)
    with planned(with_plan, batch):
        ours = second_gradient(with_plan, lambda: with_plan(batch), steps=True)
    assert not silent.allclose(expected)
    assert not ours.allclose(expected)


# Several GPUs


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.blocks, inputs, use_reentrant=True)


@explains("mark a variable ready only once")
def test_reentrant_checkpoints_under_ddp(text: str, one_rank: None) -> None:
    model = DistributedDataParallel(Checkpointed(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match=text):
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    inner, baseline = blocks(), blocks()
    with planned(inner):
        model = DistributedDataParallel(inner, find_unused_parameters=True)
        output_of(model).backward()
    output_of(baseline).backward()
    expected = gradients(baseline)
    assert all(gradient.equal(expected[name]) for name, gradient in gradients(inner).items())


@explains("finished reduction")
def test_weights_without_a_gradient_under_ddp(text: str, one_rank: None) -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.unused = nn.Linear(4, 4)

    model = DistributedDataParallel(Unused())
    output_of(model).backward()
    with pytest.raises(RuntimeError, match=text):
        output_of(model)
    model = DistributedDataParallel(Unused())
    fix_buckets(model)
    output_of(model).backward()
    with pytest.raises(InputError, match=r"^2 weights are not used in the loss of a rank \(unused.weight, ...\)"):
        check_gradients(model)
    check_gradients(model.module)  # without DDP they just stay as they are
    bare = Unused()
    unused = unused_weights(bare, lambda: output_of(bare))
    assert list(unused) == ["unused.bias", "unused.weight"]
    refuse_gradients(unused)
    leave_to_this_rank(bare, unused)
    model = DistributedDataParallel(bare)
    fix_buckets(model)
    for _ in range(2):
        output_of(model).backward()
    check_gradients(model)
    with pytest.raises(InputError, match=r"^unused.weight is used in this batch, but was not used in the first one"):
        bare.unused.weight.sum().backward()


@explains("mixed torch.Tensor and DTensor")
def test_a_shard_outside_of_its_forward(text: str, one_rank: None) -> None:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=text):
        F.linear(torch.randn(2, 4), model.weight)


@explains("uniform original parameter dtype")
def test_adapters_of_another_dtype_in_shards(text: str, one_rank: None) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)))
    with pytest.raises(AssertionError, match=text):
        model(torch.randn(2, 4))


@explains("Watchdog")
def test_a_rank_that_does_not_come(text: str) -> None:
    store = distributed.HashStore()
    make = partial(distributed.ProcessGroupGloo, store, size=2, timeout=timedelta(milliseconds=300))
    with ThreadPoolExecutor() as threads:
        come, _ = threads.map(lambda rank: make(rank=rank), range(2))
    assert "Timed out waiting" in PAGE
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        come.allreduce(torch.ones(2)).wait()
    assert_a_library_says(text, "libtorch_cuda.so")


def assert_a_library_says(text: str, name: str) -> None:
    """By its file, if torch is built for CUDA."""
    library = Path(torch.__file__).parent / "lib" / name
    if library.exists():
        with library.open() as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            assert re.search(text.encode(), content)


# Mixed precision


@explains("unscale FP16")
def test_weights_in_half_precision(text: str) -> None:
    scaler, half = torch.amp.GradScaler("cpu"), nn.Linear(4, 4).half()
    scaler.scale(half(torch.randn(2, 4).half()).sum()).backward()
    with pytest.raises(ValueError, match=text):
        scaler.unscale_(torch.optim.SGD(half.parameters()))
    with pytest.raises(InputError, match=r"--dtype float16 loses small updates"):
        RecipeArguments(output_dir="run", dtype="float16")
    assert "--dtype float16` is refused" in PAGE


@explains("No inf checks")
def test_an_optimizer_without_gradients(text: str) -> None:
    scaler, model = torch.amp.GradScaler("cpu"), nn.Linear(4, 4)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match=text):
        scaler.step(torch.optim.SGD(model.parameters()))


@explains("must have the same dtype")
def test_inputs_and_weights_of_two_dtypes(text: str) -> None:
    model = blocks()
    with pytest.raises(RuntimeError, match=text):
        model.bfloat16()(torch.randn(2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert_a_plan_changes_no_gradient(blocks(), output_of)


# Losses and logs


@explains("accumulation")
def test_micro_batches_with_unequal_numbers_of_tokens(text: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    weight = torch.ones((), requires_grad=True)
    losses = [torch.tensor([8.0]), torch.tensor([2.0, 2.0, 2.0])]  # of 1 token and of 3
    mean_of_means = sum((weight * losses).mean() / 2 for losses in losses)
    batch = GlobalBatch(
        **{"accelerator": Accelerator(cpu=True), "step": 0, "epoch": 0, "num_samples": 2, "seed": 0},
        num_valid=torch.tensor(4),
        micro_batches=[{"losses": losses} for losses in losses],
    )
    for micro_batch in batch.forwards(nn.Identity()):
        loss_sum = (weight * micro_batch["losses"]).sum()
        batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
    assert (mean_of_means.item(), batch.loss.item(), weight.grad.item()) == (5.0, 3.5, 3.5)
    assert "3.5" in PAGE


class MeanOfLabelled(nn.Module):
    """Divides the losses of the labelled tokens by their number, as many losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(16, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        losses, counts = -self.scores(input_ids).log_softmax(-1)[..., 0], labels != -100
        return {"loss": (losses * counts).sum() / counts.sum()}


@explains("'grad_norm': 'nan'")
def test_a_batch_without_a_label(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    row = {"input_ids": torch.arange(8), "labels": torch.full((8,), -100)}
    settings = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    model = MeanOfLabelled()
    Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, **settings), train_dataset=[row] * 8).train()
    assert re.search(text, capsys.readouterr().out)
    assert model.scores.weight.isnan().any()


@explains("Tried to log to step")
def test_rows_of_earlier_steps(text: str) -> None:
    core = Path(wandb.__file__).parent / "bin" / "wandb-core"
    with core.open() as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert re.search(text.replace(r"\d+", "%d").encode(), content)


# Memory, workers and files


@explains("CUDA out of memory")
def test_what_fills_a_card(text: str) -> None:
    headline = next(heading for heading in HEADINGS if "CUDA out of memory" in heading)
    assert is_out_of_memory(RuntimeError(headline))
    assert_a_library_says(text.split(r"\d")[0], "libc10_cuda.so")
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loss_of(model).backward()
    optimizer.step()
    weights, tensors = sum(weight.numel() for weight in model.parameters()), len(list(model.parameters()))
    steps = 4 * tensors  # a counter for each
    assert resident_bytes(model, optimizer) == 16 * weights + steps
    assert f"16 bytes a parameter: {16 * 7e9 / 2**30:.0f} GiB for 7 billion" in " ".join(PAGE.split())
    assert f"{4 * 8 * 1024 * 128256 / 2**30:.1f} GiB for 8 x 1,024 x 128,256" in " ".join(PAGE.split())


class Killed(Dataset):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Tensor:
        os.kill(os.getpid(), self.number)
        return torch.zeros(1)


@explains("exited unexpectedly")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_data_worker_without_memory(text: str, number: int) -> None:
    with pytest.raises(RuntimeError, match=f"{text}|is killed by signal") as lost:
        next(iter(DataLoader(Killed(number), num_workers=1)))
    assert "--dataloader_num_workers" in lost_worker(lost.value).words


@explains("<eos>")
def test_end_tokens_that_texts_spell_out(text: str) -> None:
    shape = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 16, "eos_token_id": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    model = BartForSequenceClassification(BartConfig(**shape, **layers))
    with pytest.raises(ValueError, match=text):
        model(input_ids=torch.tensor([[0, 3, 2], [0, 2, 2]]))


@explains("empty parameter list")
def test_nothing_trains(text: str) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match=text):
        torch.optim.AdamW([weight for weight in frozen.parameters() if weight.requires_grad])


@explains("match the size")
def test_the_state_of_another_set_of_weights(text: str) -> None:
    model = blocks()
    whole = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=text):
        torch.optim.AdamW(model[1:].parameters()).load_state_dict(whole.state_dict())


@explains("Weights only")
def test_a_checkpoint_with_random_states_of_numpy(text: str, tmp_path: Path) -> None:
    torch.save({"numpy": np.random.get_state()}, tmp_path / "rng_state.pth")
    with pytest.raises(Exception, match=text):
        torch.load(tmp_path / "rng_state.pth")
