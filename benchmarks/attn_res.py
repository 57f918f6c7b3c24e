# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`python -m benchmarks.attn_res` checks the kernels of Attention Residuals on this machine's GPU and measures them by
themselves, beside those of liger-kernel, fla-core and flash-attn-res where these are installed.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from depthmix.kernels import attn_res, attn_res_phase_1, attn_res_phase_2

from .harness import Measurement, captured, environment, measure, release_memory, write_results


EPS = 1e-6
# tokens, hidden size, sub-layers, sub-layers of a block
STACKS = {"2k": (16384, 2048, 32, 8), "4k": (8192, 4096, 96, 12)}


class Site:
    """The parameters of one site."""

    def __init__(self, hidden_size: int, dtype: torch.dtype):
        self.pseudo_query = (torch.randn(hidden_size, device="cuda") * 0.02).to(dtype).requires_grad_()
        self.norm_weight = torch.ones(hidden_size, device="cuda", dtype=dtype, requires_grad=True)

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.pseudo_query, self.norm_weight


def sub_layer(x: Tensor) -> Tensor:
    """Trivial, so that nearly all time is that of the mixing."""
    return x * 0.5


def plain_residual(x: Tensor, sites: list[Site], block_size: int) -> Tensor:
    for _ in sites[:-1]:
        x = x + sub_layer(x)
    return x


def two_phases(
    x: Tensor,
    sites: list[Site],
    block_size: int,
    *,
    recomputed: bool = True,
    impl: str = "triton",
    sub_layer: Callable[[Tensor], Tensor] = sub_layer,
) -> Tensor:
    """Block Attention Residuals as a model runs them."""
    blocks = [x]
    for first in range(0, len(sites) - 1, block_size):
        block = sites[first : min(first + block_size, len(sites) - 1)]
        # the mix of a single source is that source
        mixed = block[1:] if first == 0 else block
        outputs, log_sum_exps, blocks = attn_res_phase_1(
            *(blocks, [site.pseudo_query for site in mixed], [site.norm_weight for site in mixed]), eps=EPS, impl=impl
        )
        update = sub_layer(x if first == 0 else outputs.pop(0))
        if first != 0:
            log_sum_exps.pop(0)
        partial_sum = None
        for site, output, log_sum_exp in zip(block[1:], outputs, log_sum_exps, strict=True):
            partial_sum, hidden = attn_res_phase_2(
                *(output, log_sum_exp, partial_sum, update, *site.parameters),
                eps=EPS,
                num_sources=len(blocks) + 1,
                sources=blocks if recomputed else None,
                impl=impl,
            )
            update = sub_layer(hidden)
        blocks = [*blocks, update if partial_sum is None else partial_sum + update]
    return attn_res(blocks, *sites[-1].parameters, eps=EPS, impl=impl)


def single_sites(x: Tensor, sites: list[Site], block_size: int, mix: Callable[[list[Tensor], Site], Tensor]) -> Tensor:
    """Every sub-layer mixes all its sources by itself, as the peers' operations do."""
    blocks, partial_sum = [x], None
    for i, site in enumerate(sites[:-1]):
        sources = blocks if partial_sum is None else [*blocks, partial_sum]
        update = sub_layer(mix(sources, site))
        partial_sum = update if partial_sum is None else partial_sum + update
        if (i + 1) % block_size == 0:
            blocks, partial_sum = [*blocks, partial_sum], None
    return mix(blocks if partial_sum is None else [*blocks, partial_sum], sites[-1])


def mix_fla(sources: list[Tensor], site: Site) -> Tensor:
    from fla.ops.attnres import fused_attnres

    return fused_attnres(site.pseudo_query, sources, site.norm_weight, rms_eps=EPS, checkpoint_level=0)


def mix_liger(sources: list[Tensor], site: Site) -> Tensor:
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    return LigerAttnResFunction.apply(torch.stack(sources), *site.parameters, EPS)


def flash_attn_res(x: Tensor, sites: list[Site], block_size: int) -> Tensor:
    """Its two operations in turn; they have no norm weight."""
    from flash_attn_res import phase_1_batched_attention_triton_op as phase_1
    from flash_attn_res import phase_2_online_softmax_merge_triton_op as phase_2

    blocks = [x]
    for first in range(0, len(sites) - 1, block_size):
        block = sites[first : min(first + block_size, len(sites) - 1)]
        outputs, log_sum_exps = phase_1(torch.stack(blocks), torch.stack([site.pseudo_query for site in block]), EPS)
        partial_sum = sub_layer(outputs[0])
        for i, site in enumerate(block[1:], 1):
            mixed = phase_2(partial_sum, site.pseudo_query, outputs[i], log_sum_exps[i], EPS)
            partial_sum = partial_sum + sub_layer(mixed)
        blocks.append(partial_sum)
    return phase_1(torch.stack(blocks), sites[-1].pseudo_query[None], EPS)[0][0]


WAYS = {
    "plain residual": plain_residual,
    "depthmix": two_phases,
    "depthmix, kept": partial(two_phases, recomputed=False),
    "liger-kernel": partial(single_sites, mix=mix_liger),
    "fla-core": partial(single_sites, mix=mix_fla),
    "flash-attn-res": flash_attn_res,
}
# those to be measured
SELECTED = list(WAYS)


