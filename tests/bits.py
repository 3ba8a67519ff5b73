"""What training steps of a case leave, bit for bit: losses, gradients, buffers and the state of the generator."""

import torch


def loss_of(case, *, bf16=False):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        return case.loss_of(case.model, case.batch)


def record_of(case, losses):
    record = {f"gradient of {name}": parameter.grad for name, parameter in case.model.named_parameters()}
    record |= {f"buffer {name}": buffer for name, buffer in case.model.named_buffers()}
    record |= {"losses": torch.stack([loss.detach() for loss in losses]), "rng": torch.get_rng_state()}
    return {name: tensor.clone() for name, tensor in record.items()}


def train_step(case, *, bf16=False, micro_batches=1):
    torch.manual_seed(7)
    losses = []
    for _ in range(micro_batches):
        losses.append(loss_of(case, bf16=bf16))
        losses[-1].backward()
    return record_of(case, losses)


def different(record, expected):
    """The names of what differs."""
    assert record.keys() == expected.keys()
    return [name for name in expected if not torch.equal(record[name], expected[name])]
