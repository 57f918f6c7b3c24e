# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Numbers of mHC: fixed numbers of another implementation, and a plain model in float64."""

import pytest
import torch
from float64_checks import SMALL, backbones, check_gradients, check_logits, exact, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_mhc import plain_mhc_logits

from depthmix import MHCForCausalLM
from depthmix.kernels import hyper_connection_read, hyper_connection_write, stream_readout
from depthmix.kernels.hyper_connection_reference import (
    hyper_connection_read_reference,
    hyper_connection_write_reference,
    sinkhorn,
)
from depthmix.modeling.modeling_mhc import MHCConnection


def listed(numbers, *shape):
    return torch.tensor([float(number) for number in numbers.split()], dtype=torch.float64).view(*(shape or (-1,)))


def assert_listed(actual, numbers):
    torch.testing.assert_close(actual.flatten(), listed(numbers), atol=2e-8, rtol=0)


class TestVector:
    """Two streams of three channels at one token."""

    STREAMS = listed("1 -1 .5 0 2 -.5", 1, 2, 3)
    UPDATE = listed(".3 -.6 .9", 1, 3)

    def read(self, **options):
        projection = torch.tensor([[0.1 * ((r + 1) * (c + 1) % 5 - 2) for c in range(6)] for r in range(8)])
        near_identity = listed(".99 .01 .01 .99", 2, 2).log()
        return hyper_connection_read(
            self.STREAMS,
            listed("1 .9 1.1 1.2 .8 1"),
            projection.double(),
            [listed(".5"), listed("-.3"), listed(".8")],
            [listed("-.2 .4"), listed(".1 -.1"), near_identity],
            eps=1e-5,
            **options,
        )

    @pytest.mark.parametrize(
        ("order", "iterations", "matrix"),
        [
            ("rows_first", 20, ".99239117 .00932851 .00760883 .99067149"),
            ("columns_first", 20, ".99164065 .00835935 .00849173 .99150827"),
            ("rows_first", 1, ".99306701 .01023547 .00693299 .98976453"),
            ("columns_first", 1, ".99170005 .00829995 .00855248 .99144752"),
        ],
    )
    def test_maps(self, order, iterations, matrix):
        mixed, residual, post, _ = self.read(order=order, iterations=iterations)
        assert_listed(mixed, ".41306226 .65353295 -.06011767")
        assert_listed(residual, matrix)
        assert_listed(post, "1.06001581 .99467560")

    def test_new_streams(self):
        _, residual, post, _ = self.read(order="rows_first")
        streams = hyper_connection_write(self.STREAMS, self.UPDATE, residual, post)
        assert_listed(streams, "1.31039591 -1.60974363 1.44554556 .30601151 1.37692878 .40367671")
        assert_listed(stream_readout(streams, listed(".2 -.3")), ".93119995 -.48215333 1.05219770")

    @pytest.mark.parametrize(
        ("order", "matrix"),
        [
            (
                "rows_first",
                ".80740580 .02348542 .16912248 .12128926 .86327351 .01540936 .07130494 .11324107 .81546816",
            ),
            (
                "columns_first",
                ".80739421 .02348025 .16912554 .12131412 .86327286 .01541302 .07130370 .11321582 .81548048",
            ),
        ],
    )
    def test_sinkhorn(self, order, matrix):
        assert_listed(sinkhorn(listed("2 -1 0 .5 3 -2 -1 0 1", 3, 3), 20, order), matrix)

    def test_sinkhorn_of_large_logits_is_finite(self):
        matrix = sinkhorn(torch.tensor([[500.0, -500], [300, 500]]), 20, "columns_first")
        torch.testing.assert_close(matrix, torch.eye(2), atol=1e-11, rtol=0)

    def test_start_of_the_matrix(self):
        matrix = sinkhorn(MHCConnection.near_identity(4).double(), 20, "rows_first")
        assert_listed(matrix[0], ".99 .00333333 .00333333 .00333333")


@st.composite
def architectures(draw):
    return draw(backbones()) | {
        "mhc_num_streams": draw(st.integers(2, 4)),
        "mhc_sinkhorn_iters": draw(st.sampled_from([1, 3])),
        "mhc_sinkhorn_order": draw(st.sampled_from(["rows_first", "columns_first"])),
    }


@settings(
    deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=architectures(), given_inputs=inputs())
