# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`depth_value_mix` and `depth_value_weights`, against fixed numbers and plain Python."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from depthmix.kernels import depth_value_mix, depth_value_weights


# the same laws hold for every implementation that runs on CPU tensors
CPU_IMPLS = ("auto", "reference")
# query heads, key-value heads
HEADS = ((4, 2), (6, 2), (4, 1), (4, 4))
EXPLORE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=CPU_IMPLS)
def mix(request):
    return partial(depth_value_mix, impl=request.param)


def depth_inputs(batch=2, kv_heads=2, group=2, tokens=5, head_dim=7, entries=3, *, seed=0, dtype=torch.float64):
    """Random query, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads):
        tensor = torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
        return tensor.to(dtype).requires_grad_()

    return (
        draw(kv_heads * group),
        [draw(kv_heads) for _ in range(entries)],
        [draw(kv_heads) for _ in range(entries)],
    )


def cast(tensors, dtype):
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def einsum_mix(query, keys, values, scaling=None):
    """Another formulation: every query head scores by itself, the scores of a group are averaged."""
    keys, values = torch.stack(keys), torch.stack(values)
    entries, _, kv_heads, _, head_dim = keys.shape
    group = query.shape[1] // kv_heads
    scores = torch.einsum("bhtd,nbhtd->nbht", query, keys.repeat_interleave(group, dim=2))
    scores = torch.stack([scores[:, :, j * group : (j + 1) * group].sum(2) / group for j in range(kv_heads)], dim=2)
    odds = (scores * (head_dim**-0.5 if scaling is None else scaling)).exp()
    return torch.einsum("nbht,nbhtd->bhtd", odds / odds.sum(0), values)


def gradients(mix_function, query, keys, values, grad=None):
    inputs = [query, *keys, *values]
    output = mix_function(query, keys, values)
    return torch.autograd.grad(output, inputs, torch.ones_like(output) if grad is None else grad)


class TestGateVector:
    """Numbers of another implementation, in float64: two query heads over one key-value head, one source."""

    QUERY = [[1.0, 0.0, -1.0, 2.0], [0.5, -0.5, 0.0, 1.0]]
    KEYS = [[0.5, 0.5, -0.5, 1.0], [1.0, -1.0, 0.0, 0.5]]
    VALUES = [[2.0, 0.0, 1.0, -1.0], [0.0, 1.0, -1.0, 0.5]]
    GRAD = [1.0, -0.5, 2.0, 0.25]
    WEIGHTS = [0.5312093734, 0.4687906266]
    QUERY_GRAD = [-0.1906605119, 0.5719815364, -0.1906605119, 0.1906605119]
    KEY_GRAD = [0.5719815364, -0.1906605119, -0.3813210243, 1.1439630728]
    VALUE_GRAD = [0.5312093734, -0.2656046867, 1.0624187467, 0.1328023433]
    # gate -> value
    EXPECTED = {
        0.0: [0.0, 1.0, -1.0, 0.5],
        0.25: [0.2656046867, 0.8671976567, -0.7343953133, 0.300796485],
        1.0: [1.0624187467, 0.4687906266, 0.0624187467, -0.2968140601],
    }

    @pytest.mark.parametrize("gate", EXPECTED)
    def test_value_and_gradients(self, gate, mix):
        double = partial(torch.tensor, dtype=torch.float64)
        query, *entries = (
            double(rows).view(1, -1, 1, 4).requires_grad_() for rows in (self.QUERY, *self.KEYS, *self.VALUES)
        )
        keys, values, gates = entries[:2], entries[2:], double([gate]).requires_grad_()
        output = mix(query, keys, values, scaling=0.5, gate=gates)
        leaves = query, keys[0], keys[1], values[0], values[1], gates
        grads = torch.autograd.grad(output, leaves, double(self.GRAD).view(1, 1, 1, 4))
        key_grad, value_grad = (gate * double(each) for each in (self.KEY_GRAD, self.VALUE_GRAD))
        query_grad = gate * double([self.QUERY_GRAD] * 2)
        own_grad = double(self.GRAD) - value_grad
        expected = [self.EXPECTED[gate], query_grad, key_grad, -key_grad, value_grad, own_grad, 3.2536574119]
        for actual, number in zip([output, *grads], expected, strict=True):
            wanted = torch.as_tensor(number, dtype=torch.float64)
            torch.testing.assert_close(actual.reshape(wanted.shape), wanted, atol=4e-10, rtol=0)
        weights = depth_value_weights(query, keys, scaling=0.5, gate=gates).flatten()
        gated = double(self.WEIGHTS) * gate
        torch.testing.assert_close(weights, gated + double([0, 1 - gate]), atol=1e-10, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_both_ends_bit_for_bit(self, dtype, mix):
        query, keys, values = depth_inputs(kv_heads=3, entries=5, tokens=9, dtype=dtype)
        whole, none = (mix(query, keys, values, gate=torch.full((3,), float(g))) for g in (1, 0))
        assert torch.equal(whole, mix(query, keys, values)) and torch.equal(none, values[-1])

    def test_a_gate_of_another_shape(self, mix):
        query, keys, values = depth_inputs()
        with pytest.raises(ValueError, match=r"gate has shape \[4\]: must be \[2\]"):
            mix(query, keys, values, gate=torch.ones(4))
        with pytest.raises(ValueError, match=r"gate has shape \[\]: must be \[2\]"):
            depth_value_weights(query, keys, gate=torch.ones(()))


class TestReferenceVector:
    """
    Numbers of another implementation, in NumPy: three layers, two query heads over one key-value head of width 2,
    positions 0 and 1.
    """

    QUERIES = (
        ([[1.0, 0.5], [0.2, -1.0]], [[-0.3, 0.8], [0.6, 0.4]]),
        ([[0.4, -0.6], [1.1, 0.3]], [[0.9, 0.1], [-0.5, 0.7]]),
        ([[0.3, 0.9], [-0.7, 0.2]], [[0.5, -0.4], [0.8, 1.0]]),
    )
    KEYS = ([[0.7, -0.2], [0.1, 0.9]], [[-0.4, 0.8], [0.5, 0.5]], [[0.6, 0.1], [-0.9, 0.3]])
    VALUES = ([[1.0, 2.0], [3.0, -1.0]], [[-2.0, 0.5], [0.0, 1.0]], [[0.5, -1.5], [2.0, 2.0]])
    QUERY_NORMS = ([1.0, 1.2], [0.8, 1.1], [1.1, 0.9])
    KEY_NORMS = ([0.9, 1.5], [1.3, 0.6], [0.7, 1.4])

    # layer, its sources -> scores, weights and mixed values at both positions
    EXPECTED = {
        (1, (0,)): (
            [[0.98933717, -0.81048828], [1.01080679, 0.53498322]],
            [[0.85812769, 0.14187231], [0.61676119, 0.38323881]],
            [[0.57438306, 1.78719153], [1.85028356, -0.23352237]],
        ),
        (2, (0, 1)): (
            [[0.65346316, -0.38544630, 0.63663776], [0.62870859, 0.27921864, 0.26008452]],
            [[0.42787051, 0.15139785, 0.42073164], [0.41723463, 0.29417028, 0.28859510]],
            [[0.72519669, 0.49522051], [2.37319250, 0.09126022]],
        ),
        (2, (0,)): (
            [[0.65346316, 0.63663776], [0.62870859, 0.26008452]],
            [[0.50420625, 0.49579375], [0.59112646, 0.40887354]],
            [[0.75210313, 0.26472188], [2.59112646, 0.22662061]],
        ),
    }
    # layer 1 over {0}, layer 2 over {0, 1}; six decimals
    MISTAKES = {
        "key_norm_before_rope": (
            [[0.574383, 1.787192], [2.014819, -0.343213]],
            [[0.725197, 0.495221], [2.503390, 0.036482]],
        ),
        "raw_source_values": (
            [[0.574383, 1.787192], [1.850284, -0.233522]],
            [[0.335441, 0.300342], [1.828894, 0.454126]],
        ),
        "source_key_normed_by_reader": (
            [[0.641749, 1.820875], [1.722082, -0.148055]],
            [[0.712475, 0.497724], [2.299116, 0.169038]],
        ),
    }

    @staticmethod
    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * torch.tensor(weight, dtype=torch.float64)

    @staticmethod
    def rope(x):
        """The two features of a head as one complex number that turns by one radian per position."""
        turned = torch.view_as_complex(x.contiguous()) * torch.exp(1j * torch.arange(2, dtype=torch.float64))
        return torch.view_as_real(turned)

    def query(self, layer):
        return self.rope(self.norm(torch.tensor([self.QUERIES[layer]], dtype=torch.float64), self.QUERY_NORMS[layer]))

    def key(self, layer, norm_of=None):
        weight = self.KEY_NORMS[layer if norm_of is None else norm_of]
        return self.norm(self.rope(torch.tensor([[self.KEYS[layer]]], dtype=torch.float64)), weight)

    def key_normed_before_rope(self, layer):
        return self.rope(self.norm(torch.tensor([[self.KEYS[layer]]], dtype=torch.float64), self.KEY_NORMS[layer]))

    def value(self, layer):
        return torch.tensor([[self.VALUES[layer]]], dtype=torch.float64)

    def mixed_values(self, layer, sources):
        """Values of the entries of a layer: those of the sources as they were mixed (layer 0 has nothing to mix)."""
        mixed = {0: self.value(0), 1: depth_value_mix(self.query(1), *self.entries(1, (0,)))}
        return [*(mixed[i] for i in sources), self.value(layer)]

    def entries(self, layer, sources):
        values = [self.value(0), self.value(1)] if layer == 1 else self.mixed_values(layer, sources)
        return [self.key(i) for i in (*sources, layer)], values

    def test_finished_queries_and_keys(self):
        # of the test's own rendering of norm and rotation, so that the rest stands on firm ground
        query = [[[1.26490094, 0.75894057], [1.55013035, -0.66572892]]]
        torch.testing.assert_close(self.query(0)[:, 0], torch.tensor(query).double(), atol=1e-7, rtol=0)
        mean = [[[0.85332332, 0.20618785], [-0.70682097, 0.14250848]]]
        torch.testing.assert_close(self.query(2).mean(1), torch.tensor(mean, dtype=torch.float64), atol=1e-8, rtol=0)
        key = [[[[0.97645378, 0.32548459], [-0.77083765, -1.24223596]]]]
        torch.testing.assert_close(self.key(2), torch.tensor(key, dtype=torch.float64), atol=1e-8, rtol=0)

    @pytest.mark.parametrize(("layer", "sources"), EXPECTED)
    def test_scores_weights_and_values(self, mix, layer, sources):
        scores, weights, mixed = (torch.tensor([[x]], dtype=torch.float64) for x in self.EXPECTED[layer, sources])
        query, (keys, values) = self.query(layer), self.entries(layer, sources)
        close = partial(torch.testing.assert_close, atol=1e-8, rtol=0)
        close(mix(query, keys, values), mixed)
        ours = depth_value_weights(query, keys)
        close(ours, weights)
        # the weights tell the scores up to a constant
        close(ours.log() - ours[..., -1:].log(), scores - scores[..., -1:])

    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_is_none_of_the_typical_mistakes(self, mix, mistake):
        def key(layer, reader):
            if mistake == "key_norm_before_rope":
                return self.key_normed_before_rope(layer)
            return self.key(layer, norm_of=reader if mistake == "source_key_normed_by_reader" else layer)

        def wrong(layer, sources, values):
            return einsum_mix(self.query(layer), [key(i, layer) for i in (*sources, layer)], values)

        first = wrong(1, (0,), [self.value(0), self.value(1)])
        source = self.value(1) if mistake == "raw_source_values" else first
        second = wrong(2, (0, 1), [self.value(0), source, self.value(2)])
        for rendered, listed in zip((first, second), self.MISTAKES[mistake], strict=True):
            torch.testing.assert_close(rendered[0, 0], torch.tensor(listed).double(), atol=1e-6, rtol=0)

        ours = [mix(self.query(layer), *self.entries(layer, sources)) for layer, sources in ((1, (0,)), (2, (0, 1)))]
        assert max((first - ours[0]).abs().max(), (second - ours[1]).abs().max()) > 1e-2

    def test_is_not_one_score_per_query_head(self):
        keys, values = self.entries(1, (0,))
        listed = ([[0.683025, 1.841513], [1.727112, -0.151408]], [[0.436327, 1.718163], [1.968654, -0.312436]])
        ours = depth_value_mix(self.query(1), keys, values)[0, 0]
        for head, expected in enumerate(listed):
            wrong = einsum_mix(self.query(1)[:, head : head + 1], keys, values)[0, 0]
            torch.testing.assert_close(wrong, torch.tensor(expected).double(), atol=1e-6, rtol=0)
            assert (ours - wrong).abs().max() > 1e-2


def looped_mix(query, keys, values, scaling):
    """Plain Python over nested lists."""
    heads, kv_heads = len(query[0]), len(keys[0][0])
    group = heads // kv_heads
    mixed = []
    for b in range(len(query)):
        mixed.append([])
        for j in range(kv_heads):
            mixed[b].append([])
            for t in range(len(query[b][j])):
                head_dim = len(query[b][j][t])
                mean = [sum(query[b][j * group + g][t][x] for g in range(group)) / group for x in range(head_dim)]
                scores = [scaling * math.fsum(a * c for a, c in zip(mean, key[b][j][t], strict=True)) for key in keys]
                odds = [math.exp(score - max(scores)) for score in scores]
                row = [
                    sum(o * value[b][j][t][x] for o, value in zip(odds, values, strict=True)) / sum(odds)
                    for x in range(head_dim)
                ]
                mixed[b][j].append(row)
    return mixed


@settings(EXPLORE, max_examples=40)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.sampled_from([0, 1, 2, 3, 5]),
    head_dim=st.integers(1, 9),
    sources=st.integers(0, 4),
    scaling=st.one_of(st.none(), st.floats(-2, 2)),
    seed=st.integers(0, 1000),
)
def test_equals_plain_loops(mix, batch, kv_heads, group, tokens, head_dim, sources, scaling, seed):
    query, keys, values = depth_inputs(batch, kv_heads, group, tokens, head_dim, sources + 1, seed=seed)
    before = [tensor.detach().clone() for tensor in (query, *keys, *values)]
    mixed = mix(query, keys, values, scaling=scaling)
    assert mixed.shape == values[-1].shape

    nested = (query.tolist(), [key.tolist() for key in keys], [value.tolist() for value in values])
    expected = looped_mix(*nested, head_dim**-0.5 if scaling is None else scaling)
    expected = torch.tensor(expected, dtype=torch.float64).view(mixed.shape)
    torch.testing.assert_close(mixed, expected, atol=1e-12, rtol=1e-12)
    assert all(torch.equal(*pair) for pair in zip(before, (query, *keys, *values), strict=True))


@settings(EXPLORE, max_examples=15)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.sampled_from([0, 1, 4]),
    head_dim=st.integers(1, 7),
    sources=st.integers(1, 3),
    scaling=st.sampled_from([None, 0.7]),
)
def test_gradients_of_every_input(mix, kv_heads, group, tokens, head_dim, sources, scaling):
    inputs = depth_inputs(2, kv_heads, group, tokens, head_dim, sources + 1)
    grad = torch.randn_like(inputs[2][-1])
    ours = gradients(partial(mix, scaling=scaling), *inputs, grad)
    expected = gradients(partial(einsum_mix, scaling=scaling), *inputs, grad)
    for tensor, ours_, expected_ in zip([inputs[0], *inputs[1], *inputs[2]], ours, expected, strict=True):
        assert ours_.shape == tensor.shape
        torch.testing.assert_close(ours_, expected_, atol=1e-12, rtol=1e-10)


def test_gradcheck(mix):
    query, keys, values = depth_inputs(batch=1, kv_heads=2, group=2, tokens=2, head_dim=3)
    assert torch.autograd.gradcheck(
        lambda query, *rest: mix(query, rest[:3], rest[3:], scaling=0.8), (query, *keys, *values)
    )


@pytest.mark.parametrize("requiring", ["query", "keys", "values", "sources"])
def test_gradients_of_a_part_of_the_inputs(mix, requiring):
    query, keys, values = depth_inputs()
    chosen = {"query": [query], "keys": keys, "values": values, "sources": [*keys[:-1], *values[:-1]]}[requiring]
    expected = torch.autograd.grad(einsum_mix(query, keys, values).square().sum(), chosen)
    for tensor in (query, *keys, *values):
        tensor.requires_grad_(any(tensor is one for one in chosen))
    torch.testing.assert_close(torch.autograd.grad(mix(query, keys, values).square().sum(), chosen), expected)


def test_constant_values_stay(mix):
    query, keys, values = depth_inputs(dtype=torch.float32)
    values = [torch.full_like(value, 1.625) for value in values]
    torch.testing.assert_close(mix(query, keys, values), values[-1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_query_heads_belong_to_their_key_value_head(mix, heads, kv_heads):
    group = heads // kv_heads
    _, keys, values = depth_inputs(kv_heads=kv_heads, tokens=1, entries=2)
    keys = [torch.ones_like(keys[0]), -torch.ones_like(keys[0])]
    tags = torch.arange(kv_heads, dtype=torch.float64).view(1, -1, 1, 1).expand_as(values[0])
    values = cast([tags, tags + 100], torch.float64)
    for head in range(heads):
        query = torch.zeros(2, heads, 1, 7, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            # after the mean over the group, this head asks for entry 0 with a score that is 50 higher
            query[:, head] = 25 * group / 7**0.5
        mixed = mix(query, keys, values)
        expected = tags + 50
        expected[:, head // group] = head // group
        torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_gradients_stay_in_their_group(mix, heads, kv_heads):
    group = heads // kv_heads
    query, keys, values = depth_inputs(kv_heads=kv_heads, group=group)
    for j in range(kv_heads):
        grads = torch.autograd.grad(mix(query, keys, values)[:, j].square().sum(), [query, *keys, *values])
        touched = [grad.abs().amax((0, 2, 3)) > 0 for grad in grads]
        assert touched[0].tolist() == [head // group == j for head in range(heads)]
        assert all(rest.tolist() == [i == j for i in range(kv_heads)] for rest in touched[1:])
        # the mean hands the same gradient to all heads of the group
        torch.testing.assert_close(
            grads[0][:, j * group : (j + 1) * group], grads[0][:, [j * group]].expand(-1, group, -1, -1)
        )


def test_equal_scores_give_the_mean(mix):
    query, keys, values = depth_inputs()
    torch.testing.assert_close(mix(torch.zeros_like(query), keys, values), sum(values) / len(values))


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_one_high_score_returns_that_entry(mix, chosen):
    query, keys, values = depth_inputs()
    keys = [torch.zeros_like(key) for key in keys]
    keys[chosen] = query.unflatten(1, (2, 2)).mean(2)
    keys[chosen] = 50 * keys[chosen] / keys[chosen].square().sum(-1, keepdim=True)
    torch.testing.assert_close(mix(query, keys, values, scaling=1.0), values[chosen], atol=1e-12, rtol=0)


def test_order_of_the_sources_does_not_matter(mix):
    query, keys, values = depth_inputs(entries=4)
    order = [2, 0, 1, 3]
    shuffled = mix(query, [keys[i] for i in order], [values[i] for i in order])
    torch.testing.assert_close(shuffled, mix(query, keys, values))


def test_tokens_do_not_see_each_other(mix):
    """A token that holds rubbish, as padding may, reaches no other token; neither does its gradient."""
    query, keys, values = depth_inputs(dtype=torch.float32)
    clean = mix(query, keys, values)
    with torch.no_grad():
        for tensor in (query, *keys, *values):
            tensor[:, :, 1] = float("nan")
    mixed = mix(query, keys, values)
    kept = [0, 2, 3, 4]
    assert torch.equal(mixed[:, :, kept], clean[:, :, kept])
    for grad in torch.autograd.grad(mixed[:, :, kept].square().sum(), [query, *keys, *values]):
        assert grad[:, :, kept].isfinite().all() and grad[:, :, kept].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_huge_scores_stay_finite(mix, dtype):
    query, keys, values = depth_inputs(dtype=dtype)
    with torch.no_grad():
        for tensor in (query, *keys):
            tensor.mul_(1e4)
    mixed = mix(query, keys, values)
    assert mixed.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(mixed.sum(), values))


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2],
    "part of a larger tensor": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4), value=float("nan"))[
        :, :, 1:-4, 3:-2
    ],
    "features first": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_inputs_does_not_matter(mix, layout):
    inputs = depth_inputs()

    def through_layout(query, keys, values):
        query, *rest = (LAYOUTS[layout](tensor) for tensor in (query, *keys, *values))
        assert not query.is_contiguous()
        return mix(query, rest[:3], rest[3:])

    torch.testing.assert_close(through_layout(*inputs), mix(*inputs), atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(gradients(through_layout, *inputs), gradients(mix, *inputs), atol=1e-14, rtol=1e-14)


def test_expanded_inputs(mix):
    """Stride 0 in batch, tokens and features."""
    query, keys, values = depth_inputs(batch=1, tokens=1, head_dim=1)

    def expanded(query, keys, values):
        query, *rest = (tensor.expand(2, -1, 5, 7) for tensor in (query, *keys, *values))
        return mix(query, rest[:3], rest[3:])

    def copied(query, keys, values):
        query, *rest = (tensor.repeat(2, 1, 5, 7) for tensor in (query, *keys, *values))
        return mix(query, rest[:3], rest[3:])

    torch.testing.assert_close(expanded(query, keys, values), copied(query, keys, values))
    torch.testing.assert_close(gradients(expanded, query, keys, values), gradients(copied, query, keys, values))


def test_one_tensor_in_several_places(mix):
    query, (key, own_key), (value, own_value) = depth_inputs(entries=2)
    ours = torch.autograd.grad(mix(query, [key, key, own_key], [value, value, own_value]).square().sum(), [key, value])
    expected = einsum_mix(query, [key, key, own_key], [value, value, own_value]).square().sum()
    torch.testing.assert_close(ours, torch.autograd.grad(expected, [key, value]))


@pytest.mark.parametrize(
    "strided",
    [
        lambda grad: torch.ones((), dtype=grad.dtype).expand_as(grad),
        lambda grad: grad[:1].expand_as(grad),
        lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
        lambda grad: grad.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda grad: torch.cat([grad, grad], dim=-1)[..., 3:10],
    ],
    ids=["sum", "expanded", "heads last", "features first", "part of a concatenation"],
)
def test_incoming_gradient_of_any_layout(mix, strided):
    inputs = depth_inputs()
    grad = strided(torch.randn(2, 2, 5, 7, dtype=torch.float64))
    assert not grad.is_contiguous()
    given, copied = (gradients(mix, *inputs, one) for one in (grad, grad.contiguous()))
    torch.testing.assert_close(given, copied, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_loses_only_the_rounding_of_the_result(mix, dtype):
    inputs = depth_inputs(tokens=64, head_dim=16, entries=5, dtype=dtype)
    exact = [cast(tensors, torch.float64) for tensors in ([inputs[0]], *inputs[1:])]
    exact = (exact[0][0], *exact[1:])
    grad = torch.randn(2, 2, 64, 16).to(dtype)

    def assert_rounded(ours, expected):
        assert ours.dtype is dtype
        # half a unit in the last place, and what fp32 adds to it
        allowed = expected.abs() * (torch.finfo(dtype).eps / 2) + 2e-6 * expected.abs().max()
        assert ((ours.double() - expected).abs() <= allowed).all()

    assert_rounded(mix(*inputs), mix(*exact))
    for ours, expected in zip(gradients(mix, *inputs, grad), gradients(mix, *exact, grad.double()), strict=True):
        assert_rounded(ours, expected)


# dtypes of query and keys, of the source values, of the own value: as they come, and as under autocast, where norms
# return fp32 and projections do not
MIXED_DTYPES = (
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float32, torch.float64),
)


@pytest.mark.parametrize(("query_dtype", "source_dtype", "dtype"), MIXED_DTYPES)
def test_mixed_dtypes(mix, query_dtype, source_dtype, dtype):
    query, keys, values = depth_inputs()
    (query,), keys = cast([query], query_dtype), cast(keys, query_dtype)
    values = [*cast(values[:-1], source_dtype), *cast(values[-1:], dtype)]
    mixed = mix(query, keys, values)
    assert mixed.dtype is dtype
    expected = einsum_mix(query.double(), [k.double() for k in keys], [v.double() for v in values])
    torch.testing.assert_close(mixed.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for tensor, grad in zip((query, *keys, *values), gradients(mix, query, keys, values), strict=True):
        assert grad.dtype is tensor.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_changes_nothing(mix, dtype, backward_inside):
    query, keys, values = depth_inputs(dtype=torch.float32)
    values = cast(values, dtype)
    inputs = [query, *keys, *values]
    expected = mix(query, keys, values)
    expected_grads = torch.autograd.grad(expected.float().square().sum(), inputs)
    with torch.autocast("cpu", dtype=dtype):
        mixed = mix(query, keys, values)
        weights = depth_value_weights(query, keys)
        if backward_inside:
            grads = torch.autograd.grad(mixed.float().square().sum(), inputs)
    if not backward_inside:
        grads = torch.autograd.grad(mixed.float().square().sum(), inputs)
    assert mixed.dtype is dtype and weights.dtype is torch.float32
    assert torch.equal(mixed, expected)
    assert torch.equal(weights, depth_value_weights(query, keys))
    assert all(torch.equal(*pair) for pair in zip(grads, expected_grads, strict=True))


def test_single_entry_is_returned_itself(mix):
    query, keys, values = depth_inputs(entries=1)
    assert mix(query, keys, values) is values[0]


@pytest.mark.parametrize("container", [list, tuple])
def test_any_sequence_of_tensors(mix, container):
    query, keys, values = depth_inputs()
    assert torch.equal(mix(query, container(keys), container(values)), mix(query, keys, values))


def test_weights_reproduce_the_mix(mix):
    query, keys, values = depth_inputs(entries=4)
    for scaling in (None, 0.3):
        weights = depth_value_weights(query, keys, scaling=scaling)
        assert weights.shape == (2, 2, 5, 4)
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
        mixed = torch.einsum("bhtn,nbhtd->bhtd", weights, torch.stack(values))
        torch.testing.assert_close(mix(query, keys, values, scaling=scaling), mixed)


def test_weights_of_a_single_entry_are_one():
    query, keys, _ = depth_inputs(entries=1, dtype=torch.bfloat16)
    assert torch.equal(depth_value_weights(query, keys), torch.ones(2, 2, 5, 1))


def test_compiles_without_breaks(mix):
    inputs = depth_inputs(dtype=torch.float32)
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), mix(*inputs))
    torch.testing.assert_close(gradients(compiled, *inputs), gradients(mix, *inputs))


def test_compiles_with_a_dynamic_number_of_tokens(mix):
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mix, fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (5, 8, 13):
        inputs = depth_inputs(tokens=tokens, dtype=torch.float32)
        torch.testing.assert_close(compiled(*inputs), mix(*inputs))
    assert graphs.frame_count == 1


class TestErrors:
    def test_unknown_impl(self):
        with pytest.raises(ValueError, match="impl='cuda': must be one of auto, triton, reference"):
            depth_value_mix(*depth_inputs(), impl="cuda")

    @pytest.mark.parametrize("entries", [1, 3])
    def test_explicit_kernel_does_not_fall_back(self, entries):
        with pytest.raises(RuntimeError, match="impl='triton'"):
            depth_value_mix(*depth_inputs(entries=entries), impl="triton")

    def test_number_of_keys_and_values(self):
        query, keys, values = depth_inputs()
        with pytest.raises(ValueError, match="3 keys and 2 values"):
            depth_value_mix(query, keys, values[1:])
        with pytest.raises(ValueError, match="0 keys and 0 values"):
            depth_value_mix(query, [], [])
        with pytest.raises(ValueError, match="at least one"):
            depth_value_weights(query, [])

    def test_heads(self):
        query, keys, values = depth_inputs(kv_heads=2, group=2)
        with pytest.raises(ValueError, match="3 query heads, 2 key-value heads"):
            depth_value_mix(query[:, :3], keys, values)
        with pytest.raises(ValueError, match="4 query heads, 0 key-value heads"):
            depth_value_mix(query, [key[:, :0] for key in keys], [value[:, :0] for value in values])

    @pytest.mark.parametrize("name", ["keys", "values"])
    @pytest.mark.parametrize("entry", [0, 1])
    @pytest.mark.parametrize("dim", [0, 1, 2, 3])
    def test_shapes(self, name, entry, dim):
        query, keys, values = depth_inputs()
        tensors = {"keys": keys, "values": values}
        tensors[name][entry] = tensors[name][entry].narrow(dim, 0, 1)
        message = rf"{name}\[{entry}\] has shape .* must be \[B, Hkv, T, d\] = \[2, 2, 5, 7\]"
        with pytest.raises(ValueError, match=message):
            depth_value_mix(query, keys, values)

    def test_number_of_dimensions(self):
        query, keys, values = depth_inputs()
        with pytest.raises(ValueError, match=r"query has shape \[4, 5, 7\].* must be \[B, Hq, T, d\]"):
            depth_value_mix(query[0], keys, values)
        with pytest.raises(ValueError, match=r"keys\[-1\] \[5, 7\]"):
            depth_value_mix(query, [key[0, 0] for key in keys], values)
        with pytest.raises(ValueError, match=r"values\[1\] has shape \[2, 5, 7\]"):
            depth_value_mix(query, keys, [values[0], values[1][0], values[2]])

    def test_weights_check_shapes_too(self):
        query, keys, _ = depth_inputs()
        with pytest.raises(ValueError, match=r"keys\[0\] has shape"):
            depth_value_weights(query, [keys[0][:, :, :2], keys[1]])
