# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Single operations, against a copy that moves as many bytes as they must, or against torch's own attention."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthmix.kernels import (
    depth_average,
    hyper_connection_read,
    hyper_connection_write,
    moda_attention,
    norm_rotary_mix_triton,
    shared_input_linear,
)
from depthmix.kernels.norm_rotary_mix_reference import norm_rotary_mix_reference

from .harness import Measurement, captured, measure, release_memory
from .models import SIZES


CALLS_PER_GRAPH = 6


def require_close(operation: str, results: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], *, limit: float):
    """
    Raises:
        `RuntimeError`: if one of the results is off by as much, relative to its size.
    """
    for actual, exact in zip(results, expected, strict=True):
        error = ((actual.double() - exact.double()).norm() / exact.double().norm()).item()
        if not error < limit:
            raise RuntimeError(f"{operation} is off by {error} from its reference.")


def inputs(size: str, batch: int, tokens: int, *, sources: int, fused: bool) -> tuple[tuple, list[torch.Tensor]]:
    """Arguments of the operation, in the layout that the model gives them, and gradients of its results."""
    shape = SIZES[size].fields

    def rows(heads):
        return torch.randn(batch, tokens, heads, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    query = rows(shape["num_attention_heads"])
    keys, values = ([rows(shape["num_key_value_heads"]) for _ in range(sources + 1)] for _ in range(2))
    norm = torch.rand(64, dtype=torch.bfloat16, device="cuda") + 0.5 if fused else None
    table = torch.randn(1, tokens, 64, dtype=torch.bfloat16, device="cuda") if fused else None
    arguments = (query, keys, values if sources else [], norm, norm, None, table, table, 0.125, 1e-6, True)
    return arguments, [torch.randn_like(x) for x in norm_rotary_mix_triton.run_norm_rotary_mix(*arguments)]


def check(arguments: tuple, output_grads: list[torch.Tensor]) -> None:
    """The gate: results and gradients are those of the reference, but for the rounding of bf16."""
    query, keys, values, query_norm, key_norm, _, cos, sin, scaling, eps, _ = arguments
    leaves = [x.detach().requires_grad_() for x in (query, *keys, *values)]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        query, *entries = (leaf.to(dtype) for leaf in leaves)
        own_keys, own_values = entries[: len(keys)], entries[len(keys) :]
        if dtype is torch.bfloat16:
            outputs = norm_rotary_mix_triton.run_norm_rotary_mix(query, own_keys, own_values, *arguments[3:])
        else:
            wide = [None if x is None else x.to(dtype) for x in (cos, sin, query_norm, key_norm)]
            outputs = norm_rotary_mix_reference(
                query,
                own_keys[-1],
                own_values[-1] if values else own_keys[-1],
                *wide[:2],
                query_norm_weight=wide[2],
                key_norm_weight=wide[3],
                eps=eps,
                key_norm_position="before_rope",
                source_keys=own_keys[:-1],
                source_values=own_values[:-1],
                scaling=scaling,
            )
            outputs = outputs[:2] * (query_norm is not None) + outputs[2:] * bool(values)
        grads = torch.autograd.grad(outputs, leaves, [grad.to(dtype) for grad in output_grads])
        results.append([*outputs, *grads])
    require_close("The kernel", *results, limit=8e-3)


def in_graph(call: Callable[[int], object]) -> Callable[[], None]:
    """A replay of some calls, so that the host's time to launch them is not measured."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(i) for i in range(CALLS_PER_GRAPH)]
    graph.kept = kept
    return graph.replay


def operation(
    name: str, size: str, *, batch: int, tokens: int, sources: int, fused: bool, backward: bool
) -> Iterator[Measurement]:
    """The kernel beside a copy of as many bytes as it must read and write."""
    check(*inputs(size, 2, 64, sources=sources, fused=fused))
    # several sets of inputs, or they would come from the cache
    sets = [inputs(size, batch, tokens, sources=sources, fused=fused) for _ in range(3)]
    (query, keys, values, *_), output_grads = sets[0]
    read = sum(x.nbytes for x in (query, *keys, *values))
    written = sum(x.nbytes for x in output_grads)
    moved = 2 * read + written if backward else read + written
    source = torch.randn(3, moved // 4, device="cuda").bfloat16()
    target = torch.empty_like(source)

    def kernel(i):
        arguments, grads = sets[i % 3]
        if backward:
            return norm_rotary_mix_triton.norm_rotary_mix_backward(grads, *arguments)
        return norm_rotary_mix_triton.norm_rotary_mix_forward(*arguments)

    steps = [in_graph(lambda i: target[i % 3].copy_(source[i % 3])), in_graph(kernel)]
    copy, ours = measure(steps, warmup=3, repeats=21)
    for model, timing in (("copy", copy), ("kernel", ours)):
        low, *_, high = sorted(timing.times)
        yield Measurement(
            *(name, size, model, *(t / CALLS_PER_GRAPH for t in (timing.median, low, high)), moved / 2**30),
            ratio=timing.median / copy.median,
        )
    release_memory()


def moda_inputs(tokens: int, group: int, slots: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Arguments of `moda_attention`, and a gradient of its result: 8 key-value heads of 64 channels."""

    def rows(heads):
        return torch.randn(1, tokens, heads, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    def slot_rows():
        return torch.empty(slots, 1, tokens, 8, 64, dtype=torch.bfloat16, device="cuda").normal_()

    tensors = [rows(8 * group), rows(8), rows(8), slot_rows(), slot_rows()]
    return [tensor.requires_grad_() for tensor in tensors], rows(8 * group)


def check_moda(group: int) -> None:
    """The gate: result and gradients are those of the reference, but for the rounding of bf16."""
    leaves, grad = moda_inputs(256, group, 19)
    results = []
    for dtype, impl in ((torch.bfloat16, "triton"), (torch.float64, "reference")):
        output = moda_attention(*(leaf.to(dtype) for leaf in leaves), impl=impl)
        results.append([output, *torch.autograd.grad(output, leaves, grad.to(dtype))])
    require_close("moda_attention", *results, limit=1.2e-2)


def moda(name: str, size: str, *, tokens: int, group: int, slots: int) -> Iterator[Measurement]:
    """
    Forward and backward of `moda_attention`, as launched and as a graph, beside torch's attention over the sequence
    alone, to which the ratios are. The floor is the time of a copy of the bytes of the slots that must move: read
    twice, and their gradients written.
    """
    check_moda(group)
    leaves, grad = moda_inputs(tokens, group, slots)
    calls = max(1, 32768 // tokens)
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    floor_bytes = 3 * (leaves[3].nbytes + leaves[4].nbytes)

    def ours():
        for _ in range(calls):
            torch.autograd.grad(moda_attention(*leaves, impl="triton"), leaves, grad)

    def alone(backend):
        with sdpa_kernel(backend):
            for _ in range(calls):
                output = F.scaled_dot_product_attention(*leaves[:3], is_causal=True, enable_gqa=True)
                torch.autograd.grad(output, leaves[:3], grad)

    def copy():
        target.copy_(source)

    steps = {
        "cudnn": partial(alone, SDPBackend.CUDNN_ATTENTION),
        "flash": partial(alone, SDPBackend.FLASH_ATTENTION),
        "moda_attention": ours,
    }
    for form, prepare in ((name, lambda step: step), (f"{name}, graph", captured)):
        *timings, copied = measure([*map(prepare, steps.values()), copy], warmup=2, repeats=7)
        for model, timing in zip(steps, timings, strict=True):
            low, *_, high = sorted(time / calls for time in timing.times)
            ratio = timing.median / timings[0].median
            yield Measurement(form, "", model, timing.median / calls, low, high, timing.peak_gib, ratio)
        low, *_, high = floor = sorted(time * floor_bytes / (2 * source.nbytes) for time in copied.times)
        median = statistics.median(floor)
        ratio = median * calls / timings[0].median
        yield Measurement(form, "", "floor of slots", median, low, high, floor_bytes / 2**30, ratio)
        release_memory()


def connection_inputs(tokens: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    A connection of four streams and a sub-layer with this output: streams, output and parameters, and gradients of
    what it reads and of the new streams.
    """

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape, device="cuda")).bfloat16()

    leaves = [draw(tokens, 4, size), draw(tokens, size)]
    leaves += [1 + draw(4 * size, scale=0.1), draw(24, 4 * size, scale=(4 * size) ** -0.5)]
    leaves += [draw(*shape) for shape in ((1,), (1,), (1,), (4,), (4,), (4, 4))]
    return [leaf.requires_grad_() for leaf in leaves], [draw(tokens, size), draw(tokens, 4, size)]


def connection(leaves: list[torch.Tensor], impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    streams, update, norm_weight, projection, *rest = leaves
    mixed, residual, post, streams = hyper_connection_read(
        *(streams, norm_weight, projection, rest[:3], rest[3:]), eps=1e-6, order="rows_first", impl=impl
    )
    return mixed, hyper_connection_write(streams, update, residual, post, impl=impl)


def liger_leaves(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """A connection of liger-kernel with these weights, which has no norm weight of its own."""
    streams, update, norm_weight, projection, *rest = (leaf.detach() for leaf in leaves)
    phi, bias = (norm_weight * projection).t().contiguous(), torch.cat([logits.flatten() for logits in rest[3:]])
    alphas = [alpha.float().squeeze() for alpha in rest[:3]]
    return [leaf.requires_grad_() for leaf in (streams, update, phi, bias.float(), *alphas)]


def liger_connection(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Its iterations, too, start with the rows; without its epsilon in the sums they are the same."""
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

    streams, update, *parameters = leaves
    pre, post, residual = liger_mhc_coeffs(streams, *parameters, sinkhorn_eps=0.0)
    return liger_mhc_pre(streams, pre), liger_mhc_post_res(streams, update, post, residual)


def check_connection(size: int) -> None:
    """The gate: results and gradients are those of the reference, but for the rounding of bf16."""
    leaves, grads = connection_inputs(300, size)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact, ours = connection(wide, "reference"), connection(leaves, "triton")
    results = [
        [*outputs, *torch.autograd.grad(outputs, inputs, [grad.to(outputs[0].dtype) for grad in grads])]
        for outputs, inputs in ((ours, leaves), (exact, wide))
    ]
    require_close("hyper_connection_read and _write", *results, limit=1.2e-2)


def beside_copy(name: str, moved: int, ways: dict[str, Callable[[], object]]) -> Iterator[Measurement]:
    """
    The ways to do an operation that has to read and write so many bytes, as launched and as a graph, each beside a
    copy that moves as many. A way that does not run here is said to, and left out.
    """
    calls = 4
    source = torch.randn(moved // 4, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def repeated(way):
        for _ in range(calls):
            way()

    copy = partial(repeated, lambda: target.copy_(source))

    def row(form, model, timing, copied):
        return Measurement(
            *(form, "", model, timing.median / calls, min(timing.times) / calls, max(timing.times) / calls),
            gib=moved / 2**30,
            ratio=timing.median / copied.median,
        )

    yield row(name, "copy", *measure([copy, copy]))
    for model, way in ways.items():
        for form, prepare in ((name, lambda step: step), (f"{name}, graph", captured)):
            try:
                # the copy is launched in both cases: what a graph has for it is slower
                copied, timing = measure([copy, prepare(partial(repeated, way))])
            except Exception as error:
                print(f"{form:42} {model:16} does not run: {type(error).__name__}: {str(error)[:120]}", flush=True)
            else:
                yield row(form, model, timing, copied)
    release_memory()


def hyper_connection(name: str, size: str, *, tokens: int, hidden_size: int, backward: bool) -> Iterator[Measurement]:
    """
    Read and write, beside a copy of what they have to read and write: each input and each gradient once. The reference
    is that of the package, which keeps its inputs only, and the same compiled.
    """
    check_connection(hidden_size)
    streams = 4
    leaves, grads = connection_inputs(tokens, hidden_size)
    states = (streams + 1) + (2 * streams + 1)
    if backward:
        # of the write, and of the read, which takes the gradient of the streams from it
        states += (3 * streams + 2) + (3 * streams + 1)
    ways = {
        "depthmix": (partial(connection, impl="triton"), leaves),
        "liger-kernel": (liger_connection, liger_leaves(leaves)),
        "reference": (partial(connection, impl="reference"), leaves),
        "compiled": (torch.compile(partial(connection, impl="reference")), leaves),
    }
    steps = {model: partial(_run, *way, grads if backward else None) for model, way in ways.items()}
    yield from beside_copy(name, states * leaves[1].nbytes, steps)


def _run(way: Callable, leaves: list[torch.Tensor], grads: list[torch.Tensor] | None) -> None:
    """Forward, and backward where there are gradients of the results."""
    if grads is None:
        with torch.no_grad():
            way(leaves)
    else:
        torch.autograd.grad(way(leaves), leaves, grads)


def average(name: str, size: str, *, sources: int, backward: bool) -> Iterator[Measurement]:
    """The depth-weighted average of 8192 tokens of width 2048, beside a copy, the reference and the same compiled."""
    leaves = [torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(sources)]
    leaves = [tensor.requires_grad_() for tensor in (*leaves, torch.randn(sources, device="cuda").bfloat16())]
    grad = torch.randn_like(leaves[0])

    def way(impl):
        return lambda leaves: [depth_average(leaves[:-1], leaves[-1], impl=impl)]

    # the gate: results and gradients are those of the reference, but for the rounding of bf16
    wide = [leaf.detach()[:300].double().requires_grad_() for leaf in leaves]
    short = [leaf.detach()[:300].requires_grad_() for leaf in leaves]
    results = []
    for inputs, impl in ((short, "triton"), (wide, "reference")):
        outputs = way(impl)(inputs)
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, [grad[:300].to(inputs[0].dtype)])])
    require_close("depth_average", *results, limit=8e-3)

    ways = {"depthmix": way("triton"), "reference": way("reference"), "compiled": torch.compile(way("reference"))}
    steps = {model: partial(_run, each, leaves, [grad] if backward else None) for model, each in ways.items()}
    # forward: sources read, the average written; backward: sources and a gradient read, their gradients written
    states = (sources + 1) + (2 * sources + 1) * backward
    yield from beside_copy(name, states * grad.nbytes, steps)


def one_token(name: str, size: str, *, hidden_size: int, sizes: tuple[int, ...]) -> Iterator[Measurement]:
    """The linear maps of one token in 16 layers, beside a copy, and a library's products one by one."""
    x = torch.randn(1, 1, hidden_size, device="cuda", dtype=torch.bfloat16)
    # more than a cache holds
    layers = [
        [torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16) for rows in sizes] for _ in range(16)
    ]
    exact = [F.linear(x.double(), weight.double()) for weight in layers[0]]
    require_close("shared_input_linear", shared_input_linear(x, layers[0], impl="triton"), exact, limit=4e-3)

    def together():
        for weights in layers:
            shared_input_linear(x, weights, impl="triton")

    def one_by_one():
        for weights in layers:
            for weight in weights:
                F.linear(x, weight)

    moved = sum(weight.nbytes for weights in layers for weight in weights)
    yield from beside_copy(name, moved, {"depthmix": together, "torch": one_by_one})


CONNECTION_CASES = {
    f"hyper_connection_T{tokens}_D{hidden_size}_{'forward_backward' if backward else 'forward'}": partial(
        hyper_connection, tokens=tokens, hidden_size=hidden_size, backward=backward
    )
    for tokens, hidden_size in ((16384, 2048), (16384, 1536), (8192, 4096))
    for backward in (False, True)
}
MODA_CASES = {
    f"moda_attention_T{tokens}_G{group}_n{slots}": partial(moda, tokens=tokens, group=group, slots=slots)
    for tokens, group, slots in (
        (4096, 8, 64),
        (16384, 8, 64),
        (65536, 8, 64),
        (16384, 2, 64),
        (16384, 32, 64),
        (16384, 8, 256),
    )
}
AVERAGE_CASES = {
    f"depth_average_{sources}_sources_{'forward_backward' if backward else 'forward'}": partial(
        average, sources=sources, backward=backward
    )
    for sources in (4, 16, 48)
    for backward in (False, True)
}
ONE_TOKEN_CASES = {
    f"shared_input_linear_{name}": partial(one_token, hidden_size=hidden_size, sizes=sizes)
    for name, hidden_size, sizes in (
        ("3b_attention", 2048, (2048, 512, 512)),
        ("3b_mlp_in", 2048, (6912, 6912)),
        ("3b_mlp_out", 6912, (2048,)),
        ("700m_attention", 1024, (1024, 512, 512)),
        # with the projection to depth slots
        ("700m_mlp_in", 1024, (4096, 4096, 1024)),
        ("700m_mlp_out", 4096, (1024,)),
    )
}
# of no model's size
UNSIZED_CASES = MODA_CASES | CONNECTION_CASES | AVERAGE_CASES | ONE_TOKEN_CASES
CASES = UNSIZED_CASES | {
    f"{'norm_rotary_mix' if fused else 'depth_value_mix'}_{sources}_sources_{direction}_{tokens}": partial(
        operation,
        batch=batch,
        tokens=tokens // batch,
        sources=sources,
        fused=fused,
        backward=direction == "backward",
    )
    for (batch, tokens), fused, sources, direction in itertools.product(
        ((4, 8192), (1, 32768)), (False, True), (0, 1, 2), ("forward", "backward")
    )
    if fused or sources
}