@torch.no_grad()
def test_logits_equal_the_plain_model(build, fields, given_inputs):
    check_logits(exact(build(model_class=MHCForCausalLM, **fields)), plain_mhc_logits, given_inputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"mhc_num_streams": 2, "mhc_sinkhorn_iters": 3},
        {"mhc_num_streams": 3, "mhc_sinkhorn_iters": 2, "mhc_sinkhorn_order": "rows_first", "use_qk_norm": False},
    ],
)
def test_gradients_equal_those_of_the_plain_model(build, token_ids, fields):
    model = exact(build(model_class=MHCForCausalLM, **SMALL, num_hidden_layers=2, **fields))

    def is_idle(name):
        # rows that sum to one change nothing while the streams are equal
        is_matrix = name.endswith(("alpha_residual", "residual_logits"))
        return is_matrix and "layers.0.attn_" in name and model.config.mhc_sinkhorn_order == "columns_first"

    check_gradients(model, plain_mhc_logits, token_ids(2, 5), is_idle)


class TestOperation:
    def test_low_precision_maps_are_fp32(self):
        torch.manual_seed(0)
        streams, update = torch.randn(2, 3, 4, 8).bfloat16(), torch.randn(2, 3, 8).bfloat16()
        parameters = [torch.randn(32), torch.randn(24, 32)]
        alphas = [torch.randn(1) for _ in range(3)]
        logits = [torch.randn(4), torch.randn(4), torch.randn(4, 4)]
        exact = hyper_connection_read(
            streams.double(),
            *(parameter.double() for parameter in parameters),
            *([tensor.double() for tensor in tensors] for tensors in (alphas, logits)),
            eps=1e-5,
        )
        with torch.autocast("cpu", torch.bfloat16):
            mixed, residual, post, _ = hyper_connection_read(streams, *parameters, alphas, logits, eps=1e-5)
            written = hyper_connection_write(streams, update, residual, post)
        assert (mixed.dtype, residual.dtype, post.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        for ours, expected in zip((residual, post), exact[1:3], strict=True):
            assert (ours - expected).abs().max() < 1e-5
        expected = hyper_connection_write(streams.double(), update.double(), *exact[1:3])
        assert written.dtype is torch.bfloat16
        assert (written - expected).abs().max() <= 1.01 * torch.finfo(torch.bfloat16).eps * expected.abs().max()

    def test_backward_keeps_no_fp32_streams(self):
        streams, update = torch.randn(5, 4, 64).bfloat16(), torch.randn(5, 64).bfloat16()
        parameters = [torch.randn(256), torch.randn(24, 256)]
        small = [torch.randn(shape) for shape in (1, 1, 1, 4, 4, (4, 4))]
        leaves = [tensor.requires_grad_() for tensor in (streams, update, *parameters, *small)]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            mixed, *maps, _ = hyper_connection_read(streams, *parameters, small[:3], small[3:], eps=1e-5)
            written = hyper_connection_write(streams, update, *maps)
        of_tokens = [tensor for tensor in kept if tensor.dtype is torch.float32 and len(tensor) == 5]
        assert not [tensor for tensor in of_tokens if tensor.numel() >= mixed.numel()]
        gradients = torch.autograd.grad((written.sum(), mixed.sum()), leaves)
        mixed, *maps = hyper_connection_read_reference(
            streams, *parameters, *small, eps=1e-5, iterations=20, order="columns_first"
        )
        written = hyper_connection_write_reference(streams, update, *maps)
        expected = torch.autograd.grad((written.sum(), mixed.sum()), leaves)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            (0, (6,), r"norm_weight has shape \[6\]: must be \[8\] for 2 streams of 4"),
            (1, (6, 8), r"projection has shape \[6, 8\]: must be \[8, 8\]"),
        ],
    )
    def test_shapes_that_do_not_fit(self, name, shape, message):
        parameters = [torch.ones(8), torch.ones(8, 8)]
        parameters[name] = torch.ones(shape)
        logits = [torch.ones(2), torch.ones(2), torch.ones(2, 2)]
        with pytest.raises(ValueError, match=message):
            hyper_connection_read(torch.ones(3, 2, 4), *parameters, [torch.ones(1)] * 3, logits, eps=1e-5)

    def test_unknown_order(self):
        with pytest.raises(ValueError, match="order='columns': must be one of columns_first, rows_first"):
            hyper_connection_read(torch.ones(3, 2, 4), None, None, (), (), eps=1e-5, order="columns")
