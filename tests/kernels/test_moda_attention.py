# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`moda_attention` and its streams: against fixed numbers and plain Python; kernels on a GPU or else interpreted."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from depthmix.kernels import (
    DepthStream,
    depth_dispatch,
    moda_attention,
    moda_attention_joint,
    moda_attention_over_stream,
    moda_attention_weights,
    moda_sequence_attention,
    moda_stream,
)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(depth_dispatch.triton is None, reason="needs Triton")
IMPLS = ("reference", "auto", pytest.param("triton", marks=needs_triton))
FAST_IMPLS = IMPLS[1:]
EXPLORE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
INPUTS = ("query", "key", "value", "depth_keys", "depth_values", "depth_query")
INFINITY = float("inf")


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def inputs(
    batch=2, kv_heads=2, group=2, tokens=5, length=None, head_dim=8, slots=3, *, other_query=False, dtype=torch.float32
):
    """Random tensors by name."""
    length = tokens if length is None else length
    rows, slot = (batch, kv_heads * group, tokens, head_dim), (slots, batch, tokens, kv_heads, head_dim)
    shapes = [rows, *[(batch, kv_heads, length, head_dim)] * 2, slot, slot, *[rows] * other_query]
    return {
        name: draw(*shape, dtype=dtype, seed=i) for i, (name, shape) in enumerate(zip(INPUTS, shapes, strict=False))
    }


def run(tensors, impl, dtype=None, grad=None, call=moda_attention, **options):
    """Output, log-sum-exp, and gradients of all tensors."""
    leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}
    output, lse = call(**leaves, return_lse=True, impl=impl, **options)
    grad = draw(*output.shape, seed=100) if grad is None else grad
    grads = torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype), allow_unused=True)
    named = {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"output": output.detach(), "lse": lse} | named


