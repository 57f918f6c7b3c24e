# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
`norm_rotary_mix`, and the kernels behind it and behind `depth_value_mix`: on a GPU if there is one, else interpreted.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from depthmix.kernels import depth_value_mix, norm_rotary_mix, norm_rotary_mix_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# batch, key-value heads, group, tokens, head dim, sources
SHAPES = (
    (2, 2, 4, 9, 64, 2),
    (1, 3, 3, 5, 32, 1),
    (2, 1, 7, 4, 20, 3),
    (1, 2, 1, 33, 16, 0),
    (3, 2, 2, 1, 128, 1),
    (1, 1, 2, 3, 256, 6),
    (1, 2, 2, 3, 6, 2),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(shape, dtype=torch.float32, seed=0):
    """Random `[B, H, T, d]` in the layout of a projection's output."""
    batch, heads, tokens, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, tokens, heads, head_dim, generator=generator).to(DEVICE, dtype)
    return rows.transpose(1, 2)


class Layer:
    """A random layer: tensors by the name of the argument, and how to call the operation with them."""

    def __init__(
        self,
        batch,
        kv_heads,
        group,
        tokens,
        head_dim,
        sources,
        *,
        dtype=torch.float32,
        norms=True,
        rotary=True,
        gate=False,
        **options,
    ):
        small = (batch, kv_heads, tokens, head_dim)
        self.options = {"eps": 1e-6, **options}
        self.tensors = {"query": draw((batch, kv_heads * group, tokens, head_dim), dtype)}
        for i, name in enumerate(
            ("key", "value", *(f"{kind}_{n}" for n in range(sources) for kind in ("key", "value")))
        ):
            self.tensors[name] = draw(small, dtype, seed=i + 1)
        if norms:
            self.tensors["query_norm_weight"] = draw((1, 1, 1, head_dim), dtype, seed=101).flatten()
            self.tensors["key_norm_weight"] = draw((1, 1, 1, head_dim), dtype, seed=102).flatten()
        if gate:
            # as in a model, where mixing parameters stay wide
            self.tensors["gate"] = draw((1, 1, 1, kv_heads), seed=104).flatten()
        self.tables = {}
        if rotary:
            self.tables = {
                n: draw((1, 1, tokens, head_dim), dtype, seed=103 + i)[0] for i, n in enumerate(("cos", "sin"))
            }

    def run(self, impl, tensors=None, grads=None, dtype=None):
        """
        Results and gradients of the named tensors, with these incoming gradients of the results (random ones by
        default, None for a result that is not used).
        """
        tensors = self.tensors if tensors is None else tensors
        leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
        arguments = {n: t for n, t in leaves.items() if n in ("query", "key", "value", "gate") or n.endswith("weight")}
        for kind in ("key", "value"):
            arguments[f"source_{kind}s"] = [
                t for n, t in leaves.items() if n.startswith(f"{kind}_") and n[-1].isdigit()
            ]
        tables = {n: t.to(dtype or t.dtype) for n, t in self.tables.items()}
        outputs = norm_rotary_mix(**arguments, **tables, **self.options, impl=impl)
        if grads is None:
            grads = [draw(output.shape, seed=200 + i) for i, output in enumerate(outputs)]
        used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in used],
            list(leaves.values()),
            [grad.to(output.dtype) for output, grad in used],
            allow_unused=True,
        )
        named = dict(zip(("query", "key", "value"), outputs, strict=True))
        return named | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}


def error(actual, expected):
    difference, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return difference / size if size else difference


def assert_as_exact(actual, plain, exact):
    """Every tensor loses at most about what plain PyTorch in this dtype loses against fp64, and fp32 in between."""
    accumulation = 16 * torch.finfo(torch.float32).eps
    assert actual.keys() == plain.keys() == exact.keys()
    for name in exact:
        if exact[name] is None:
            assert actual[name] is None or (actual[name] == 0).all(), name
            continue
        assert actual[name].dtype == plain[name].dtype and actual[name].shape == plain[name].shape, name
        # the interpreter rounds to bf16 towards zero
        factor = 3 if actual[name].dtype is torch.bfloat16 and DEVICE == "cpu" else 1.5
        assert error(actual[name], exact[name]) <= factor * error(plain[name], exact[name]) + accumulation, name


def check(layer, **changes):
    actual = layer.run("triton", **changes)
    plain = layer.run("reference", **changes)
    exact = layer.run("reference", dtype=torch.float64, **changes)
    assert_as_exact(actual, plain, exact)


