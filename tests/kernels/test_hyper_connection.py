# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`hyper_connection_read` and `hyper_connection_write`: the kernels, on a GPU or else interpreted."""

import pytest
import torch

from depthmix.kernels import hyper_connection_read, hyper_connection_triton, hyper_connection_write


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.triton


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


class Connection:
    """A connection with random tensors, whose sub-layer shifts the features and adds an input of its own."""

    def __init__(self, shape, *, dtype=torch.float32, parameter_dtype=None, update_dtype=None, spread=1.0, **options):
        *leading, streams, size = shape
        self.options = {"eps": 1e-5} | options
        shapes = {
            "norm_weight": (streams * size,),
            "projection": (streams * (streams + 2), streams * size),
            **{f"alpha_{i}": (1,) for i in range(3)},
            "logits_0": (streams,),
            "logits_1": (streams,),
            "logits_2": (streams, streams),
        }
        self.tensors = {
            "streams": draw(*shape, dtype=dtype),
            "update": draw(*leading, size, dtype=update_dtype or dtype, seed=1),
        }
        for i, (name, shape) in enumerate(shapes.items(), 2):
            tensor = draw(*shape, dtype=parameter_dtype or dtype, seed=i).detach()
            if name == "projection":
                tensor /= (streams * size) ** 0.5
            elif name == "logits_2":
                tensor *= spread
            self.tensors[name] = tensor

    def forward(self, leaves, impl):
        alphas, logits = ([leaves[f"{name}_{i}"] for i in range(3)] for name in ("alpha", "logits"))
        mixed, residual, post, streams = hyper_connection_read(
            *(leaves["streams"], leaves["norm_weight"], leaves["projection"], alphas, logits),
            **self.options,
            impl=impl,
        )
        update = leaves["update"] + mixed.roll(1, -1).to(leaves["update"].dtype)
        written = hyper_connection_write(streams, update, residual, post, impl=impl)
        return {"mixed": mixed, "residual": residual, "post": post, "handed on": streams, "written": written}

    def run(self, impl, dtype=None, used=("mixed", "residual", "post", "handed on", "written"), tensors=None):
        """All outputs, and the gradients of all tensors for gradients of those that are `used`."""
        tensors = self.tensors if tensors is None else tensors
        leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items()}
        outputs = self.forward(leaves, impl)
        grads = [draw(*outputs[name].shape, seed=100 + i).to(outputs[name].dtype) for i, name in enumerate(used)]
        gradients = torch.autograd.grad(
            [outputs[name] for name in used], list(leaves.values()), grads, allow_unused=True
        )
        named = {name: output.detach() for name, output in outputs.items()}
        return named | {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def errors(actual, exact):
    """By the norm of each tensor."""
    return {
        name: ((actual[name].double() - tensor).norm() / (tensor.norm() + 1e-6)).item()
        for name, tensor in exact.items()
        if tensor is not None
    }


CASES = {
    "four streams": ((2, 3, 4, 40), {}),
    "rows first": ((2, 3, 4, 40), {"order": "rows_first"}),
    "two streams": ((1, 5, 2, 70), {"order": "rows_first", "iterations": 3}),
    "three streams": ((5, 3, 33), {}),
    "five streams": ((2, 5, 8), {"iterations": 2}),
    "one stream": ((3, 1, 16), {"iterations": 1}),
    "one column": ((3, 2, 1), {}),
    "no iterations": ((2, 2, 4, 24), {"iterations": 0}),
    "one iteration": ((2, 2, 4, 24), {"iterations": 1}),
    "entries too small": ((6, 3, 16), {"spread": 40.0, "iterations": 2}),
    "no iterations of them": ((6, 3, 16), {"spread": 40.0, "iterations": 0}),
    "no leading dimension": ((4, 48), {}),
    "wide": ((1, 2, 530), {"iterations": 1}),
    "more tokens than a program has": ((300, 2, 8), {"iterations": 1}),
    "tiles of tokens and columns": ((70, 2, 72), {"iterations": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_reference(case, monkeypatch):
    shape, options = CASES[case]
    # as many splits and programs as of many tokens
    monkeypatch.setitem(hyper_connection_triton.PARAMETER_TILE, "BLOCK_K", 2)
    monkeypatch.setitem(hyper_connection_triton.PARAMETER_TILE, "BLOCK_P", 16)
    connection = Connection(shape, **options)
    exact = connection.run("reference", dtype=torch.float64)
    allowed = errors(connection.run("reference"), exact)
    for name, error in errors(connection.run("triton"), exact).items():
        # of sums of what nearly cancels plain PyTorch loses as much
        assert error <= 2e-5 + 2 * allowed[name], f"{name}: {error}, {allowed[name]}"


def test_equal_logits_share_what_the_largest_gets():
    """Of which the gradient is that of a maximum."""
    connection = Connection((5, 3, 16), iterations=0)
    for name in ("alpha_2", "logits_2"):
        connection.tensors[name].zero_()
    exact = connection.run("reference", dtype=torch.float64)
    found = errors(connection.run("triton"), exact)
    assert max(found.values()) <= 1e-4 and exact["gradient of alpha_2"].abs() > 0.1


@pytest.mark.parametrize("parameter_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_plain_torch(dtype, parameter_dtype):
    connection = Connection((40, 4, 24), dtype=dtype, parameter_dtype=parameter_dtype, iterations=5)
    exact = connection.run("reference", dtype=torch.float64)
    plain, ours = connection.run("reference"), connection.run("triton")
    assert all(ours[name].dtype is plain[name].dtype for name in exact)
    # the interpreter truncates where a GPU rounds
    factor = 1.5 if DEVICE == "cuda" or dtype is torch.float16 else 4
    allowed = errors(plain, exact)
    for name, error in errors(ours, exact).items():
        assert error <= factor * allowed[name] + 2 * torch.finfo(dtype).eps, f"{name}: {error}, {allowed[name]}"
    for name in ("residual", "post"):
        assert errors(ours, exact)[name] < 2e-5


def test_update_of_another_dtype():
    """As under autocast, which leaves the streams wide."""
    connection = Connection((3, 2, 16), update_dtype=torch.bfloat16)
    ours, expected = connection.run("triton"), connection.run("reference")
    assert all(ours[name].dtype is tensor.dtype for name, tensor in expected.items())
    found = errors(ours, {name: tensor.double() for name, tensor in expected.items()})
    assert max(found.values()) < 2e-2 and found["residual"] < 1e-5


@pytest.mark.parametrize("used", ["mixed", "residual", "post", "handed on", "written"])
def test_outputs_without_a_gradient(used):
    connection = Connection((3, 2, 16), iterations=2)
    exact = connection.run("reference", dtype=torch.float64, used=[used])
    ours = connection.run("triton", used=[used])
    for name, tensor in exact.items():
        if tensor is None:
            assert ours[name] is None or not ours[name].any(), name
    assert max(errors(ours, exact).values()) <= 1e-4


LAYOUTS = {
    "one stream for all": lambda x: x[..., :1, :].detach().expand_as(x) if x.ndim == 4 else x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x,
    "every second column": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2],
    "rows apart": lambda x: torch.nn.functional.pad(x, (0, 16), value=float("nan"))[..., :-16],
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    connection = Connection((2, 3, 3, 20), iterations=2)
    laid_out = {name: LAYOUTS[layout](tensor.detach()) for name, tensor in connection.tensors.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in laid_out.items()}
    assert laid_out["streams"].stride() != contiguous["streams"].stride()
    found, expected = connection.run("triton", tensors=laid_out), connection.run("triton", tensors=contiguous)
    assert max(errors(found, {name: tensor.double() for name, tensor in expected.items()}).values()) <= 1e-5


def test_equal_bits_from_equal_inputs():
    connection = Connection((140, 2, 8), iterations=1)
    first, second = connection.run("triton"), connection.run("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_tokens():
    connection = Connection((2, 0, 4, 16))
    ours, expected = connection.run("triton"), connection.run("reference")
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor)


def test_gradient_of_the_streams_is_completed_in_place_of_autograd():
    """What is handed on leads to the kernel."""
    connection = Connection((3, 2, 16), iterations=1)
    connection.tensors["streams"].requires_grad_()
    outputs = connection.forward(connection.tensors, "triton")
    assert outputs["handed on"].grad_fn is outputs["mixed"].grad_fn
    with torch.no_grad():
        assert connection.forward(connection.tensors, "triton")["handed on"] is connection.tensors["streams"]


@pytest.mark.parametrize("training", [False, True])
def test_operations_are_registered_properly(training):
    connection = Connection((2, 3, 8), iterations=1)
    tensors = {name: tensor.detach().requires_grad_(training) for name, tensor in connection.tensors.items()}
    parameters = list(tensors.values())[2:]
    arguments = (tensors["streams"], *parameters[:2], parameters[2:5], parameters[5:], 1e-5, 1, True, training)
    torch.library.opcheck(hyper_connection_triton.run_hyper_connection_read.typed, arguments)
    _, residual, post = hyper_connection_triton.run_hyper_connection_read.typed(*arguments)[:3]
    maps = [tensor.detach().requires_grad_(training) for tensor in (residual, post)]
    torch.library.opcheck(
        hyper_connection_triton.run_hyper_connection_write.typed,
        (tensors["streams"], tensors["update"], *maps, training),
    )


def test_compiled():
    connection = Connection((2, 3, 8), iterations=1)
    expected = connection.run("triton")
    forward = connection.forward
    connection.forward = torch.compile(lambda leaves, impl: forward(leaves, impl), fullgraph=True, backend="aot_eager")
    found = connection.run("triton")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 6, 8), {}, "supports from 1 to 5 streams, not 6"),
        ((2, 2, 0), {}, "supports hidden sizes from 1, not 0"),
        ((2, 2, 8), {"dtype": torch.float64}, "supports .*, not torch.float64"),
    ],
)
def test_explicit_kernel_does_not_fall_back(shape, options, message):
    connection = Connection(shape, **options)
    with pytest.raises(RuntimeError, match=f"impl='triton': the kernel of hyper_connection_read {message}"):
        connection.run("triton")
    outputs = connection.forward(connection.tensors, "auto")
    write = [outputs[name] for name in ("handed on", "mixed", "residual", "post")]
    with pytest.raises(RuntimeError, match=f"impl='triton': the kernel of hyper_connection_write {message}"):
        hyper_connection_write(*write, impl="triton")
    assert hyper_connection_write(*write).shape == shape


def test_transforms_take_the_reference():
    connection = Connection((2, 2, 8), iterations=1)
    leaves = connection.tensors

    def total(streams, impl):
        return connection.forward(leaves | {"streams": streams}, impl)["written"].sum()

    found = torch.func.grad(total)(leaves["streams"].detach(), "auto")
    assert found.shape == (2, 2, 8)
    with pytest.raises(RuntimeError, match="does not work under transforms of torch.func"):
        torch.func.grad(total)(leaves["streams"].detach(), "triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"impl": "cuda"}, "impl='cuda': must be one of"),
        ({"update": torch.ones(2, 7)}, r"update has shape \[2, 7\]: must be \[2, 8\] for 2 streams of 8"),
        ({"residual": torch.ones(2, 4)}, r"residual has shape \[2, 4\]: must be \[2, 2, 2\]"),
        ({"post": torch.ones(2)}, r"post has shape \[2\]: must be \[2, 2\]"),
        ({"streams": torch.ones(8)}, r"streams has shape \[8\]: must be \[..., S, D\]"),
    ],
)
def test_write_of_what_does_not_fit(changed, message):
    given = {"streams": torch.ones(2, 2, 8), "update": torch.ones(2, 8)}
    given |= {"residual": torch.ones(2, 2, 2), "post": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=message):
        hyper_connection_write(**given | changed)


def test_alphas_of_several_numbers():
    connection = Connection((2, 2, 8))
    connection.tensors["alpha_1"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"alphas\[1\] has shape \[2\]: must be a single number"):
        connection.forward(connection.tensors, "auto")


def test_kernels_compile_ahead_of_time(compiled_ahead_of_time, gpu_target):
    compiled = compiled_ahead_of_time("ahead_of_time_hyper_connection.py")
    operations = ("score", "maps_fwd", "mix", "pre_grad", "maps_bwd", "fold", "streams_grad", "projection_grad")
    operations += ("parameter_grad", "write_fwd", "write_bwd")
    names = {f"hyper_connection_{name}_kernel" for name in operations}
    assert {(entry["kernel"], entry["target"]) for entry in compiled} == {(name, gpu_target) for name in names}
    assert all(entry["shared_memory"] <= entry["shared_memory_limit"] for entry in compiled)
    for entry in compiled:
        assert entry["wide_loads"] or not entry["wide"], entry