def assert_close_to(actual, expected, tolerance):
    """By the norm of each tensor; infinities at the same places."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        tensor = torch.zeros(1) if tensor is None else tensor
        ours = torch.zeros_like(tensor) if actual[name] is None else actual[name]
        assert ours.shape == tensor.shape or not tensor.any(), name
        assert torch.equal(ours.isinf(), tensor.isinf()), name
        ours, tensor = (x.double().masked_fill(x.isinf(), 0.0) for x in (ours, tensor))
        error = (ours - tensor).norm() / (tensor.norm() + 1e-6)
        assert error <= tolerance, f"{name}: {error}"


def random_mask(batch=2, heads=1, tokens=5, length=5):
    """Of booleans; the third token sees nothing."""
    mask = draw(batch, heads, tokens, length, seed=50) > -0.3
    mask[:, :, 2] = False
    return mask


def vector(*shape, seed):
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((31 * seed + 17 * index + 7) % 23 - 11).double() / 8).view(shape).to(DEVICE)


VECTOR = {
    "output": "-0.101167,0.367949 -0.306784,-0.775415 0.487125,-0.262875 -0.005671,-0.755671 -0.230446,-0.142086 "
    "-0.330861,-0.853320 0.600910,-0.149090 -0.070209,-0.820209 0.426636,-0.323364 -0.249770,-0.999770 "
    "0.647591,-0.102409 -0.060144,-0.810144",
    "lse": "1.100994,1.782761,0.858018,2.347689 1.409137,1.939860,1.396602,2.472322 "
    "1.582125,2.444712,1.859805,1.904972",
    "mass": "0.820882,0.192545,0.482706,0.943754 0.603193,0.166563,0.295071,0.883390 "
    "0.556698,0.168115,0.186300,0.704251",
    "gradient of query": "-0.346080,0.222481 0.181357,-0.159809 -0.316988,0.492039 0.082595,-0.061146 "
    "0.090753,0.479503 0.033403,-0.080314 -0.398134,0.562625 0.087444,-0.091415 -0.068001,-0.208648 "
    "-0.088721,-0.092761 -0.021886,-0.076447 -0.070921,-0.073506",
    "gradient of key": "0.298861,-0.249346 -0.206483,0.291689 0.025113,-0.120646 -0.040581,0.103611 "
    "-0.066545,0.024710 0.013996,-0.001022",
    "gradient of value": "1.380730,0.222174 -0.470248,-0.760812 0.091430,-0.155958 -0.368033,-0.181636 "
    "0.109753,0.171188 -0.216695,0.348465",
    "gradient of depth_keys": "-0.002357,-0.017948 -0.025534,0.018835 0.021910,0.021040 -0.006109,-0.061859 "
    "0.083598,-0.040826 0.001248,0.016156 -0.215190,0.200888 0.187306,-0.174357 -0.183227,0.223071 "
    "0.133422,-0.193660 0.037837,-0.040943 -0.057266,0.000608",
    "gradient of depth_values": "0.004091,-0.387340 0.373550,-0.155508 -0.076550,-0.354611 0.217778,-0.189433 "
    "-0.121922,0.331568 -0.041850,0.096191 0.007301,-0.361338 0.389189,-0.151598 -0.079303,-0.378560 "
    "0.260346,-0.216289 -0.190529,0.412878 0.230964,-0.039380",
}


@pytest.mark.parametrize("impl", IMPLS)
def test_reference_vector(impl):
    """With tokens first, as they are written down."""
    tokens, heads, kv_heads, d, slots = 3, 4, 2, 2, 2
    dtype = torch.float32 if impl == "triton" else torch.float64
    shapes = [
        (tokens, heads, d),
        *[(tokens, kv_heads, d)] * 2,
        *[(slots, tokens, kv_heads, d)] * 2,
        (tokens, heads, d),
    ]
    *tensors, grad = (vector(*shape, seed=seed + 1) for seed, shape in enumerate(shapes))
    tensors = [x.unsqueeze(0).transpose(1, 2) for x in tensors[:3]] + [x.unsqueeze(1) for x in tensors[3:]]
    tensors = {name: tensor.to(dtype) for name, tensor in zip(INPUTS, tensors, strict=False)}
    results = run(tensors, impl, grad=grad.unsqueeze(0).transpose(1, 2))
    weights = moda_attention_weights(tensors["query"], tensors["key"], tensors["depth_keys"])
    results["mass"] = weights[..., tokens:].sum(-1)
    for name, numbers in VECTOR.items():
        expected = torch.tensor([float(x) for part in numbers.split() for x in part.split(",")], device=DEVICE)
        actual = results[name] if "depth" in name else results[name].transpose(1, 2)
        torch.testing.assert_close(actual.flatten().float(), expected, atol=3e-6, rtol=0, msg=name)


def looped_attention(query, key, value, depth_keys, depth_values, depth_query, scaling, visible, bias):
    """One row, in plain Python over lists: its output and log-sum-exp."""
    dot = lambda x, y: math.fsum(a * b for a, b in zip(x, y, strict=True))  # noqa: E731
    columns = [(scaling * dot(query, k) + bias[u], value[u]) for u, k in enumerate(key) if visible[u]]
    columns += [(scaling * dot(depth_query, k), v) for k, v in zip(depth_keys, depth_values, strict=True)]
    if not columns:
        return [0.0] * len(query), -INFINITY
    highest = max(score for score, _ in columns)
    total = math.fsum(math.exp(score - highest) for score, _ in columns)
    mixed = [math.fsum(math.exp(score - highest) * v[j] for score, v in columns) / total for j in range(len(query))]
    return mixed, highest + math.log(total)


@settings(EXPLORE, max_examples=60)
@given(
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tokens=st.integers(1, 3),
    earlier=st.integers(0, 3),
    head_dim=st.integers(1, 5),
    slots=st.integers(0, 3),
    masking=st.sampled_from(["causal", "none", "bool", "additive"]),
    other_query=st.booleans(),
    scaling=st.sampled_from([None, 0.3]),
    impl=st.sampled_from(["reference", "auto"]),
)
def test_equals_plain_loops(kv_heads, group, tokens, earlier, head_dim, slots, masking, other_query, scaling, impl):
    length = tokens + earlier
    tensors = inputs(
        *(1, kv_heads, group, tokens, length, head_dim, slots), other_query=other_query, dtype=torch.float64
    )
    visible = torch.ones(tokens, length, dtype=torch.bool)
    bias, mask = torch.zeros(tokens, length, dtype=torch.float64), None
    if masking == "causal":
        visible = visible.tril(earlier)
    elif masking == "bool":
        visible = draw(tokens, length, seed=9).cpu() > 0
        mask = visible.view(1, 1, tokens, length).to(DEVICE)
    elif masking == "additive":
        visible, bias = draw(tokens, length, seed=9).cpu() > 0, draw(tokens, length, dtype=torch.float64, seed=8).cpu()
        mask = bias.masked_fill(~visible, -INFINITY).view(1, 1, tokens, length).to(DEVICE)
    output, lse = moda_attention(
        **tensors, scaling=scaling, attention_mask=mask, is_causal=masking == "causal", return_lse=True, impl=impl
    )
    lists = {name: tensor.tolist() for name, tensor in tensors.items()}
    for head in range(kv_heads * group):
        for token in range(tokens):
            c = head // group
            row, log_total = looped_attention(
                lists["query"][0][head][token],
                *(lists[name][0][c] for name in ("key", "value")),
                *([slot[0][token][c] for slot in lists[name]] for name in ("depth_keys", "depth_values")),
                lists.get("depth_query", lists["query"])[0][head][token],
                head_dim**-0.5 if scaling is None else scaling,
                *(visible[token].tolist(), bias[token].tolist()),
            )
            assert output[0, head, token].tolist() == pytest.approx(row, abs=1e-12)
            assert lse[0, head, token].item() == pytest.approx(log_total, abs=1e-12)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(impl, masked):
    tensors = inputs(1, 2, 2, 3, 3, 2, 2, other_query=True, dtype=torch.float64)
    mask = random_mask(1, 1, 3, 3) if masked else None
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    assert torch.autograd.gradcheck(
        lambda *x: moda_attention(*x[:5], depth_query=x[5], attention_mask=mask, impl=impl), leaves
    )


CASES = {
    "plain": {},
    "own query for the slots": {"other_query": True},
    "no slots": {"slots": 0},
    "one slot": {"slots": 1},
    "blocks of slots": {"slots": 35},
    "no groups": {"group": 1},
    "group of 3": {"group": 3, "kv_heads": 3},
    "group of 5": {"group": 5},
    "group of 7": {"group": 7, "kv_heads": 1},
    "blocks of heads": {"group": 33, "kv_heads": 1, "slots": 18, "batch": 1},
    "head dim 20": {"head_dim": 20},
    "head dim 80": {"head_dim": 80, "group": 1},
    "wide": {"head_dim": 256, "kv_heads": 1, "tokens": 3},
    "rows left over": {"tokens": 7, "kv_heads": 3, "head_dim": 64, "batch": 1},
    "one token": {"tokens": 1},
    "later tokens": {"tokens": 3, "length": 8},
    "one later token": {"tokens": 1, "length": 8},
    "not causal": {"is_causal": False},
    "not causal, other length": {"is_causal": False, "tokens": 4, "length": 3},
    "mask": {"attention_mask": random_mask()},
    "mask, no slots": {"attention_mask": random_mask(), "slots": 0},
    "mask of heads": {"attention_mask": random_mask(1, 4)},
    "additive mask": {"attention_mask": torch.where(random_mask(), draw(2, 1, 5, 5, seed=51), -INFINITY)},
    "scaling": {"scaling": 0.9},
}


def split(case):
    """Options of `inputs`, and of `moda_attention`."""
    of_call = {"is_causal", "attention_mask", "scaling"}
    return {k: v for k, v in case.items() if k not in of_call}, {k: v for k, v in case.items() if k in of_call}


@pytest.mark.parametrize("impl", FAST_IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, impl):
    shapes, options = split(CASES[case])
    tensors = inputs(**shapes)
    assert_close_to(run(tensors, impl, **options), run(tensors, "reference", torch.float64, **options), 2e-5)


@pytest.mark.parametrize("impl", FAST_IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_plain_torch(dtype, impl):
    tensors = inputs(2, 2, 3, 9, 9, 64, 20, other_query=True, dtype=dtype)
    exact, plain, ours = run(tensors, "reference", torch.float64), run(tensors, "reference"), run(tensors, impl)
    for name, tensor in exact.items():
        assert ours[name].dtype is (torch.float32 if name == "lse" else dtype)
        allowed, error = ((x[name].double() - tensor).norm() / tensor.norm() for x in (plain, ours))
        # the probabilities are rounded as in every flash attention; the interpreter truncates them
        assert error <= 3 * allowed + 4 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_without_slots_it_is_plain_attention(impl):
    tensors = inputs(slots=0, tokens=70, head_dim=16)
    expected = F.scaled_dot_product_attention(
        tensors["query"], tensors["key"], tensors["value"], is_causal=True, enable_gqa=True
    )
    with torch.enable_grad():
        assert torch.equal(run(tensors, impl)["output"], expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_row_that_sees_nothing(impl):
    """It is the mix of its slots; without slots zero, and so are its gradients."""
    for slots in (0, 2):
        tensors = inputs(slots=slots)
        results = run(tensors, impl, attention_mask=random_mask())
        assert not any(tensor.isnan().any() for tensor in results.values() if tensor is not None)
        row, lse = results["output"][:, :, 2], results["lse"][:, :, 2]
        if slots == 0:
            assert not row.any() and lse.isneginf().all()
            assert not results["gradient of query"][:, :, 2].any()
        else:
            query = tensors["query"][:, :, 2].unflatten(1, (2, 2))
            scores = torch.einsum("bkgd,nbkd->bkgn", query, tensors["depth_keys"][:, :, 2]) * 8**-0.5
            mixed = torch.einsum("bkgn,nbkd->bkgd", scores.softmax(-1), tensors["depth_values"][:, :, 2])
            torch.testing.assert_close(row, mixed.flatten(1, 2))
            torch.testing.assert_close(lse, scores.logsumexp(-1).flatten(1, 2))


@pytest.mark.parametrize("impl", IMPLS)
def test_huge_scores_stay_finite(impl):
    """Of the sequence, or of the slots, so that the other part has no weight."""
    for name in ("key", "depth_keys"):
        tensors = inputs()
        tensors[name] *= 1e4
        results = run(tensors, impl)
        assert all(tensor.isfinite().all() for tensor in results.values())
        assert_close_to(
            {"output": results["output"]}, {"output": run(tensors, "reference", torch.float64)["output"]}, 1e-4
        )


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_of_other_tokens_are_not_seen(impl):
    tensors = inputs()
    clean = run(tensors, impl)
    for name in ("depth_keys", "depth_values"):
        tensors[name] = tensors[name].clone()
        tensors[name][:, :, 1] = float("nan")
    spoiled = run(tensors, impl)
    kept = [0, 2, 3, 4]
    assert torch.equal(clean["output"][:, :, kept], spoiled["output"][:, :, kept])
    for name in ("depth_keys", "depth_values"):
        assert torch.equal(clean[f"gradient of {name}"][:, :, kept], spoiled[f"gradient of {name}"][:, :, kept])


@pytest.mark.parametrize("impl", IMPLS)
def test_log_sum_exp_carries_no_gradient(impl):
    tensors = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
    output, lse = moda_attention(**tensors, return_lse=True, impl=impl)
    assert output.requires_grad and not lse.requires_grad


@needs_triton
@pytest.mark.parametrize("case", ["plain", "blocks of heads"])
def test_equal_bits_from_equal_inputs(case):
    tensors = inputs(**CASES[case])
    first, second = run(tensors, "triton"), run(tensors, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "every second column": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2],
    "part of a larger tensor": lambda x: F.pad(x, (3, 2, 1, 4), value=float("nan"))[..., 1:-4, 3:-2],
    "first dimensions last": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "columns first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
}


@pytest.mark.parametrize("impl", FAST_IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_inputs_and_gradients_does_not_matter(layout, impl):
    tensors, grad = inputs(other_query=True), draw(2, 4, 5, 8, seed=100)
    expected = run(tensors, impl)

    def through_layout(**options):
        return moda_attention(**{k: LAYOUTS[layout](v) if k in INPUTS else v for k, v in options.items()})

    assert_close_to(run(tensors, impl, grad=LAYOUTS[layout](grad), call=through_layout), expected, 1e-6)


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_gradient_of_a_plain_sum(impl):
    """Its strides are zero."""
    tensors, ones = inputs(), torch.ones((), device=DEVICE).expand(2, 4, 5, 8)
    given, copied = run(tensors, impl, grad=ones), run(tensors, impl, grad=ones.contiguous())
    assert all(torch.equal(given[name], copied[name]) for name in given)


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_gradient_of_a_part_of_the_inputs(impl):
    tensors = inputs(other_query=True)
    expected = run(tensors, "reference")
    for chosen in INPUTS:
        leaves = {name: tensor.detach().requires_grad_(name == chosen) for name, tensor in tensors.items()}
        (grad,) = torch.autograd.grad(moda_attention(**leaves, impl=impl), leaves[chosen], draw(2, 4, 5, 8, seed=100))
        assert_close_to({"grad": grad}, {"grad": expected[f"gradient of {chosen}"]}, 2e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens(impl):
    assert run(inputs(tokens=0), impl)["output"].shape == (2, 4, 0, 8)
    assert run(inputs(batch=0), impl)["output"].shape == (0, 4, 5, 8)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast(impl):
    """Tensors of several dtypes are brought to autocast's, as by torch's attention; gradients keep their own."""
    tensors = inputs()
    tensors["value"] = tensors["value"].bfloat16()
    low = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    expected = run(low, impl)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = run(tensors, impl)
    assert actual["gradient of query"].dtype is torch.float32
    assert actual["gradient of value"].dtype is torch.bfloat16
    # the reference's backward is under autocast too
    assert_close_to(actual, expected, 1e-2)


DECODED = {
    "one token": {"length": 150},
    "no slots": {"length": 150, "slots": 0},
    "group of 3": {"length": 70, "group": 3},
    "several tokens": {"tokens": 3, "length": 150, "other_query": True},
    "nothing before": {"tokens": 4, "length": 4},
    "one program": {"tokens": 2, "length": 9, "batch": 3, "kv_heads": 3},
    "not causal": {"tokens": 3, "length": 70, "is_causal": False},
    "mask": {"tokens": 3, "length": 70, "attention_mask": random_mask(2, 1, 3, 70)},
    "mask, no slots": {"tokens": 3, "length": 70, "slots": 0, "attention_mask": random_mask(1, 4, 3, 70)},
    "additive mask": {
        "tokens": 3,
        "length": 70,
        "attention_mask": torch.where(random_mask(2, 1, 3, 70), draw(2, 1, 3, 70, seed=51), -INFINITY),
    },
    "head dim 20": {"length": 70, "head_dim": 20, "tokens": 2},
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", DECODED)
def test_decoding(case, dtype):
    shapes, options = split({"tokens": 1} | DECODED[case])
    tensors = inputs(**shapes, dtype=dtype)
    output, lse = moda_attention(**tensors, **options, return_lse=True, impl="triton")
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = moda_attention(**wide, **options, return_lse=True, impl="reference")
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    assert output.dtype is dtype and lse.dtype is torch.float32
    assert_close_to({"output": output, "lse": lse}, dict(zip(("output", "lse"), expected, strict=True)), tolerance)


@needs_triton
@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_where_a_mask_has_the_lowest_number(dtype, slots):
    """Unlike -inf it leaves the columns as they are to each other where there is nothing else."""
    tensors = inputs(tokens=1, length=4, slots=slots, dtype=dtype)
    mask = torch.full((1, 1, 1, 4), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    output, expected = (moda_attention(**tensors, attention_mask=mask, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)


@needs_triton
def test_decoding_takes_its_own_kernel(monkeypatch):
    monkeypatch.setattr(moda_attention_joint, "sequence_attention_forward", None)
    moda_attention(**inputs(tokens=1, length=20), impl="triton")
    with pytest.raises(TypeError):
        moda_attention(**inputs(tokens=17, length=20), impl="triton")


@needs_triton
def test_decoding_compiles_without_breaks():
    """With slots as a stream hands them over while it is compiled, each by itself."""
    tensors = inputs(tokens=1, length=20)

    def decode(query, key, value, depth_keys, depth_values):
        stream = DepthStream(3, impl="triton")
        handle = stream.handle
        for i in range(3):
            handle = stream.write(handle, depth_keys[i], depth_values[i])
        return moda_attention_over_stream(query, key, value, stream, handle, start=0, stop=3)

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = moda_attention(**tensors, impl="reference")
        for call in (decode, compiled):
            torch.testing.assert_close(call(*tensors.values()), expected)


def test_weights_are_those_of_the_output():
    tensors = inputs(other_query=True)
    weights = moda_attention_weights(
        *(tensors[name] for name in ("query", "key", "depth_keys")), depth_query=tensors["depth_query"]
    )
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, device=DEVICE))
    assert not weights[..., :5].triu(1).any()
    weights = weights.unflatten(1, (2, 2))
    mixed = torch.einsum("bkgts,bksd->bkgtd", weights[..., :5], tensors["value"])
    mixed = mixed + torch.einsum("bkgtn,nbtkd->bkgtd", weights[..., 5:], tensors["depth_values"])
    torch.testing.assert_close(moda_attention(**tensors), mixed.flatten(1, 2))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens, length", [(5, 5), (3, 8), (1, 4)])
@pytest.mark.parametrize("forward, backward", [("cpu", "math"), ("math", "cpu")])
def test_any_backward_follows_any_forward(forward, backward, tokens, length, masked):
    """What `moda_sequence_attention` can do without a GPU."""
    query, key, value, grad = (
        draw(2, h, t, 8, seed=i) for i, (h, t) in enumerate([(4, tokens), *[(2, length)] * 2, (4, tokens)])
    )
    mask = random_mask(2, 1, 3, 8)[:, :, :tokens, :length] if masked and tokens != 5 else None
    query, key, value, grad, mask = (x if x is None else x.cpu() for x in (query, key, value, grad, mask))
    results = []
    for backends in ((forward, backward), ("math", "math")):
        arguments = (mask, 0.3, True)
        output, lse = moda_sequence_attention.sequence_attention_forward(query, key, value, *arguments, backends[0])
        grads = moda_sequence_attention.sequence_attention_backward(
            grad, query, key, value, output, lse, *arguments, backends[1]
        )
        results.append(dict(enumerate([output, lse, *grads])))
    assert_close_to(*results, 1e-5)


@pytest.mark.parametrize("backend", ["cudnn", "flash", "math"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_kernels_of_torch_are_called_as_they_declare(backend, tokens):
    """On tensors without memory, since most of them need a GPU. That of "efficient" has a faulty declaration there."""
    query, key = (
        torch.empty(2, tokens, heads, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for heads in (6, 2)
    )
    arguments = (None, 0.1, True, backend)
    output, lse = moda_sequence_attention.sequence_attention_forward(query, key, key, *arguments)
    assert output.shape == query.shape and lse.shape == query.shape[:3] and lse.dtype is torch.float32
    grads = moda_sequence_attention.sequence_attention_backward(output, query, key, key, output, lse, *arguments)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=needs_triton)])
def test_typed_operation(implementation):
    tensors = {name: tensor.requires_grad_() for name, tensor in inputs(other_query=True).items()}
    query, key, value, keys, values, depth_query = tensors.values()
    for slots, other in (([], []), ([keys[:1], keys[1:]], [values[:1], values[1:]])):
        gate = torch.rand(4, requires_grad=True) if slots else None
        arguments = (query, key, value, slots, other, depth_query, random_mask(), gate, 0.5, True, implementation)
        torch.library.opcheck(moda_attention_joint.run_moda_attention.typed, (*arguments, True))


@pytest.mark.parametrize("impl", FAST_IMPLS)
def test_compiles_without_breaks(impl):
    for options in ({}, {"attention_mask": random_mask()}):
        tensors = inputs(other_query=True)
        compiled = torch.compile(moda_attention, fullgraph=True, backend="aot_eager")
        assert_close_to(run(tensors, impl, call=compiled, **options), run(tensors, impl, **options), 1e-6)


@needs_triton
def test_compiles_with_dynamic_sizes():
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moda_attention, fullgraph=True, backend=graphs, dynamic=True)
    for tokens, slots in ((5, 2), (8, 4), (13, 3)):
        tensors = inputs(tokens=tokens, slots=slots)
        assert_close_to(run(tensors, "triton", call=compiled), run(tensors, "triton"), 1e-6)
    assert graphs.frame_count == 1


@needs_triton
def test_operations_are_recorded():
    """By whatever watches the operations that run; a kernel that is launched outside of one goes unseen."""

    def gradients(*tensors):
        output = moda_attention(*tensors, impl="triton")
        return torch.autograd.grad(output.square().sum(), tensors)

    tensors = [tensor.requires_grad_() for tensor in inputs().values()]
    recorded = make_fx(gradients)(*tensors)
    others = [(2 * tensor.detach()).requires_grad_() for tensor in tensors]
    for ours, expected in zip(recorded(*others), gradients(*others), strict=True):
        assert torch.equal(ours, expected)


class Layers:
    """
    A stack of linear projections and attentions, each of which writes two slots and reads some of those before.
    `recompute` checkpoints the layers: reentrantly if it is `True`, not so if `False`.
    """

    batch, tokens, kv_heads, group, head_dim = 2, 5, 2, 2, 8

    def __init__(self, layers=3, window=None):
        self.layers, self.window = layers, window
        self.width = self.kv_heads * self.group * self.head_dim
        columns = self.width + 4 * self.kv_heads * self.head_dim
        self.weights = [draw(self.width, columns, seed=i) * self.width**-0.5 for i in range(layers)]
        self.weights = [weight.requires_grad_() for weight in self.weights]
        self.hidden = draw(self.batch, self.tokens, self.width, seed=50).requires_grad_()

    @property
    def leaves(self):
        return [self.hidden, *self.weights]

    def layer(self, hidden, weight, stream, stop, *handle):
        projected = hidden @ weight
        sizes = [self.width, *[self.kv_heads * self.head_dim] * 4]
        query, *slots = (x.unflatten(-1, (-1, self.head_dim)) for x in projected.split(sizes, -1))
        start = 0 if self.window is None else max(0, stop - self.window)
        rows = (x.transpose(1, 2) for x in (query, *slots[:2]))
        output = moda_attention_over_stream(*rows, stream, handle, start=start, stop=stop)
        return hidden + output.transpose(1, 2).flatten(2), *slots

    def __call__(self, impl, recompute=None, **options):
        stream = DepthStream(2 * self.layers, impl=impl, **options)
        hidden, handle, outputs = self.hidden, stream.handle, []
        for i, weight in enumerate(self.weights):
            arguments = (hidden, weight, stream, 2 * i, *handle)
            if recompute is None:
                hidden, *slots = self.layer(*arguments)
            else:
                hidden, *slots = checkpoint(self.layer, *arguments, use_reentrant=recompute)
            handle = stream.write(handle, *slots[:2])
            handle = stream.write(handle, *slots[2:])
            outputs.append(hidden)
        self.stream = stream
        return outputs

    def grads(self, impl, **options):
        return self.grads_of(self(impl, **options))

    def grads_of(self, outputs, leaves=None, **options):
        total = sum((output * draw(*output.shape, seed=70)).sum() for output in outputs[-1:])
        leaves = self.leaves if leaves is None else leaves
        return dict(enumerate(torch.autograd.grad(total, leaves, allow_unused=True, **options)))


class TestStream:
    @pytest.mark.parametrize("impl", FAST_IMPLS)
    @pytest.mark.parametrize("window", [None, 3])
    def test_adds_up_gradients_as_autograd_does(self, impl, window):
        layers = Layers(4, window)
        assert_close_to(layers.grads(impl), layers.grads("reference"), 2e-5)
        assert layers.grads(impl, grad_dtype=torch.float32).keys() == {0, 1, 2, 3, 4}

    @needs_triton
    def test_slots_are_shared_by_kernels(self):
        layers = Layers()
        layers("triton")
        assert layers.stream.is_shared
        layers("auto")
        assert layers.stream.is_shared == (DEVICE == "cuda")

    @needs_triton
    def test_unwritten_slots_are_not_read(self):
        """Fresh memory is not a number here."""
        layers = Layers(2)
        outputs = layers("triton")
        assert not layers.stream._slots[0].isnan().any()
        short = DepthStream(9, impl="triton")
        key = draw(2, 5, 2, 8)
        handle = short.write(short.handle, key, key)
        assert short._slots[0].isnan().any()
        query = draw(2, 4, 5, 8)
        mixed = moda_attention_over_stream(*(query, *[key.transpose(1, 2)] * 2, short, handle), start=0, stop=1)
        assert mixed.isfinite().all() and outputs[-1].isfinite().all()

    @pytest.mark.parametrize("impl", IMPLS)
    def test_backward_again(self, impl):
        layers = Layers()
        outputs = layers(impl)
        first, second = (layers.grads_of(outputs, retain_graph=True) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        # what the first gave has not been written over
        assert_close_to(first, layers.grads("reference"), 2e-5)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_backward_that_does_not_reach_every_writer(self, impl):
        layers = Layers()
        outputs = layers(impl)
        expected = layers.grads("reference")
        (last,) = layers.grads_of(outputs, layers.weights[-1:], retain_graph=True).values()
        assert_close_to({0: last}, {0: expected[3]}, 2e-5)
        assert_close_to(layers.grads_of(outputs), expected, 2e-5)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_gradients_of_several_outputs(self, impl):
        layers = Layers()

        def grads(impl):
            outputs = layers(impl)
            return dict(enumerate(torch.autograd.grad([output.sum() for output in outputs], layers.leaves)))

        assert_close_to(grads(impl), grads("reference"), 2e-5)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_checkpointing(self, impl, reentrant):
        layers = Layers()
        expected = layers.grads("reference")
        outputs = layers(impl, recompute=reentrant)
        for tensor in layers.leaves:
            tensor.grad = None
        (outputs[-1] * draw(*outputs[-1].shape, seed=70)).sum().backward()
        assert_close_to({i: tensor.grad for i, tensor in enumerate(layers.leaves)}, expected, 2e-5)

    @needs_triton
    def test_reentrant_checkpointing_within_reentrant_checkpointing(self):
        layers = Layers()
        expected, plain = layers.grads("reference"), layers.layer
        layers.layer = lambda *arguments: checkpoint(plain, *arguments, use_reentrant=True)
        outputs = layers("triton", recompute=True)
        for tensor in layers.leaves:
            tensor.grad = None
        (outputs[-1] * draw(*outputs[-1].shape, seed=70)).sum().backward()
        assert_close_to({i: tensor.grad for i, tensor in enumerate(layers.leaves)}, expected, 2e-5)

    @needs_triton
    def test_compiled_layers_read_shared_slots_outside_of_the_compiler(self, monkeypatch):
        layers = Layers()
        expected, read, traced = layers.grads("reference"), DepthStream._read, []

        def spy(self, *arguments):
            traced.append(torch.compiler.is_compiling())
            return read(self, *arguments)

        monkeypatch.setattr(DepthStream, "_read", spy)
        layers.layer = torch.compile(layers.layer, backend="eager")
        assert_close_to(layers.grads("triton"), expected, 2e-5)
        assert layers.stream.is_shared and traced and not any(traced)

    @pytest.mark.parametrize("impl", IMPLS)
    def test_without_gradients(self, impl):
        layers = Layers()
        expected = layers("reference")[-1]
        with torch.no_grad():
            torch.testing.assert_close(layers(impl)[-1], expected.detach(), atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("window", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 7)), 3, 20])
    def test_window_without_gradients(self, impl, window):
        """A ring of so many slots, whatever part of it is read; with gradients all are kept."""
        slots = [draw(1, 3, 2, 8, seed=i) for i in range(14)]
        query, key, value = (draw(1, heads, 3, 8, seed=20 + i) for i, heads in enumerate((4, 2, 2)))
        stream = DepthStream(7, impl=impl, window=window)
        handle = stream.handle
        for stop in range(1, 8):
            handle = stream.write(handle, slots[2 * stop - 2], slots[2 * stop - 1])
            oldest = max(0, stop - window)
            for start in range(oldest, stop):
                read = moda_attention_over_stream(query, key, value, stream, handle, start=start, stop=stop)
                stacked = (torch.stack(slots[2 * start + i : 2 * stop : 2]) for i in range(2))
                expected = moda_attention(query, key, value, *stacked, impl="reference")
                torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-5)
                for i, found in enumerate(stream.slots(handle, start, stop)):
                    assert all(map(torch.equal, found, slots[2 * start + i : 2 * stop : 2]))
            if oldest:
                with pytest.raises(
                    ValueError, match=f"only the {window} most recent slots are kept, from {oldest} on"
                ):
                    stream.slots(handle, oldest - 1, stop)
        assert [tuple(tensor.shape) for tensor in handle] == [(min(window, 7), 1, 3, 2, 8)] * 2

    @pytest.mark.parametrize("impl", FAST_IMPLS)
    def test_autocast(self, impl):
        layers = Layers()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            ours, expected = layers.grads(impl), layers.grads("reference")
        assert_close_to(ours, expected, 3e-2)

    @pytest.mark.parametrize("impl", FAST_IMPLS)
    def test_compiles_without_breaks(self, impl):
        layers = Layers()
        compiled = torch.compile(lambda: layers(impl), fullgraph=True, backend="aot_eager")
        assert_close_to(layers.grads_of(compiled()), layers.grads("reference"), 2e-5)

    @needs_triton
    def test_slots_on_another_device(self, monkeypatch):
        """As where the layers of a model are spread over devices; a copy stands for a move."""
        layers = Layers()
        expected = layers.grads("reference")
        monkeypatch.setattr(
            moda_stream.DepthStream,
            "_read",
            lambda self, start, stop, device: [slots[start:stop].clone() for slots in self._slots],
        )
        assert_close_to(layers.grads("triton"), expected, 2e-5)

    def test_errors(self):
        stream, slot, query = DepthStream(1), draw(2, 5, 2, 8), draw(2, 4, 5, 8)
        with pytest.raises(ValueError, match=r"key has shape \[5, 2, 8\], value \[2, 5, 2, 8\]: must be \[B, T"):
            stream.write(stream.handle, slot[0], slot)
        handle = stream.write(stream.handle, slot, slot)
        with pytest.raises(ValueError, match="slots=1: all have been written"):
            stream.write(handle, slot, slot)
        with pytest.raises(ValueError, match="start=0, stop=2: must be within the 1 slots written"):
            moda_attention_over_stream(query, *[slot.transpose(1, 2)] * 2, stream, handle, start=0, stop=2)
        with pytest.raises(ValueError, match="impl='cuda': must be one of auto, triton, reference"):
            DepthStream(1, impl="cuda")

    @needs_triton
    def test_shared_slots_have_one_shape(self):
        stream, slot = DepthStream(2, impl="triton"), draw(2, 5, 2, 8)
        handle = stream.write(stream.handle, slot, slot)
        with pytest.raises(ValueError, match=r"key has shape \[2, 4, 2, 8\] and dtype torch.float32, .* slots before"):
            stream.write(handle, slot[:, :4], slot[:, :4])
        with pytest.raises(ValueError, match=r"value torch.float16: must be those of the slots before"):
            stream.write(handle, slot, slot.half())
        with pytest.raises(RuntimeError, match="impl='triton'"):
            stream = DepthStream(2, impl="triton")
            stream.write(stream.handle, slot.double(), slot.double())


class TestErrors:
    def test_impl(self):
        with pytest.raises(ValueError, match="impl='cuda': must be one of auto, triton, reference"):
            moda_attention(**inputs(), impl="cuda")
        with pytest.raises(RuntimeError, match="impl='triton'"):
            moda_attention(**inputs(dtype=torch.float64), impl="triton")
        meta = {name: tensor.to("meta") for name, tensor in inputs().items()}
        with pytest.raises(RuntimeError, match="impl='triton'"):
            moda_attention(**meta, impl="triton")
        assert moda_attention(**meta).is_meta

    @needs_triton
    def test_what_the_kernels_support(self):
        with pytest.raises(RuntimeError, match="supports head dims up to 256, not 257"):
            moda_attention(**inputs(1, 1, 1, 1, 1, 257, 1), impl="triton")
        with pytest.raises(RuntimeError, match="supports up to 128 query heads for each key-value head, not 129"):
            moda_attention(**inputs(1, 1, 129, 1, 1, 8, 1), impl="triton")
        mask = torch.zeros(1, 1, 5, 5, device=DEVICE, requires_grad=True)
        with pytest.raises(RuntimeError, match="gives attention_mask no gradient"):
            moda_attention(**inputs(), attention_mask=mask, impl="triton")
        moda_attention(**inputs(), attention_mask=mask).sum().backward()
        assert mask.grad.any()

    @pytest.mark.parametrize(
        "changed, message",
        [
            ({"query": draw(2, 5, 5, 8)}, "5 query heads, 2 key-value heads: the latter must divide the former"),
            ({"query": draw(4, 5, 8)}, r"query has shape \[4, 5, 8\], key \[2, 2, 5, 8\]: must be \[B, Hq, T, d\]"),
            (
                {"value": draw(2, 2, 6, 8)},
                r"value has shape \[2, 2, 6, 8\]: must be \[B, Hkv, S, d\] = \[2, 2, 5, 8\]",
            ),
            ({"depth_keys": draw(3, 2, 2, 5, 8)}, r"depth_keys has shape .* = \[n, 2, 5, 2, 8\]"),
            ({"depth_values": draw(2, 2, 5, 2, 8)}, r"depth_values has shape .* with one n for keys and values"),
            ({"depth_query": draw(2, 4, 4, 8)}, r"depth_query has shape \[2, 4, 4, 8\]: must be that of query"),
            ({"value": draw(2, 2, 5, 8).double()}, "have the dtypes torch.float32, torch.float64: must be of one"),
            ({"attention_mask": random_mask(3)}, r"attention_mask has shape .*: must be \[1 or 2, 1 or 4, T, S\]"),
            ({"attention_mask": random_mask().int()}, "attention_mask has dtype torch.int32: must be bool or"),
        ],
    )
    def test_shapes_and_dtypes(self, changed, message):
        with pytest.raises(ValueError, match=message):
            moda_attention(**inputs() | changed)

    def test_more_tokens_than_the_sequence_has(self):
        with pytest.raises(ValueError, match="5 tokens are the last of a sequence of 4: is_causal needs T <= S"):
            moda_attention(**inputs(tokens=5, length=4))


@needs_triton
def test_compiles_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_moda_attention.py")
    assert {launch["target"] for launch in compiled} == {gpu_target}
    for launch in compiled:
        assert launch["shared_memory"] <= launch["shared_memory_limit"], launch
        if launch["wide"]:
            assert launch["wide_loads"], launch


class TestGate:
    """A blend of the attention without slots and with them, by query head."""

    GATES = (-0.3, 0.0, 0.4, 1.0)

    @staticmethod
    def gated(*, dtype=torch.float32, **changes):
        tensors = inputs(other_query=True, **changes)
        heads = tensors["query"].shape[1]
        gates = torch.tensor(TestGate.GATES, device=DEVICE).repeat(heads // 4 + 1)[:heads]
        return {name: tensor.to(dtype) for name, tensor in tensors.items()} | {"gate": gates}

    @staticmethod
    def blended(gate, return_lse=True, impl="reference", **tensors):
        """The definition."""
        joint, lse = moda_attention(**tensors, return_lse=True, impl="reference")
        slots = {name: tensors[name][:0] for name in ("depth_keys", "depth_values")}
        alone = moda_attention(**tensors | slots, impl="reference")
        share = gate.to(joint.dtype)[:, None, None]
        return (1 - share) * alone + share * joint, lse

    @pytest.mark.parametrize("mask", [None, random_mask()], ids=["causal", "masked"])
    @pytest.mark.parametrize("impl", ["reference", "auto"])
    def test_is_the_blend_in_float64(self, impl, mask):
        tensors = self.gated(dtype=torch.float64) | {"gate": torch.tensor(self.GATES, device=DEVICE).double()}
        expected = run(tensors, "reference", call=self.blended, attention_mask=mask)
        assert_close_to(run(tensors, impl, attention_mask=mask), expected, 1e-12)

    @pytest.mark.parametrize("impl", FAST_IMPLS)
    @pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "group": 6, "slots": 20}, {"length": 9}], ids=str)
    def test_fast_forms(self, impl, changes):
        tensors = self.gated(**changes)
        expected = run(tensors, "reference", dtype=torch.float64)
        assert_close_to(run(tensors, impl), expected, 2e-5)
        assert run(tensors, impl)["gradient of gate"].dtype is torch.float32
        narrow = {name: tensor if name == "gate" else tensor.bfloat16() for name, tensor in tensors.items()}
        assert_close_to(run(narrow, impl), expected, 4e-2)

    @pytest.mark.parametrize("impl", ["auto", *FAST_IMPLS])
    def test_above_one(self, impl):
        """The sequence has then a negative weight in some rows."""
        dtype, tolerance = (torch.float64, 1e-9) if impl == "auto" else (torch.float32, 1e-4)
        tensors = self.gated(dtype=dtype) | {"gate": torch.tensor([1.5, 3.0, 1.1, 8.0], device=DEVICE).to(dtype)}
        tensors["depth_query"] = 2 * tensors["depth_query"]
        expected = run(tensors, "reference", dtype=torch.float64, call=self.blended)
        assert_close_to(run(tensors, impl), expected, tolerance)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("impl", IMPLS)
    def test_both_ends_bit_for_bit(self, impl, dtype):
        # so many tokens that the kernel for decoding is not taken, which rounds otherwise where there are slots
        tensors = inputs(tokens=40, slots=4, dtype=dtype)
        without = {name: tensors[name][:0] for name in ("depth_keys", "depth_values")}
        for gate, expected in ((0.0, tensors | without), (1.0, tensors)):
            gates = torch.full((4,), gate, device=DEVICE)
            assert torch.equal(moda_attention(**tensors, gate=gates, impl=impl), moda_attention(**expected, impl=impl))
        closed = run(tensors | {"gate": torch.zeros(4, device=DEVICE)}, impl)
        assert all(not closed[f"gradient of depth_{name}"].any() for name in ("keys", "values"))
        assert closed["gradient of gate"].abs().min() > 1e-2

    @needs_triton
    @pytest.mark.triton
    @torch.no_grad()
    @pytest.mark.parametrize("length", [1, 3, 300])
    def test_decoding(self, length):
        tensors = self.gated(tokens=1, length=length, slots=70, head_dim=16)
        expected, lse = self.blended(**{name: tensor.double() for name, tensor in tensors.items()})
        assert_close_to(
            dict(zip("ol", moda_attention(**tensors, return_lse=True, impl="triton"), strict=True)),
            {"o": expected, "l": lse},
            1e-5,
        )

    @pytest.mark.parametrize("impl", IMPLS)
    def test_over_a_stream(self, impl):
        tensors = self.gated()
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        stream = DepthStream(3, impl=impl)
        handle = stream.handle
        for key, value in zip(leaves["depth_keys"], leaves["depth_values"], strict=True):
            handle = stream.write(handle, key, value)
        rest = {name: leaf for name, leaf in leaves.items() if name not in ("depth_keys", "depth_values")}
        output = moda_attention_over_stream(**rest, stream=stream, handle=handle, start=0, stop=3)
        grads = torch.autograd.grad(output, list(leaves.values()), draw(*output.shape, seed=100))
        expected = run(tensors, "reference", dtype=torch.float64)
        ours = {"output": output} | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}
        assert_close_to(ours, {name: expected[name] for name in ours}, 2e-5)

    def test_weights(self):
        tensors = self.gated(dtype=torch.float64)
        weights = moda_attention_weights(
            *(tensors[name] for name in ("query", "key", "depth_keys")),
            depth_query=tensors["depth_query"],
            gate=tensors["gate"],
        )
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        sequence = tensors["value"][:, :, None].expand(-1, -1, 5, -1, -1)
        slots = tensors["depth_values"].permute(1, 3, 2, 0, 4)
        values = torch.cat([sequence, slots], dim=3).repeat_interleave(2, 1)
        mixed = torch.einsum("bhtn,bhtnd->bhtd", weights, values)
        torch.testing.assert_close(mixed, moda_attention(**tensors, impl="reference"))

    def test_a_row_by_hand(self):
        """Numbers of another implementation for one row: its two parts, their masses, and a gate of 1/4."""
        double = partial(torch.tensor, dtype=torch.float64)
        query = double([1, 0, 0]).view(1, 1, 1, 3)
        key, slot = (double([score, 0, 0]) for score in (0.7, -0.2))
        value, slot_value = (double(row) for row in ([1, -1, 0.5], [0, 2, -0.5]))
        leaves = [
            x.requires_grad_()
            for x in (
                *(query, key.view(1, 1, 1, 3), value.view(1, 1, 1, 3)),
                *(slot.view(1, 1, 1, 1, 3), slot_value.view(1, 1, 1, 1, 3), double([0.25])),
            )
        ]
        output = moda_attention(*leaves[:5], scaling=1.0, gate=leaves[5])
        grads = torch.autograd.grad(output, leaves, double([0.5, 1, -2]).view(1, 1, 1, 3))
        expected = double([0.9277373757, -0.783212127, 0.4277373757])
        torch.testing.assert_close(output.flatten(), expected, atol=2e-10, rtol=0)
        assert grads[5].item() == pytest.approx(1.3007272382, abs=2e-10)
        # of the logits, whose gradients the first channels are
        assert grads[3].flatten()[0].item() == pytest.approx(0.2311878458, abs=2e-10)
        assert grads[1].flatten()[0].item() == pytest.approx(-0.2311878458, abs=2e-10)

    def test_a_gate_of_another_shape(self):
        with pytest.raises(ValueError, match=r"gate has shape \[2\]: must be \[4\]"):
            moda_attention(**inputs(), gate=torch.ones(2))