def unfused(query, key, value, cos, sin, query_norm, key_norm, key_norm_position, source_keys, source_values):
    """The same layer in other words: complex numbers for the rotation, einsum for the rest."""

    def norm(x, weight):
        return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6).sqrt() * weight

    def rotate(x):
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(
            cos[:, None, :, :half], sin[:, None, :, :half]
        )
        return torch.cat([turned.real, turned.imag], -1)

    query = rotate(norm(query, query_norm))
    key = rotate(norm(key, key_norm)) if key_norm_position == "before_rope" else norm(rotate(key), key_norm)
    keys, values = torch.stack([*source_keys, key]), torch.stack([*source_values, value])
    mean = query.unflatten(1, (key.shape[1], -1)).mean(2)
    weights = (torch.einsum("bhtd,nbhtd->nbht", mean, keys) / query.shape[-1] ** 0.5).softmax(0)
    return query, key, torch.einsum("nbht,nbhtd->bhtd", weights, values)


@pytest.mark.parametrize("key_norm_position", ["before_rope", "after_rope"])
def test_reference_is_the_layer_step_by_step(key_norm_position):
    layer = Layer(2, 2, 3, 5, 8, 2, key_norm_position=key_norm_position)
    tensors = {n: t.double() for n, t in layer.tensors.items()}
    angle = torch.randn(2, 5, 4, dtype=torch.float64, device=DEVICE)
    cos, sin = (torch.cat([table, table], -1) for table in (angle.cos(), angle.sin()))
    sources = [[tensors[f"{kind}_{n}"] for n in range(2)] for kind in ("key", "value")]
    norms = tensors["query_norm_weight"], tensors["key_norm_weight"]
    expected = unfused(*(tensors[n] for n in ("query", "key", "value")), cos, sin, *norms, key_norm_position, *sources)
    actual = norm_rotary_mix(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        cos,
        sin,
        query_norm_weight=norms[0],
        key_norm_weight=norms[1],
        key_norm_position=key_norm_position,
        source_keys=sources[0],
        source_values=sources[1],
        impl="reference",
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_gradcheck_of_the_reference():
    layer = Layer(1, 2, 2, 2, 4, 1)
    tensors = [t.double().requires_grad_() for t in layer.tensors.values()]
    tables = [t.double() for t in layer.tables.values()]

    def call(query, key, value, source_key, source_value, query_norm, key_norm):
        return norm_rotary_mix(
            query,
            key,
            value,
            *tables,
            query_norm_weight=query_norm,
            key_norm_weight=key_norm,
            source_keys=[source_key],
            source_values=[source_value],
            impl="reference",
        )

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.triton
class TestKernel:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_outputs_and_gradients(self, shape, dtype):
        check(Layer(*shape, dtype=dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape", [(2, 2, 4, 9, 64, 2), (1, 3, 3, 5, 20, 4), (2, 2, 2, 3, 7, 2), (1, 1, 1, 2, 1, 1)]
    )
    def test_mixing_alone(self, shape, dtype):
        """Which is `depth_value_mix`; here the head dim may be odd."""
        layer = Layer(*shape, dtype=dtype, norms=False, rotary=False)
        check(layer)
        tensors = layer.tensors
        keys, values = (
            [t for n, t in tensors.items() if n.startswith(kind) and n != kind] for kind in ("key_", "value_")
        )
        alone = depth_value_mix(tensors["query"], [*keys, tensors["key"]], [*values, tensors["value"]], impl="triton")
        assert torch.equal(alone, layer.run("triton")["value"])

    @pytest.mark.parametrize("sources", [0, 2])
    @pytest.mark.parametrize("parts", [{"norms": False}, {"rotary": False}, {"key_norm_position": "after_rope"}])
    def test_parts(self, parts, sources):
        check(Layer(2, 2, 2, 5, 16, sources, **parts))
        check(Layer(2, 2, 2, 5, 16, sources, dtype=torch.bfloat16, **parts))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("shape", "parts"),
        [
            ((2, 2, 4, 9, 64, 2), {}),
            ((1, 3, 3, 5, 20, 6), {"key_norm_position": "after_rope"}),
            ((2, 3, 2, 3, 7, 1), {"norms": False, "rotary": False}),
        ],
    )
    def test_gate(self, shape, parts, dtype):
        check(Layer(*shape, dtype=dtype, gate=True, **parts))

    @pytest.mark.parametrize("sources", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ends_of_the_gate(self, dtype, sources):
        """Without the mix and with all of it to the last bit, gradients too; and twice the same."""
        layer = Layer(2, 3, 2, 5, 16, sources, dtype=dtype, gate=True)
        ungated = Layer(2, 3, 2, 5, 16, sources, dtype=dtype).run("triton")
        at = {
            g: layer.run("triton", tensors=layer.tensors | {"gate": torch.full((3,), float(g), device=DEVICE)})
            for g in (0, 1)
        }
        assert torch.equal(at[0]["value"], layer.tensors["value"])
        assert torch.equal(at[0]["gradient of value"], draw((2, 3, 5, 16), seed=202).to(dtype))
        for n in range(sources):
            assert not at[0][f"gradient of key_{n}"].any() and not at[0][f"gradient of value_{n}"].any()
        assert at[0]["gradient of gate"].dtype is torch.float32 and at[0]["gradient of gate"].abs().min() > 1e-3
        assert all(torch.equal(at[1][name], tensor) for name, tensor in ungated.items())
        first, second = layer.run("triton"), layer.run("triton")
        assert all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize("norm", ["query_norm_weight", "key_norm_weight"])
    def test_one_norm(self, norm):
        layer = Layer(1, 2, 2, 5, 16, 1)
        check(layer, tensors={n: t for n, t in layer.tensors.items() if n != norm})

    @pytest.mark.parametrize("sources", [5, 17])
    def test_many_sources(self, sources):
        layer = Layer(2, 1, 2, 2, 8, sources)
        check(layer)
        check(Layer(1, 2, 2, 3, 8, sources, dtype=torch.bfloat16, norms=False, rotary=False))
        # of different layouts, and not aligned
        tensors = dict(layer.tensors)
        tensors["key_1"] = tensors["key_1"].contiguous()
        tensors["value_2"] = torch.cat([tensors["value_2"]] * 2, -1)[..., 1:9]
        check(layer, tensors=tensors)

    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: x.contiguous(),
            lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
            lambda x: torch.stack([x, x.neg()], -1)[..., 0],
            lambda x: torch.cat([x, x], 2)[:, :, x.shape[2] :],
            lambda x: x[:, :, :1].expand_as(x),
            lambda x: x[:, :1].expand_as(x),
            lambda x: x[..., :1].expand_as(x),
        ],
        ids=["heads_first", "channels_apart", "every_second", "offset", "one_token", "one_head", "one_channel"],
    )
    def test_layouts(self, layout):
        layer = Layer(2, 2, 2, 5, 16, 2)
        tensors = {n: layout(t) if t.ndim == 4 else t for n, t in layer.tensors.items()}
        check(layer, tensors=tensors)
        grads = [layout(draw(tensors[n].shape, seed=300)) for n in ("query", "key", "value")]
        check(layer, grads=grads)

    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: torch.stack([x, x.neg()], -1)[..., 0],
            lambda x: x[:1].expand_as(x),
            lambda x: torch.cat([x, x])[1:9],
        ],
        ids=["every_second", "one_channel", "offset"],
    )
    def test_layouts_of_the_weights(self, layout):
        layer = Layer(1, 2, 2, 5, 8, 1)
        check(layer, tensors={n: layout(t) if t.ndim == 1 else t for n, t in layer.tensors.items()})

    @pytest.mark.parametrize("unused", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
    def test_unused_results(self, unused):
        layer = Layer(1, 2, 2, 5, 16, 1)
        grads = [
            None if i in unused else draw(layer.tensors[n].shape) for i, n in enumerate(("query", "key", "value"))
        ]
        check(layer, grads=grads)

    def test_tables_of_every_batch_entry(self):
        layer = Layer(3, 2, 2, 5, 16, 1)
        layer.tables = {n: draw((3, 1, 5, 16), seed=400 + i)[:, 0] for i, n in enumerate(("cos", "sin"))}
        check(layer)
        # as a rotary embedding gives them to sequences with the same positions
        layer.tables = {n: t[:1].expand(3, -1, -1) for n, t in layer.tables.items()}
        check(layer)

    def test_mixed_dtypes(self):
        """As autocast has them: projections in low precision, norms and tables in fp32, sources in either."""
        layer = Layer(1, 2, 2, 5, 16, 1)
        tensors = {
            n: t.bfloat16() if n in ("query", "key", "value", "value_0") else t for n, t in layer.tensors.items()
        }
        check(layer, tensors=tensors)

    @pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 3)])
    def test_nothing_to_do(self, batch, tokens):
        results = Layer(batch, 2, 2, tokens, 16, 1).run("triton")
        assert results["query"].shape == (batch, 4, tokens, 16)
        assert (results["gradient of query_norm_weight"] == 0).all()

    @pytest.mark.parametrize(
        ("head_dim", "strides"), [(16, (1, 1, 2**31, 1)), (3, (1, 1, 1, 2**30))], ids=["tokens", "channels"]
    )
    def test_addresses_beyond_32_bits(self, head_dim, strides, monkeypatch):
        layer = Layer(1, 1, 2, 2, head_dim, 1, dtype=torch.bfloat16, rotary=False)
        expected = layer.run("triton")
        with monkeypatch.context() as patch:
            # only what is written takes memory on a CPU
            patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            far = torch.empty(2**31 + 16, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 1, 2, head_dim), strides)
        for name in ("key", "value", "key_0", "value_0"):
            far.copy_(layer.tensors[name])
            actual = layer.run("triton", tensors=layer.tensors | {name: far})
            assert all(torch.equal(actual[n], expected[n]) for n in expected), name

    def test_repeats_are_equal_bit_for_bit(self):
        layer = Layer(2, 2, 2, 9, 32, 2, dtype=torch.bfloat16)
        first, second = layer.run("triton"), layer.run("triton")
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_a_token_does_not_depend_on_the_others(self):
        """So that decoding gives the bits of a full forward."""
        layer = Layer(2, 2, 4, 9, 64, 2, dtype=torch.bfloat16)
        whole = layer.run("triton")
        tensors = {n: t[:, :, 4:5] if t.ndim == 4 else t for n, t in layer.tensors.items()}
        layer.tables = {n: t[:, 4:5] for n, t in layer.tables.items()}
        one = layer.run("triton", tensors=tensors)
        for name in ("query", "key", "value"):
            assert torch.equal(one[name], whole[name][:, :, 4:5]), name

    @torch.no_grad()
    def test_results_are_those_of_training(self):
        layer = Layer(2, 2, 2, 5, 16, 2)
        with torch.enable_grad():
            expected = layer.run("triton")
        sources = [[layer.tensors[f"{kind}_{n}"] for n in range(2)] for kind in ("key", "value")]
        names = ("query", "key", "value", "query_norm_weight", "key_norm_weight")
        actual = norm_rotary_mix(
            **{n: layer.tensors[n] for n in names},
            **layer.tables,
            source_keys=sources[0],
            source_values=sources[1],
            impl="triton",
        )
        assert all(torch.equal(x, expected[n]) for x, n in zip(actual, names[:3], strict=True))

    @pytest.mark.parametrize(
        ("parts", "sources"), [({}, 0), ({"gate": True}, 2), ({"norms": False, "rotary": False}, 2)]
    )
    def test_opcheck(self, parts, sources):
        layer = Layer(1, 2, 2, 3, 8, sources, **parts)
        tensors = {n: t.requires_grad_() for n, t in layer.tensors.items()}
        keys, values = (
            [*(tensors[f"{kind}_{n}"] for n in range(sources)), tensors[kind]] for kind in ("key", "value")
        )
        constants = [tensors.get(n) for n in ("query_norm_weight", "key_norm_weight", "gate")]
        tables = [layer.tables.get(n) for n in ("cos", "sin")]
        arguments = (tensors["query"], keys, values if sources else [], *constants, *tables, 0.3, 1e-6, True)
        torch.library.opcheck(norm_rotary_mix_triton.run_norm_rotary_mix.typed, (*arguments, True))

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning:torch.jit")
    @torch.no_grad()
    def test_what_records_operations_sees_it(self):
        query, *rest = Layer(1, 2, 2, 3, 8, 1).tensors.values()

        def call(query):
            return depth_value_mix(query, rest[:4:2], rest[1:4:2], impl="triton")

        traced = torch.jit.trace(call, query)
        recorded = make_fx(call)(query)
        for function in (traced, recorded):
            assert torch.equal(function(query + 1), call(query + 1))

    def test_whole_graph_with_a_dynamic_number_of_tokens(self):
        graphs, counts = CompileCounterWithBackend("aot_eager"), set()
        compiled = torch.compile(norm_rotary_mix, fullgraph=True, dynamic=True, backend=graphs)
        for tokens in (3, 5, 8):
            layer = Layer(2, 2, 2, tokens, 16, 1)
            names = ("query", "key", "value", "query_norm_weight", "key_norm_weight")
            tensors = {n: layer.tensors[n].requires_grad_() for n in names}
            sources = {f"source_{kind}s": [layer.tensors[f"{kind}_0"]] for kind in ("key", "value")}
            results = [
                function(**tensors, **layer.tables, **sources, impl="triton")
                for function in (norm_rotary_mix, compiled)
            ]
            expected, actual = (
                (*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), list(tensors.values())))
                for outputs in results
            )
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x, y)
            counts.add(graphs.frame_count)
        assert len(counts) == 1