def check_function() -> None:
    """
    The gate before any number: outputs and all gradients of the smaller stack on fewer tokens, whose distance from the
    reference in fp64 is at most twice that of the reference in bf16.
    """
    _, hidden_size, sub_layers, block_size = STACKS["2k"]
    torch.manual_seed(0)
    x = torch.randn(1, 257, hidden_size, device="cuda", dtype=torch.bfloat16)
    sites = [Site(hidden_size, x.dtype) for _ in range(sub_layers + 1)]
    grad, results = torch.randn_like(x), {}
    for name, dtype, impl, recomputed in (
        ("exact", torch.float64, "reference", False),
        ("reference", x.dtype, "reference", False),
        ("kept", x.dtype, "triton", False),
        ("recomputed", x.dtype, "triton", True),
    ):
        leaves = [x, *itertools.chain(*(site.parameters for site in sites))]
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in leaves]
        copies = [copy.copy(site) for site in sites]
        for site, i in zip(copies, range(1, len(leaves), 2), strict=True):
            site.pseudo_query, site.norm_weight = leaves[i : i + 2]
        # of sources in one direction, the weights would not depend on the query
        options = {"impl": impl, "recomputed": recomputed, "sub_layer": lambda x: 0.5 * x.roll(1, -1)}
        output = two_phases(leaves[0], copies, block_size, **options)
        grads = torch.autograd.grad(output, leaves, grad.to(dtype), allow_unused=True)
        results[name] = [output, *(tensor for tensor in grads if tensor is not None)]
    for name in ("kept", "recomputed"):
        tensors = zip(results[name], results["reference"], results["exact"], strict=True)
        for i, (ours, plain, exact) in enumerate(tensors):
            error, allowed = ((tensor.double() - exact).norm() / exact.norm() for tensor in (ours, plain))
            if not error <= 2 * allowed:
                raise RuntimeError(f"Tensor {i} of {name} is off by {error:.3g}; the reference by {allowed:.3g}.")


def _measured(case: str, size: str, steps: dict[str, Callable[[], object]], calls: int = 1) -> Iterator[Measurement]:
    """
    Two rows for each way that runs here, as launched and as a graph, of steps that make so many calls; ratios are to
    the first, "depthmix".
    """
    yardsticks = {}
    for name, step in steps.items():
        for form, prepare in ((case, lambda step: step), (f"{case}, graph", captured)):
            try:
                timing = measure([prepare(step)])[0]
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:120]}"
                print(f"{form:32} {size:5} {name:16} does not run: {reason}", flush=True)
                continue
            finally:
                release_memory()
            yardstick = yardsticks.setdefault(form, timing.median)
            yield Measurement(
                *(form, size, name, timing.median / calls, min(timing.times) / calls, max(timing.times) / calls),
                gib=timing.peak_gib,
                ratio=timing.median / yardstick,
            )


def stack_of(size: str):
    tokens, hidden_size, sub_layers, block_size = STACKS[size]
    torch.manual_seed(0)
    x = torch.randn(1, tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sites = [Site(hidden_size, torch.bfloat16) for _ in range(sub_layers + 1)]
    grad = torch.randn_like(x)

    def forward(way):
        with torch.no_grad():
            way(x, sites, block_size)

    def forward_backward(way):
        for leaf in (x, *itertools.chain(*(site.parameters for site in sites))):
            leaf.grad = None
        way(x, sites, block_size).backward(grad)

    return forward, forward_backward


def stack(size: str, *, backward: bool) -> Iterator[Measurement]:
    case = "stack, forward + backward" if backward else "stack, forward"
    step = stack_of(size)[backward]
    yield from _measured(case, size, {name: partial(step, WAYS[name]) for name in SELECTED})


def single_site(size: str) -> Iterator[Measurement]:
    """One site with 8 sources."""
    tokens, hidden_size, _, _ = STACKS[size]
    shape = (1, tokens, hidden_size)
    sources = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(8)]
    site, grad = Site(hidden_size, torch.bfloat16), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    ways = {
        "depthmix": lambda: attn_res(sources, *site.parameters, eps=EPS, impl="triton"),
        "liger-kernel": lambda: mix_liger(sources, site),
        "fla-core": lambda: mix_fla(sources, site),
    }
    ways = {name: way for name, way in ways.items() if name in SELECTED}

    calls = 10

    def step(way):
        for _ in range(calls):
            torch.autograd.grad(way(), [*sources, *site.parameters], grad)

    yield from _measured("single site", size, {name: partial(step, way) for name, way in ways.items()}, calls)


CASES = {
    "forward": partial(stack, backward=False),
    "forward_backward": partial(stack, backward=True),
    "single_site": single_site,
}


def profile(size: str) -> None:
    """Where the time of a stack goes, and how long the host needs to launch it."""
    _, forward_backward = stack_of(size)
    for _ in range(3):
        forward_backward(two_phases)
    torch.cuda.synchronize()
    start = time.perf_counter()
    forward_backward(two_phases)
    print(f"host {1e3 * (time.perf_counter() - start):.2f} ms", flush=True)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        forward_backward(two_phases)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=45), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attn_res", description=__doc__)
    parser.add_argument("--size", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--profile", action="store_true", help="also print where the time of a stack goes")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--name", default="attn_res", help="name of the CSV file")
    arguments = parser.parse_args()
    # the yardstick, whatever else is asked for
    SELECTED[:] = dict.fromkeys(["depthmix", *arguments.ways])

    check_function()
    release_memory()
    print(*(f"{name} {value}" for name, value in environment().items()), sep=", ", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measurements = []
    for size in arguments.size:
        for case in arguments.cases:
            for m in CASES[case](size):
                measurements.append(m)
                print(
                    f"{m.case:32} {m.size:5} {m.model:16} {m.milliseconds:9.3f} ms ({m.low:.3f} to {m.high:.3f})"
                    f" {m.ratio:6.3f}x  peak +{m.gib:.2f} GiB",
                    flush=True,
                )
                write_results(arguments.output / f"{arguments.name}.csv", measurements)
            release_memory()
        if arguments.profile:
            profile(size)


if __name__ == "__main__":
    main()
