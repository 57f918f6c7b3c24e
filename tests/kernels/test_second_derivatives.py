# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Second derivatives, of every operation that has gradients: right with the reference, an error that names it elsewhere.

Where a gradient is not connected to what it depends on, autograd takes it for a constant, and raises only if there is
no other path to the input. So each check has a residual path beside the operation, too.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.kernels import (
    DepthStream,
    attn_res,
    attn_res_phase_1,
    attn_res_phase_2,
    depth_average,
    depth_value_mix,
    gated_linear,
    gated_product,
    hyper_connection_read,
    hyper_connection_write,
    moda_attention,
    moda_attention_over_stream,
    norm_rotary_mix,
    stream_readout,
)


def draw(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def value_mix(impl, query, *entries):
    return [depth_value_mix(query, entries[:2], entries[2:], impl=impl)]


def finish(impl, query, key, value, query_norm, key_norm, source_key, source_value):
    cos, sin = draw((1, 3, 4), (1, 3, 4))
    tables = cos.to(query.dtype), sin.to(query.dtype)
    norms = {"query_norm_weight": query_norm, "key_norm_weight": key_norm}
    sources = {"source_keys": [source_key], "source_values": [source_value]}
    return norm_rotary_mix(query, key, value, *tables, **norms, **sources, impl=impl)


def site(impl, first, second, query, gain, bias, output_norm):
    options = {"bias": bias, "output_norm_weight": output_norm, "scale": "sum"}
    return [attn_res([first, second], query, gain, eps=1e-6, **options, impl=impl)]


def phase_1(impl, *inputs, sources=2):
    queries, gains = inputs[sources : sources + 2], inputs[sources + 2 :]
    outputs, log_sum_exps, handed_on = attn_res_phase_1(inputs[:sources], queries, gains, eps=1e-6, impl=impl)
    return [*outputs, *log_sum_exps, *handed_on]


def phase_2(impl, output, log_sum_exp, partial, update, query, gain, bias):
    options = {"eps": 1e-6, "bias": bias, "num_sources": 3}
    return attn_res_phase_2(output, log_sum_exp, partial, update, query, gain, **options, impl=impl)


def phase_2_without_update(impl, output, log_sum_exp, partial, query):
    return attn_res_phase_2(output, log_sum_exp, partial, None, query, eps=1e-6, num_sources=3, impl=impl)


def both_phases(impl, first, second, partial, update, query, gain):
    """Where phase 2 keeps the sources for its backward, not the output."""
    (output,), (log_sum_exp,), sources = attn_res_phase_1([first, second], [query], [gain], eps=1e-6, impl=impl)
    options = {"eps": 1e-6, "num_sources": 3, "sources": sources}
    return attn_res_phase_2(output, log_sum_exp, partial, update, query, gain, **options, impl=impl)


def read(impl, streams, norm, projection, *maps):
    return hyper_connection_read(streams, norm, projection, maps[:3], maps[3:], eps=1e-6, iterations=2, impl=impl)


def attend(impl, query, key, value, depth_keys, depth_values, depth_query):
    return [moda_attention(query, key, value, depth_keys, depth_values, depth_query=depth_query, impl=impl)]


def attend_over_stream(impl, query, key, value, *slots):
    """Two slots, the second written after the first was read, and two readers."""
    stream = DepthStream(2, impl=impl)
    handle = stream.write(stream.handle, *slots[:2])
    first = moda_attention_over_stream(query, key, value, stream, handle, start=0, stop=1)
    handle = stream.write(handle, *slots[2:])
    return [first, moda_attention_over_stream(first, key, value, stream, handle, start=0, stop=2)]


QUERY, KEY, ROWS = (1, 4, 3, 4), (1, 2, 3, 4), (2, 3, 4)
SLOT = (1, 3, 2, 4)
CASES = {
    "depth_value_mix": (value_mix, [QUERY, *[KEY] * 4]),
    "norm_rotary_mix": (finish, [QUERY, KEY, KEY, (4,), (4,), KEY, KEY]),
    "attn_res": (site, [ROWS, ROWS, (4,), (4,), (1,), (4,)]),
    "attn_res_phase_1": (phase_1, [ROWS, ROWS, *[(4,)] * 4]),
    "attn_res_phase_1 of a single source": (lambda *x: phase_1(*x, sources=1), [ROWS, *[(4,)] * 4]),
    "attn_res_phase_2": (phase_2, [ROWS, ROWS[:-1], ROWS, ROWS, (4,), (4,), (1,)]),
    "attn_res_phase_2 without update": (phase_2_without_update, [ROWS, ROWS[:-1], ROWS, (4,)]),
    "both phases of attn_res": (both_phases, [*[ROWS] * 4, (4,), (4,)]),
    "depth_average": (lambda impl, *x: [depth_average(x[:-1], x[-1], impl=impl)], [ROWS, ROWS, (2,)]),
    "gated_product": (lambda impl, *x: [gated_product(*x, impl=impl)], [ROWS, ROWS]),
    "gated_linear": (lambda impl, *x: [gated_linear(*x, impl=impl)], [ROWS, ROWS, (5, 4), (5,)]),
    "hyper_connection_read": (
        read,
        [(3, 2, 4), (8,), (8, 8), *[(1,)] * 3, (2,), (2,), (2, 2)],
    ),
    "hyper_connection_write": (
        lambda impl, *x: [hyper_connection_write(*x, impl=impl)],
        [(3, 2, 4), (3, 4), (3, 2, 2), (3, 2)],
    ),
    "stream_readout": (lambda impl, *x: [stream_readout(*x)], [(3, 2, 4), (2,)]),
    "moda_attention": (attend, [QUERY, KEY, KEY, (2, *SLOT), (2, *SLOT), QUERY]),
    "moda_attention without slots": (
        lambda impl, *x: [moda_attention(*x, *[x[0].new_empty((0, *SLOT))] * 2, impl=impl)],
        [QUERY, KEY, KEY],
    ),
    "moda_attention_over_stream": (attend_over_stream, [QUERY, KEY, KEY, *[SLOT] * 4]),
}
IMPLS = ["auto", pytest.param("triton", marks=pytest.mark.triton)]
every_case = pytest.mark.parametrize("case", CASES)
every_impl = pytest.mark.parametrize("impl", IMPLS)


class Recorded(TorchDispatchMode):
    """Under which operations run through the dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def leaves_of(case, dtype, indices=None):
    tensors = [tensor.to(dtype) for tensor in draw(*CASES[case][1])]
    return [x.requires_grad_(indices is None or i in indices) for i, x in enumerate(tensors)]


def loss_of(case, impl, leaves, residual):
    # outputs that are handed on, or constant, count for nothing
    loss = sum(output.pow(3).sum() for output in CASES[case][0](impl, *leaves))
    return loss + sum(leaf.pow(3).sum() for leaf in leaves) if residual else loss


def second_derivatives(case, impl, indices, residual):
    """Of a penalty on the gradients, by each of these leaves; None where the operation refuses to give them."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    leaves = leaves_of(case, dtype, indices)
    wanted = [leaves[i] for i in indices]
    grads = torch.autograd.grad(loss_of(case, impl, leaves, residual), wanted, create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    results = []
    for leaf in wanted:
        try:
            results += torch.autograd.grad(penalty, leaf, retain_graph=True, materialize_grads=True)
        except RuntimeError as error:
            assert "reference" in str(error), error
            results.append(None)
    return results


def assert_right_or_refused(case, impl, indices, residual):
    expected = second_derivatives(case, "reference", indices, residual)
    assert all(tensor is not None for tensor in expected)
    for actual, exact in zip(second_derivatives(case, impl, indices, residual), expected, strict=True):
        if actual is not None:
            torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-3)


@every_case
def test_the_reference_can_be_differentiated_twice(case):
    leaves = leaves_of(case, torch.float64)
    assert torch.autograd.gradgradcheck(lambda *x: loss_of(case, "reference", x, False), leaves)


@every_impl
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@every_case
def test_right_or_refused(case, impl, residual):
    indices = range(len(CASES[case][1]))
    assert_right_or_refused(case, impl, indices, residual)


@every_impl
@every_case
def test_right_or_refused_by_each_input_alone(case, impl):
    for index in range(len(CASES[case][1])):
        assert_right_or_refused(case, impl, [index], True)


@every_impl
@every_case
def test_right_or_refused_where_operations_are_recorded(case, impl):
    with Recorded():
        assert_right_or_refused(case, impl, range(len(CASES[case][1])), True)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "stream_readout"])
