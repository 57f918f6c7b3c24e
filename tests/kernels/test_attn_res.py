# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`attn_res` and its two phases: against fixed numbers and plain Python; the kernels on a GPU or else interpreted."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from depthmix.kernels import (
    attn_res,
    attn_res_additive,
    attn_res_phase_1,
    attn_res_phase_2,
    attn_res_triton,
    attn_res_weights,
    depth_dispatch,
)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(depth_dispatch.triton is None, reason="needs Triton")
IMPLS = ("reference", pytest.param("triton", marks=needs_triton))
EPS = 1e-5
EXPLORE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def few_tokens_as_many(monkeypatch):
    """Phase 1 as it runs for many tokens; a test of its own compares the other way."""
    monkeypatch.setattr(attn_res_triton, "MANY_TOKENS", 1)


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


class Block:
    """
    The sites of a block, with random tensors. `run` mixes as a model does, with updates that are given; `direct` does
    it with one softmax for each site.
    """

    def __init__(
        self,
        shape=(2, 3, 48),
        sources=3,
        sites=3,
        *,
        dtype=torch.float32,
        gain=True,
        bias=True,
        norm=True,
        scale="mean",
        recompute=False,
        spread=0.3,
    ):
        d = shape[-1]
        self.options = {"eps": EPS, "scale": scale}
        self.scale, self.recompute, self.sites = scale, recompute, sites
        self.num_outputs = 2 * sites + sources
        names = [f"source_{i}" for i in range(sources)] + [f"update_{i}" for i in range(sites)]
        self.tensors = {name: draw(*shape, dtype=dtype, seed=i) for i, name in enumerate(names)}
        for i in range(sites):
            self.tensors[f"query_{i}"] = draw(d, dtype=dtype, seed=100 + i) * spread
            if gain:
                self.tensors[f"gain_{i}"] = draw(d, dtype=dtype, seed=200 + i)
            if bias:
                self.tensors[f"bias_{i}"] = draw(1, dtype=dtype, seed=300 + i)
            if norm:
                self.tensors[f"norm_{i}"] = draw(d, dtype=dtype, seed=400 + i)

    def run(self, impl, tensors=None, dtype=None, grads=None, mix=None):
        """Sums and mixes of all sites, and gradients of all tensors."""
        tensors = self.tensors if tensors is None else tensors
        leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}
        outputs = (self.two_phases if mix is None else mix)(leaves, impl)
        if grads is None:
            grads = [draw(*output.shape, seed=500 + i) for i, output in enumerate(outputs)]
        used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in used],
            list(leaves.values()),
            [grad.to(output.dtype) for output, grad in used],
            allow_unused=True,
        )
        named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        return named | {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}

    @staticmethod
    def all(leaves, kind):
        return [tensor for name, tensor in leaves.items() if name.startswith(kind)]

    def two_phases(self, leaves, impl):
        sources, gains = self.all(leaves, "source"), self.all(leaves, "gain") or None
        *finished, sources = attn_res_phase_1(sources, self.all(leaves, "query"), gains, eps=EPS, impl=impl)
        partial_sum, outputs = None, []
        for i, (output, log_sum_exp) in enumerate(zip(*finished, strict=True)):
            partial_sum, mixed = attn_res_phase_2(
                *(output, log_sum_exp, partial_sum, leaves[f"update_{i}"], leaves[f"query_{i}"]),
                leaves.get(f"gain_{i}"),
                bias=leaves.get(f"bias_{i}"),
                output_norm_weight=leaves.get(f"norm_{i}"),
                num_sources=len(sources) + 1,
                sources=sources if self.recompute else None,
                impl=impl,
                **self.options,
            )
            outputs += [partial_sum, mixed]
        return [*outputs, *sources]

    def direct(self, leaves, impl):
        sources, partial_sum, outputs = self.all(leaves, "source"), None, []
        for i in range(self.sites):
            update = leaves[f"update_{i}"]
            partial_sum = update if partial_sum is None else partial_sum + update
            mixed = attn_res(
                *([*sources, partial_sum], leaves[f"query_{i}"], leaves.get(f"gain_{i}")),
                bias=leaves.get(f"bias_{i}"),
                output_norm_weight=leaves.get(f"norm_{i}"),
                impl=impl,
                **self.options,
            )
            outputs += [partial_sum, mixed]
        return [*outputs, *sources]


