# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
One of the two processes of test_distributed.py: runs every check and writes what each of them measured.

Usage: two_process_worker.py RANK RENDEZVOUS_FILE. Each line of its input is a JSON object with `folders`, those of
models by name, and the names of the `checks` or null for all; for each it prints one with the results.
"""

import copy
import gc
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import depthmix
from depthmix.kernels.depth_dispatch import INTERPRETED
from depthmix.modeling import lean_loss


# lets this script import what lies in the folder of all tests
sys.path.append(str(Path(__file__).parents[1]))

from faster_interpreter import do_repeated_work_once


WORLD_SIZE = 2
CHECKPOINTING = {"plain": None, "non_reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def device() -> str:
    """Of this process's tensors: `benchmarks.distributed` runs the same checks over NCCL."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def load(folder: str, **kwargs):
    if AutoConfig.from_pretrained(folder).depth_backbone.has_experts:
        # the default has no fp64
        kwargs["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs).to(device()).train()
    if kwargs.get("dtype") is torch.float64:
        # Kimi Linear keeps some of a layer in fp32, and FSDP2 takes a layer of one dtype only
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def own_part(ids):
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def enable_checkpointing(model, mode):
    if CHECKPOINTING[mode] is None:
        return
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(CHECKPOINTING[mode])
    else:
        model.gradient_checkpointing_enable(CHECKPOINTING[mode])


def shard(model, **kwargs):
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradient_error(model, plain, ids, parts: int = 1) -> float:
    """
    Largest error of a parameter's gradient, relative to its norm, or to that of the largest where nearly everything
    cancels; the plain model has seen the whole batch.
    """
    plain.zero_grad()
    plain_loss(plain, ids, parts).backward()
    gradients = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert gradients.keys() == expected.keys()
    # as in a mixer that has nothing to mix
    norms = {name: gradient.norm() for name, gradient in expected.items()}
    norms = {name: norm.clamp(min=1e-3 * max(norms.values())) for name, norm in norms.items()}
    return max(((gradients[name] - expected[name]).norm() / norms[name]).item() for name in expected)


def plain_loss(plain, ids, parts: int):
    """Of one process with the whole batch; with an auxiliary loss of experts, which is that of each part, in parts."""
    if not getattr(plain.config, "output_router_logits", False):
        return loss_of(plain, ids)
    return sum(loss_of(plain, part) for part in ids.chunk(parts)) / parts


def loss_error(loss, plain, ids, parts: int) -> float:
    """The mean of all processes' losses beside the loss of one process."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    with torch.no_grad():
        return (mean - plain_loss(plain, ids, parts)).abs().item()


def errors(model, plain, ids, part, parts: int, steps: int = 1) -> dict[str, float]:
    """Of loss and gradients: the model sees this process's part of the rows, of which there are so many in all."""
    for _ in range(steps):
        model.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
    return {"loss": loss_error(loss, plain, ids, parts), "gradients": gradient_error(model, plain, ids, parts)}


def ddp(folder, ids, mode, **options):
    plain = load(folder, **{"dtype": torch.float64} | options)
    model = copy.deepcopy(plain)
    enable_checkpointing(model, mode)
    # a parameter without a gradient stops the second step
    return errors(DistributedDataParallel(model), plain, ids, own_part(ids), dist.get_world_size(), steps=3)


def fsdp(folder, ids, mode, **options):
    plain = load(folder, **{"dtype": torch.float64} | options)
    model = copy.deepcopy(plain)
    enable_checkpointing(model, mode)
    return errors(shard(model), plain, ids, own_part(ids), dist.get_world_size())


def kernels(folder, ids):
    """Interpreted, and so in fp32, and slow."""
    return fsdp(folder, ids[:, :7], "non_reentrant", dtype=torch.float32, depth_impl="triton")


def fsdp_checkpointing_enabled_after_sharding(folder, ids):
    plain = load(folder, dtype=torch.float64)
    model = shard(copy.deepcopy(plain))
    enable_checkpointing(model, "reentrant")
    loss_of(model, own_part(ids)).backward()
    return gradient_error(model, plain, ids)


def fsdp_bf16(folder, ids):
    """The loss beside that of the plain bf16 model, and in which dtype sources reach the last layer."""
    model = shard(
        load(folder, dtype=torch.float32),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    arrived = []
    model.model.layers[-1].register_forward_pre_hook(lambda _, args: arrived.extend(args[1:]))
    loss = loss_of(model, own_part(ids))
    loss.backward()
    plain = load(folder, dtype=torch.bfloat16)
    # the policy rounds mixing parameters too, which a bf16 model keeps in fp32
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    expected = loss_of(plain, own_part(ids))
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return {
        "without_gradient": [name for name, gradient in gradients.items() if not gradient.any()],
        "loss_error": (loss - expected).abs().item(),
        "sources": len(arrived),
        "bf16_sources": sum(tensor.dtype is torch.bfloat16 for tensor in arrived),
    }


def fsdp_full_state_dict(folder, ids):
    """A step, then the whole state in a plain model: its logits beside those of the sharded one."""
    model = shard(load(folder, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, own_part(ids)).backward()
    optimizer.step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    states = [state]
    dist.broadcast_object_list(states)
    plain = load(folder, dtype=torch.float64)
    before = plain(ids).logits
    plain.load_state_dict(states[0])
    with torch.no_grad():
        logits = plain(ids).logits
        return {
            "moved": (logits - before).abs().max().item(),
            "error": (logits - model(ids).logits).abs().max().item(),
        }


def local_size(model) -> int:
    """How many elements of the first key projection this process holds."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    return (weight.to_local() if hasattr(weight, "to_local") else weight).numel()


def tensor_parallel(folder, ids):
    plain = load(folder, dtype=torch.float64)
    model = load(folder, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=dist.get_world_size()))
    with torch.no_grad():
        logits_error = (model(ids).logits - plain(ids).logits).abs().max().item()
    held = local_size(model) / local_size(plain)
    return errors(model, plain, ids, ids, 1) | {"logits": logits_error, "held": held}


def two_dimensions(folder, ids):
    """Tensor parallelism of pairs of neighbours, and FSDP2 over the pairs, each of which has rows of its own."""
    plain = load(folder, dtype=torch.float64)
    pairs = dist.get_world_size() // 2
    model = load(folder, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2, fsdp_size=pairs))
    return errors(model, plain, ids, ids.chunk(pairs)[dist.get_rank() // 2], pairs)


def native_fsdp(folder, ids):
    """The sharding by the plan of the host library, and a save of what it sharded."""
    plain = load(folder, dtype=torch.float64)
    model = load(folder, dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=WORLD_SIZE))
    loss_of(model, own_part(ids)).backward()
    saved = f"{folder}-native-fsdp"
    model.save_pretrained(saved)
    dist.barrier()
    return {
        "gradients": gradient_error(model, plain, ids),
        "held": local_size(model) / local_size(plain),
        "saved": (load(saved)(ids).logits - plain(ids).logits).abs().max().item(),
    }


def lean_loss_of_parts(folder, ids):
    """Gradients of the loss without logits, in several pieces, beside those from all logits of the whole model."""
    lean_loss.ROWS, lean_loss.CALLED_ROWS = 7, 5
    plain, results = load(folder, dtype=torch.float64), {}

    def measure(model, part, wrap=lambda model: model):
        depthmix.apply_liger_kernel(model)
        wrapped = wrap(model)
        output = wrapped(input_ids=part, labels=part)
        assert output.logits is None
        output.loss.backward()
        return gradient_error(wrapped, plain, ids)

    results["ddp"] = measure(copy.deepcopy(plain), own_part(ids), DistributedDataParallel)
    results["fsdp"] = measure(copy.deepcopy(plain), own_part(ids), shard)
    for name, part in (("fsdp_size", own_part(ids)), ("tp_size", ids)):
        model = load(folder, dtype=torch.float64, distributed_config=DistributedConfig(**{name: WORLD_SIZE}))
        results[name] = measure(model, part)
    return results


def pipeline(folder, ids):
    try:
        load(folder, distributed_config=DistributedConfig(pp_size=WORLD_SIZE))
    except ValueError as error:
        return str(error)


def main():
    rank, rendezvous = sys.argv[1:]
    # what libraries print must not come between the results
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    # what is loaded stays; looking for garbage in it takes long
    gc.freeze()
    do_repeated_work_once()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=WORLD_SIZE)
    for line in sys.stdin:
        print(json.dumps(results_of(**json.loads(line))), file=answers)
    dist.destroy_process_group()


def results_of(folders: dict[str, str], checks: list[str] | None) -> dict:
    wanted = checks
    vocab_size = load(next(iter(folders.values()))).config.vocab_size
    ids = torch.randint(3, vocab_size, (4, 12), generator=torch.Generator().manual_seed(1))

    checks = {}
    for name, folder in folders.items():
        for mode in CHECKPOINTING:
            checks[f"ddp {name} {mode}"] = (ddp, folder, ids, mode)
            checks[f"fsdp {name} {mode}"] = (fsdp, folder, ids, mode)
        for check in (
            fsdp_checkpointing_enabled_after_sharding,
            fsdp_bf16,
            fsdp_full_state_dict,
            tensor_parallel,
            native_fsdp,
            lean_loss_of_parts,
            pipeline,
        ):
            checks[f"{check.__name__} {name}"] = (check, folder, ids)
        if INTERPRETED:
            checks[f"kernels {name}"] = (kernels, folder, ids)

    results = {}
    for name, (check, *arguments) in checks.items():
        if wanted is not None and check.__name__ not in wanted:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                results[name] = check(*arguments)
            except Exception:
                results[name] = traceback.format_exc()
        results.setdefault("warnings", []).extend(f"{name}: {warning.message}" for warning in caught)
    dist.barrier()
    return results


if __name__ == "__main__":
    main()