def test_kernels_refuse_a_second_backward(case, residual):
    leaves = leaves_of(case, torch.float32)
    loss_of(case, "triton", leaves, residual).backward(create_graph=True)
    penalty = sum(leaf.grad.square().sum() for leaf in leaves)
    with pytest.raises(RuntimeError, match='ask for impl="reference"'):
        penalty.backward()


def test_the_default_refuses_where_it_is_no_reference():
    """On a CPU, that is Mixture-of-Depths Attention, whose backward is its own there."""
    leaves = leaves_of("moda_attention", torch.float32)
    loss = loss_of("moda_attention", "auto", leaves, True)
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match='ask for impl="reference"'):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves[0])


@every_impl
@every_case
def test_batches_of_gradients_are_right_or_refused(case, impl):
    """`is_grads_batched`, as `torch.autograd.functional.jacobian(vectorize=True)` has it."""
    leaves = leaves_of(case, torch.float32)
    outputs = [output for output in CASES[case][0](impl, *leaves) if output.requires_grad]
    batches = [torch.stack(draw(*[output.shape] * 3)) for output in outputs]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    try:
        found = torch.autograd.grad(outputs, leaves, batches, is_grads_batched=True, **options)
    except RuntimeError as error:
        assert "reference" in str(error), error
        return
    single = [torch.autograd.grad(outputs, leaves, list(grads), **options) for grads in zip(*batches, strict=True)]
    for batch, *each in zip(found, *single, strict=True):
        torch.testing.assert_close(batch, torch.stack(each), rtol=1e-4, atol=1e-4)