class TestErrors:
    @pytest.mark.triton
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t | {"query": t["query"].double()}, "torch.float64"),
            (lambda t: {n: x.repeat(*[1] * (x.ndim - 1), 33) for n, x in t.items()}, "head dims up to 256, not 264"),
            (lambda t: t | {"key": t["key"].to("meta")}, "one device, not on .*meta"),
            (
                lambda t: t | {f"{k}_{i}": t[k] for k in ("key", "value") for i in range(1, 97)},
                "up to 96 sources, not 97",
            ),
            (lambda t: t | {f"{k}_{i}": t[k].half() for k in ("key", "value") for i in range(1, 6)}, "one dtype"),
        ],
    )
    def test_explicit_kernel_does_not_fall_back(self, change, reason):
        layer = Layer(1, 1, 2, 3, 8, 1, rotary=False)
        with pytest.raises(RuntimeError, match=f"impl='triton': the kernel of norm_rotary_mix .*{reason}"):
            layer.run("triton", tensors=change(layer.tensors))

    @pytest.mark.triton
    @pytest.mark.parametrize("impl", ["triton", "auto"])
    def test_transforms(self, impl):
        """Which work with the reference only."""
        query, key, value, source_key, source_value, *_ = Layer(1, 1, 2, 3, 8, 1).tensors.values()

        def call(query, impl=impl):
            return depth_value_mix(query, [source_key, key], [source_value, value], impl=impl)

        def tangent(call):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(call(forward_ad.make_dual(query, query))).tangent

        cases = (
            (lambda call: torch.vmap(call)(query[None]), "torch.func"),
            (lambda call: torch.func.grad(lambda query: call(query).sum())(query), "torch.func"),
            (tangent, "forward-mode"),
            (lambda call: call(TwoTensor(query, query)).a, "plain tensors, not on TwoTensor"),
        )
        for case, reason in cases:
            if impl == "triton":
                with pytest.raises(RuntimeError, match=f"impl='triton': the kernel of depth_value_mix .*{reason}"):
                    case(call)
            else:
                torch.testing.assert_close(case(call), case(lambda query: call(query, impl="reference")))

    @pytest.mark.triton
    def test_tables_with_gradients(self):
        layer = Layer(1, 1, 2, 3, 8, 1)
        layer.tables["cos"].requires_grad_()
        with pytest.raises(RuntimeError, match="gives cos and sin no gradient"):
            layer.run("triton")
        assert layer.run("auto")["query"].requires_grad

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("query_norm_weight", (7,), r"query_norm_weight has shape \[7\]: must be \[d\] = \[8\]"),
            ("key_norm_weight", (1, 8), r"key_norm_weight has shape \[1, 8\]"),
            ("cos", (2, 3, 8), r"cos has shape \[2, 3, 8\]: must be \[1 or 1, T, d\]"),
            ("sin", (1, 4, 8), r"sin has shape \[1, 4, 8\]"),
            ("value", (1, 1, 3, 4), r"values\[1\] has shape"),
        ],
    )
    def test_shapes(self, name, shape, message):
        layer = Layer(1, 1, 2, 3, 8, 1)
        tensors = layer.tables if name in layer.tables else layer.tensors
        tensors[name] = torch.ones(shape, device=DEVICE)
        with pytest.raises(ValueError, match=message):
            layer.run("reference")

    def test_one_table(self):
        layer = Layer(1, 1, 2, 3, 8, 1)
        del layer.tables["sin"]
        with pytest.raises(ValueError, match="sin is missing"):
            layer.run("reference")

    def test_odd_head_dim(self):
        with pytest.raises(ValueError, match="head_dim=7"):
            Layer(1, 1, 2, 3, 7, 1).run("reference")

    def test_key_norm_position(self):
        with pytest.raises(ValueError, match="key_norm_position='never': must be one of before_rope, after_rope"):
            Layer(1, 1, 2, 3, 8, 1, key_norm_position="never").run("reference")


@pytest.mark.triton
def test_compiles_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time.py")
    assert {launch["target"] for launch in compiled} == {gpu_target}
    for launch in compiled:
        assert launch["shared_memory"] <= launch["shared_memory_limit"], launch
        if launch["wide"]:
            assert launch["wide_loads"], launch