def assert_close_to(actual, expected, tolerance):
    """By the norm of each tensor."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        ours = actual[name]
        if tensor is None:
            assert ours is None, name
            continue
        assert ours.shape == tensor.shape, name
        error = (ours.double() - tensor.double()).norm() / (tensor.double().norm() + 1e-6)
        assert error <= tolerance, f"{name}: {error}"


def test_reference_vector():
    values = [[1, 0, -1, 2], [0.5, 0.5, 0.5, -0.5], [-2, 1, 0, 1]]
    sources = [torch.tensor(value, dtype=torch.float64) for value in values]
    query = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
    gain = torch.tensor([1, 2, 0.5, 1.5], dtype=torch.float64)
    for norm_weight, logits, weights, mixed in (
        (
            None,
            [0.81649386, -0.19999600, -0.32659754],
            [0.59499204, 0.21530555, 0.18970242],
            [0.32323998, 0.29735519, -0.48733926, 1.27203372],
        ),
        (
            gain,
            [1.18391610, -0.64998700, -0.32659754],
            [0.72433051, 0.11573982, 0.15992967],
            [0.46234108, 0.21779958, -0.66646061, 1.55072079],
        ),
    ):
        close = partial(torch.testing.assert_close, atol=1e-8, rtol=0)
        close(attn_res(sources, query, norm_weight, eps=1e-5), torch.tensor(mixed, dtype=torch.float64))
        close(attn_res_weights(sources, query, norm_weight, eps=1e-5), torch.tensor(weights, dtype=torch.float64))
        (output,), (log_sum_exp,), _ = attn_res_phase_1(
            sources, [query], None if norm_weight is None else [norm_weight], eps=1e-5
        )
        close(output, torch.tensor(mixed, dtype=torch.float64))
        close(log_sum_exp, torch.tensor(logits, dtype=torch.float64).logsumexp(0))
    mean = attn_res(sources, torch.zeros_like(query), gain, eps=1e-5)
    torch.testing.assert_close(mean, sum(sources) / 3)


def looped_mix(sources, query, gain, bias, factor, norm):
    """Plain Python over lists."""

    def normalise(x):
        inverse = 1 / math.sqrt(math.fsum(a * a for a in x) / len(x) + EPS)
        return [a * inverse for a in x]

    logits = [math.fsum(q * g * a for q, g, a in zip(query, gain, normalise(x), strict=True)) for x in sources]
    logits[-1] += bias
    odds = [math.exp(logit - max(logits)) for logit in logits]
    mixed = [factor * math.fsum(o * x[j] for o, x in zip(odds, sources, strict=True)) for j in range(len(query))]
    mixed = [a / math.fsum(odds) for a in mixed]
    return mixed if norm is None else [a * b for a, b in zip(normalise(mixed), norm, strict=True)]


@settings(EXPLORE, max_examples=40)
@given(
    tokens=st.sampled_from([0, 1, 3]),
    hidden_size=st.integers(1, 9),
    sources=st.integers(1, 5),
    scale=st.sampled_from(["mean", "sum"]),
    bias=st.floats(-3, 3),
    norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_plain_loops(tokens, hidden_size, sources, scale, bias, norm, seed):
    values = [draw(tokens, hidden_size, dtype=torch.float64, seed=seed + i) for i in range(sources)]
    query, gain, weight = (draw(hidden_size, dtype=torch.float64, seed=seed + 10 + i) for i in range(3))
    mixed = attn_res(
        *(values, query, gain),
        eps=EPS,
        bias=torch.tensor(bias, dtype=torch.float64, device=DEVICE),
        scale=scale,
        output_norm_weight=weight if norm else None,
    )
    factor = sources if scale == "sum" else 1
    expected = [
        looped_mix(
            [value[t].tolist() for value in values],
            *(query.tolist(), gain.tolist(), bias, factor, weight.tolist() if norm else None),
        )
        for t in range(tokens)
    ]
    expected = torch.tensor(expected, dtype=torch.float64, device=DEVICE).view(tokens, hidden_size)
    torch.testing.assert_close(mixed, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("mix", ["two_phases", "direct"])
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_gradcheck(mix, scale):
    block = Block((2, 5), sources=2, sites=2, dtype=torch.float64, scale=scale)
    names = list(block.tensors)
    leaves = [tensor.detach().requires_grad_() for tensor in block.tensors.values()]
    assert torch.autograd.gradcheck(
        lambda *tensors: tuple(getattr(block, mix)(dict(zip(names, tensors, strict=True)), "reference")), leaves
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_two_phases_are_one_softmax(impl, scale):
    block = Block(scale=scale)
    tolerance = 5e-5
    assert_close_to(block.run(impl), block.run("reference", dtype=torch.float64, mix=block.direct), tolerance)
    assert_close_to(
        block.run(impl, mix=block.direct), block.run("reference", dtype=torch.float64, mix=block.direct), tolerance
    )


CASES = {
    "all": {},
    "no gain": {"gain": False},
    "no bias": {"bias": False},
    "no norm": {"norm": False},
    "bare": {"gain": False, "bias": False, "norm": False},
    "sum": {"scale": "sum"},
    "recomputed": {"recompute": True},
    "recomputed, no norm": {"recompute": True, "norm": False, "scale": "sum"},
    "one source": {"sources": 1},
    "one site": {"sites": 1},
    "many sources": {"sources": 6, "sites": 2},
    "five sites": {"sites": 5, "sources": 2},
    "not a power of two": {"shape": (1, 2, 100)},
    "wide": {"shape": (1, 3, 1536), "sites": 2},
    "narrow": {"shape": (7, 5), "sites": 2},
    "one column": {"shape": (9, 1), "sites": 2, "norm": False},
    "one token": {"shape": (1, 1, 48)},
    "no leading dimension": {"shape": (48,)},
    "more tokens than programs": {"shape": (150, 64), "sites": 2},
    "groups of sources": {"shape": (2, 20), "sources": 19, "sites": 2},
    "groups of sites": {"shape": (2, 20), "sources": 2, "sites": 18, "norm": False},
}


@needs_triton
@pytest.mark.parametrize("mix", ["two_phases", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_reference(case, mix):
    block = Block(**CASES[case])
    mix = getattr(block, mix)
    assert_close_to(block.run("triton", mix=mix), block.run("reference", dtype=torch.float64, mix=mix), 2e-4)


@needs_triton
@pytest.mark.parametrize("mix", ["two_phases", "direct"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_plain_torch(dtype, mix, recompute):
    block = Block((4, 9, 64), dtype=dtype, recompute=recompute)
    mix = getattr(block, mix)
    exact = block.run("reference", dtype=torch.float64, mix=mix)
    plain, ours = block.run("reference", mix=mix), block.run("triton", mix=mix)
    assert all(tensor.dtype is dtype for tensor in ours.values())
    # of all sites together: the error of a single number says little
    for kind in ("output", *(f"gradient of {name}" for name in ("source", "update", "query", "gain", "bias", "norm"))):
        names = [name for name in exact if name.startswith(kind)]
        together = [torch.cat([run[name].double().flatten() for name in names]) for run in (exact, plain, ours)]
        allowed, error = ((x - together[0]).norm() / together[0].norm() for x in together[1:])
        assert error <= 2 * allowed + torch.finfo(dtype).eps, kind


@needs_triton
@pytest.mark.parametrize("case", ["all", "recomputed"])
def test_equal_bits_from_equal_inputs(case):
    block = Block((37, 48), **CASES[case])
    first, second = block.run("triton"), block.run("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_triton
def test_no_tokens():
    for recompute in (False, True):
        block = Block((2, 0, 48), recompute=recompute)
        for mix in (block.two_phases, block.direct):
            ours, expected = (block.run(impl, mix=mix) for impl in ("triton", "reference"))
            for name, tensor in expected.items():
                torch.testing.assert_close(ours[name], tensor)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second column": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2],
    "part of a larger tensor": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4), value=float("nan"))[:, 1:-4, 3:-2],
    "rows apart": lambda x: torch.nn.functional.pad(x.flatten(0, 1), (0, 16), value=float("nan"))[:, :-16].unflatten(
        0, x.shape[:2]
    ),
    "columns first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}


@needs_triton
@pytest.mark.parametrize("mix", ["two_phases", "direct"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_inputs_and_gradients_does_not_matter(layout, mix):
    block = Block()
    mix, expected = getattr(block, mix), block.run("triton", mix=getattr(block, mix))

    def through_layout(leaves, impl):
        laid_out = {n: LAYOUTS[layout](x) if x.ndim == 3 else x for n, x in leaves.items()}
        return mix(laid_out, impl)

    grads = [LAYOUTS[layout](draw(2, 3, 48, seed=500 + i).detach()) for i in range(block.num_outputs)]
    assert not grads[0].is_contiguous()
    assert_close_to(block.run("triton", mix=through_layout, grads=grads), expected, 1e-6)


@needs_triton
def test_gradients_of_sites_may_be_laid_out_differently():
    sources, queries = ([draw(*shape, seed=i) for i in range(3)] for shape in ((2, 3, 48), (48,)))
    grads = [draw(2, 3, 48, seed=500 + i).detach() for i in range(3)]
    laid_out = [grads[0], LAYOUTS["rows apart"](grads[1]), LAYOUTS["transposed"](grads[2])]
    results = []
    for incoming in (grads, laid_out):
        outputs, *_ = attn_res_phase_1(sources, queries, eps=EPS, impl="triton")
        results.append(torch.autograd.grad(outputs, [*sources, *queries], incoming))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@needs_triton
@pytest.mark.parametrize("mix", ["two_phases", "direct"])
def test_gradient_of_a_plain_sum(mix):
    """Its strides are zero."""
    block = Block()
    mix = getattr(block, mix)
    ones = [torch.ones((), device=DEVICE).expand(2, 3, 48) for _ in range(block.num_outputs)]
    copies = [grad.contiguous() for grad in ones]
    given, copied = block.run("triton", mix=mix, grads=ones), block.run("triton", mix=mix, grads=copies)
    assert all(torch.equal(given[name], copied[name]) for name in given)


@needs_triton
@pytest.mark.parametrize("used", [0, 1, 2, 4, 7])
def test_gradient_of_a_part_of_the_outputs(used):
    block = Block()
    grads = [draw(2, 3, 48, seed=500 + i) if i == used else None for i in range(block.num_outputs)]
    ours, expected = (block.run(impl, grads=grads) for impl in ("triton", "reference"))
    for name, tensor in expected.items():
        zero = torch.zeros(()) if tensor is None else tensor
        given = torch.zeros(()) if ours[name] is None else ours[name]
        assert (given - zero).norm() <= 2e-5 * (zero.norm() + 1e-3), name


@needs_triton
def test_gradient_of_a_part_of_the_inputs():
    block = Block()
    expected = block.run("reference")
    for chosen in ("source_1", "update_0", "query_2", "gain_1", "bias_0", "norm_2"):
        leaves = {name: tensor.detach().requires_grad_(name == chosen) for name, tensor in block.tensors.items()}
        outputs = block.two_phases(leaves, "triton")
        pairs = [(x, draw(2, 3, 48, seed=500 + i)) for i, x in enumerate(outputs) if x.requires_grad]
        (grad,) = torch.autograd.grad([x for x, _ in pairs], [leaves[chosen]], [grad for _, grad in pairs])
        assert_close_to({"grad": grad}, {"grad": expected[f"gradient of {chosen}"]}, 2e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_sum_that_is_there_already(impl):
    """`partial` without an `update` is an `update` without a `partial`."""
    block = Block(sites=1)
    (output,), (log_sum_exp,), _ = attn_res_phase_1(
        block.all(block.tensors, "source"), block.all(block.tensors, "query"), eps=EPS, impl=impl
    )
    update, query = block.tensors["update_0"], block.tensors["query_0"]
    phase_2 = partial(attn_res_phase_2, output, log_sum_exp, eps=EPS, num_sources=4, impl=impl)
    as_update, as_partial = phase_2(None, update, query), phase_2(update, None, query)
    assert all(x[0].data_ptr() == update.data_ptr() and torch.equal(x[0], update) for x in (as_update, as_partial))
    assert torch.equal(as_update[1], as_partial[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_single_source_is_returned_itself(impl):
    source, query = draw(2, 48), draw(48)
    for scale in ("mean", "sum"):
        assert attn_res([source], query, eps=EPS, scale=scale, impl=impl) is source


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("low", ["source_0", "source_1"])
def test_mixed_dtypes(impl, low):
    """As under autocast, where the embedding is in fp32 and the sub-layers are not."""
    block = Block()
    tensors = {
        name: tensor.bfloat16() if name.startswith((low, "update")) else tensor
        for name, tensor in block.tensors.items()
    }
    for mix in (block.two_phases, block.direct):
        ours = block.run(impl, tensors, mix=mix)
        # the gradients of tensors in bf16 are rounded to it, here once and there once for each use
        assert_close_to(ours, block.run("reference", tensors, mix=mix), 1e-2)
        assert ours["gradient of update_0"].dtype is ours[f"gradient of {low}"].dtype is torch.bfloat16
        assert ours["gradient of source_2"].dtype is torch.float32
        assert ours["output 1"].dtype is torch.float32


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl):
    block = Block()
    expected = block.run(impl)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = block.run(impl)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_huge_logits_stay_finite(impl):
    block = Block(spread=1e4)
    outputs = block.run(impl)
    assert all(x.isfinite().all() for x in outputs.values())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("other", [float("nan"), 100.0])
def test_tokens_do_not_see_each_other(impl, other):
    block = Block((5, 48), norm=False)
    clean = block.run(impl)
    tensors = {name: tensor.detach().clone() for name, tensor in block.tensors.items()}
    for name, tensor in tensors.items():
        if name.startswith(("source", "update")):
            tensor[1] = other
    spoiled = block.run(impl, tensors)
    kept = [0, 2, 3, 4]
    for name in clean:
        # a NaN anywhere makes the gradients of parameters NaN in any case
        if clean[name].ndim == 2 and not (math.isnan(other) and name.startswith("gradient")):
            assert torch.equal(clean[name][kept], spoiled[name][kept]), name


@needs_triton
@pytest.mark.parametrize("sources", [1, 3])
def test_phase_1_of_few_tokens_is_that_of_many(sources, monkeypatch):
    tensors = [draw(5, 48, seed=i) for i in range(sources)], [draw(48, seed=8 + i) for i in range(3)]
    results = []
    for many_tokens in (1, 100):
        monkeypatch.setattr(attn_res_triton, "MANY_TOKENS", many_tokens)
        outputs, log_sum_exps, _ = attn_res_phase_1(*tensors, eps=EPS, impl="triton")
        grads = torch.autograd.grad(sum(map(torch.sum, [*outputs, *log_sum_exps])), [*tensors[0], *tensors[1]])
        results.append([*outputs, *log_sum_exps, *grads])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@needs_triton
def test_typed_operations():
    sources, (query, gain, norm) = [draw(3, 48, seed=i) for i in range(2)], [draw(48, seed=5 + i) for i in range(3)]
    bias, update = draw(1), draw(3, 48, seed=9)
    check = partial(torch.library.opcheck, raise_exception=True)
    k = attn_res_triton
    check(k.run_attn_res.typed, (sources, query, gain, bias, norm, EPS, 2, True))
    check(k.run_attn_res_phase_1.typed, (sources, [query, gain], [gain, norm], EPS, True))
    output, log_sum_exp = sources[0], draw(3, seed=11)
    check(
        k.run_attn_res_phase_2.typed,
        (output, log_sum_exp, sources[1], update, query, gain, bias, norm, [], EPS, 1, True),
    )


@needs_triton
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_compiles_without_breaks(recompute):
    block = Block(recompute=recompute)
    for mix in (block.two_phases, block.direct):
        compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
        assert_close_to(block.run("triton", mix=compiled), block.run("triton", mix=mix), 1e-6)


@needs_triton
def test_compiles_with_a_dynamic_number_of_tokens():
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Block(sites=2).two_phases, fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (5, 8, 13):
        block = Block((tokens, 48), sites=2)
        assert_close_to(block.run("triton", mix=compiled), block.run("triton"), 1e-6)
    assert len([graph for graph in graphs.graphs if len(graph.graph.nodes)]) == 1


@needs_triton
def test_operations_are_recorded():
    """By whatever watches the operations that run; a kernel that is launched outside of one goes unseen."""
    block, names = Block(sites=2), list(Block(sites=2).tensors)

    def gradients(*tensors):
        outputs = block.two_phases(dict(zip(names, tensors, strict=True)), "triton")
        return torch.autograd.grad([output.square().sum() for output in outputs], tensors)

    recorded = make_fx(gradients)(*block.tensors.values())
    others = [(2 * tensor.detach()).requires_grad_() for tensor in block.tensors.values()]
    # there the gradients of what is handed on are added in another order
    torch.testing.assert_close(recorded(*others), list(gradients(*others)), atol=1e-4, rtol=1e-5)


class TestErrors:
    def test_unknown_impl_and_scale(self):
        with pytest.raises(ValueError, match="impl='cuda': must be one of auto, triton, reference"):
            attn_res([draw(2, 4)], draw(4), eps=EPS, impl="cuda")
        with pytest.raises(ValueError, match="scale='max': must be one of mean, sum"):
            attn_res([draw(2, 4)], draw(4), eps=EPS, scale="max")

    def test_explicit_kernel_does_not_fall_back(self):
        with pytest.raises(RuntimeError, match="impl='triton'"):
            attn_res([draw(2, 4, dtype=torch.float64)] * 2, draw(4), eps=EPS, impl="triton")
        with pytest.raises(RuntimeError, match="impl='triton'"):
            attn_res([torch.zeros(2, 4, device="meta")] * 2, draw(4), eps=EPS, impl="triton")

    @needs_triton
    def test_hidden_size(self):
        with pytest.raises(RuntimeError, match="supports hidden sizes from 1 to 32768, not 32769"):
            attn_res(
                [torch.zeros(1, 32769, device=DEVICE)] * 2, torch.zeros(32769, device=DEVICE), eps=EPS, impl="triton"
            )

    def test_sources(self):
        with pytest.raises(ValueError, match="sources is empty"):
            attn_res([], draw(4), eps=EPS)
        with pytest.raises(
            ValueError, match=r"sources\[1\] has shape \[3, 4\]: must be that of sources\[0\], \[2, 4\]"
        ):
            attn_res([draw(2, 4), draw(3, 4)], draw(4), eps=EPS)
        with pytest.raises(ValueError, match=r"sources\[0\] has shape \[\]"):
            attn_res_weights([torch.zeros(())], draw(4), eps=EPS)

    def test_parameters(self):
        source = draw(2, 4)
        with pytest.raises(ValueError, match=r"pseudo_query has shape \[5\]: must be \[d\] = \[4\]"):
            attn_res([source], draw(5), eps=EPS)
        with pytest.raises(ValueError, match=r"output_norm_weight has shape \[1\]"):
            attn_res([source], draw(4), eps=EPS, output_norm_weight=draw(1))
        with pytest.raises(ValueError, match=r"norm_weights\[1\] has shape \[2\]"):
            attn_res_phase_1([source], [draw(4)] * 2, [draw(4), draw(2)], eps=EPS)
        with pytest.raises(ValueError, match="2 pseudo_queries and 1 norm_weights"):
            attn_res_phase_1([source], [draw(4)] * 2, [draw(4)], eps=EPS)
        with pytest.raises(ValueError, match=r"bias has shape \[2\]"):
            attn_res([source], draw(4), eps=EPS, bias=draw(2))

    def test_phase_2(self):
        output, log_sum_exp, query = draw(2, 4), draw(2), draw(4)
        phase_2 = partial(attn_res_phase_2, eps=EPS, num_sources=2)
        with pytest.raises(ValueError, match="partial and update are both None"):
            phase_2(output, log_sum_exp, None, None, query)
        with pytest.raises(ValueError, match=r"update has shape \[3, 4\]: must be that of output, \[2, 4\]"):
            phase_2(output, log_sum_exp, None, draw(3, 4), query)
        with pytest.raises(ValueError, match=r"log_sum_exp has shape \[3\]: must be \[2\]"):
            phase_2(output, draw(3), None, output, query)


@needs_triton
def test_compiles_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_attn_res.py")
    assert {launch["target"] for launch in compiled} == {gpu_target}
    for launch in compiled:
        assert launch["shared_memory"] <= launch["shared_memory_limit"], launch
        if launch["wide"]:
            assert launch["wide_loads"], launch


class TestAdditive:
    """`attn_res_additive`: the stream and what the mix has beyond the mean."""

    def test_vector(self):
        """Numbers of another implementation, in float64, of sub-layers that roll and scale what they read."""
        double = partial(torch.tensor, dtype=torch.float64)
        stream = double([1, -0.5, 0.25, 2])
        sources = [stream]
        expected = {
            2: (
                [0.4816486285, 0.5183513715],
                [2.2058410587, 1.1725568332, 1.1164896003, 2.3222922048],
            ),
            3: (
                [0.3335890458, 0.3659828226, 0.3004281316],
                [2.8703360718, 1.8011662583, 2.3018984773, 3.4693621208],
            ),
        }
        for site in (1, 2, 3):
            query = double([0.1 * site, -0.05 * site, 0.2, -0.1])
            read = attn_res_additive(stream, sources, query, eps=EPS)
            if site == 1:
                assert torch.equal(read, stream)
            else:
                weights, stream_after = (double(row) for row in expected[site])
                torch.testing.assert_close(attn_res_weights(sources, query, eps=EPS), weights, atol=2e-10, rtol=0)
            if site == 2:
                expected_read = double([2.0929370654, 0.0902786885, 0.0312370086, 2.1467611841])
                torch.testing.assert_close(read, expected_read, atol=4e-10, rtol=0)
            rms = read / (read.square().mean() + EPS).sqrt()
            update = (0.5 + 0.1 * site) * rms.roll(site) + 0.05 * site
            stream, sources = stream + update, [*sources, update]
            if site > 1:
                torch.testing.assert_close(stream, stream_after, atol=4e-10, rtol=0)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", ["mean", "sum"])
    def test_a_query_of_zeros_adds_nothing(self, impl, dtype, scale):
        for count in (1, 2, 3, 7):
            stream, *sources = (draw(3, 48, dtype=dtype, seed=i) for i in range(count + 1))
            query, bias = (torch.zeros(n, device=DEVICE, requires_grad=True) for n in (48, 1))
            options = {"eps": EPS, "bias": bias, "scale": scale, "impl": impl}
            read = attn_res_additive(stream, sources, query, draw(48), **options)
            assert torch.equal(read, stream) and read.dtype is dtype
            grads = torch.autograd.grad(read, [stream, query], torch.ones_like(read), allow_unused=count == 1)
            assert torch.equal(grads[0], torch.ones_like(stream))
            assert count == 1 or grads[1].abs().max() > 1e-3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", ["mean", "sum"])
    @needs_triton
    @pytest.mark.triton
    def test_kernel(self, dtype, scale):
        stream, query, gain, bias, *sources = (
            draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(3, 48), (48,), (48,), (1,)] + 3 * [(3, 48)])
        )
        results = {}
        for impl, wide in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
            leaves = [each.detach().to(wide).requires_grad_() for each in (stream, query, gain, bias, *sources)]
            read = attn_res_additive(
                leaves[0], leaves[4:], *leaves[1:3], eps=EPS, bias=leaves[3], scale=scale, impl=impl
            )
            grads = torch.autograd.grad(read, leaves, draw(3, 48, seed=9).to(wide))
            results[impl, wide] = [read, *grads]
        exact = results["reference", torch.float64]
        # the mix and the mean are rounded before they are subtracted
        slack = 4 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 2e-5
        for each, number in zip(results["triton", dtype], exact, strict=True):
            assert (each.double() - number).norm() <= slack * number.norm() + slack

    def test_sum_is_the_sum_where_the_sources_add_up(self):
        sources, query = [draw(3, 48, dtype=torch.float64, seed=i) for i in range(4)], draw(48, dtype=torch.float64)
        torch.testing.assert_close(
            attn_res_additive(sum(sources), sources, query, eps=EPS, scale="sum"),
            attn_res(sources, query, eps=EPS, scale="sum"),
        )

    def test_a_stream_of_another_shape(self):
        with pytest.raises(ValueError, match=r"sources\[0\] has shape \[3, 8\]: must be that of stream, \[3, 4\]"):
            attn_res_additive(torch.ones(3, 4), [torch.ones(3, 8)], torch.ones(8), eps=EPS)
