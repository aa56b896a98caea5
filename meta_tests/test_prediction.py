"""Running a model as a GPU: modes against the models themselves, and a prediction's parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixtures.hardware_models import device_random as draws
from fixtures.hardware_models.device_integers import randperm
from fixtures.hardware_models.epilogue import Epilogue
from fixtures.hardware_models.grids import GRIDS
from fixtures.hardware_models.matrix_units import matmul
from fixtures.hardware_models.modes import (
    CpuDrawWarning,
    Stream,
    device_random,
    matrix_units,
)
from fixtures.hardware_models.offsets import offset_after
from fixtures.numerics.attention_bounds import attention
from fixtures.numerics.formats import BF16
from fixtures.own_model.factory import UserModelError
from fixtures.prediction import runs as prediction
from fixtures.prediction.own_model import train as train_own
from fixtures.training import philox
from fixtures.training.step import Config

BFLOAT16 = torch.bfloat16


def numbers(name: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(philox.uniform(3, name, shape)).float()


class TestMatrixUnits:
    def test_a_linear_layer_and_its_gradients_are_the_unit_s(self) -> None:
        x, w = numbers("x", 5, 40).requires_grad_(), numbers("w", 7, 40).requires_grad_()
        bias, dy = numbers("b", 7), numbers("dy", 5, 7).bfloat16()
        with matrix_units("H100"), torch.autocast("cpu", BFLOAT16):
            y = F.linear(x, w, bias)
        with matrix_units("H100"):
            y.backward(dy)
        narrow_x, narrow_w = x.detach().bfloat16(), w.detach().bfloat16()
        added = Epilogue(beta=1.0, source=bias.bfloat16().expand(5, 7))
        want = matmul(narrow_x, narrow_w.T, gpu="H100", out_dtype=BFLOAT16, epilogue=added)
        assert torch.equal(y, want)
        dx = matmul(dy, narrow_w, gpu="H100", out_dtype=BFLOAT16).float()
        dw = matmul(dy.T, narrow_x, gpu="H100", out_dtype=BFLOAT16).float()
        assert torch.equal(x.grad, dx)  # type: ignore[arg-type]
        assert torch.equal(w.grad, dw)  # type: ignore[arg-type]

    def test_batched_and_scaled_products_too(self) -> None:
        a, b, c = (numbers(n, 3, 6, 6).bfloat16() for n in "abc")
        with matrix_units("A100"):
            plain, added = a @ b, torch.baddbmm(c, a, b, alpha=0.5, beta=2.0)
        assert torch.equal(plain, matmul(a, b, gpu="A100", out_dtype=BFLOAT16))
        epilogue = Epilogue(alpha=0.5, beta=2.0, source=c)
        assert torch.equal(added, matmul(a, b, gpu="A100", out_dtype=BFLOAT16, epilogue=epilogue))

    def test_fp32_is_the_tf32_unit_s_only_where_it_is_asked_for(self) -> None:
        a, b = numbers("a", 6, 50), numbers("b", 50, 6)
        plain = a @ b
        with matrix_units("A100"):
            assert torch.equal(a @ b, plain)
        with matrix_units("A100", tf32=True):
            assert torch.equal(a @ b, matmul(a, b, gpu="A100"))
        assert torch.equal(a @ b, plain)

    @pytest.mark.parametrize("hidden", ["causal", "mask", "nothing"])
    def test_attention_stays_within_the_bound_of_truncated_sums(self, hidden: str) -> None:
        """Truncation to 24 bits and 2^-24 of the largest term: 4 u for u, far below one bf16."""
        q, k, v, dout = (numbers(n, 1, 2, 9, 16).bfloat16() for n in ("q", "k", "v", "dout"))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        allowed = torch.ones(9, 9, dtype=torch.bool).tril()
        mask = allowed if hidden == "mask" else None
        with matrix_units("A100"):
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=hidden == "causal")
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        found = attention(q, k, v, dout, BF16, allowed=allowed if hidden != "nothing" else None)
        for name, got in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
            error = (got.detach().double() - found.values[name]).abs()
            assert bool((error <= found.bounds[name].limit).all()), name
        cpu = F.scaled_dot_product_attention(q, k, v, mask, is_causal=hidden == "causal")
        assert out.dtype == cpu.dtype
        assert type(F.scaled_dot_product_attention).__name__ == "builtin_function_or_method"

    def test_grouped_queries_and_bias(self) -> None:
        q, k, v = (numbers(n, 1, h, 5, 16).bfloat16() for n, h in (("q", 4), ("k", 2), ("v", 2)))
        bias = numbers("bias", 5, 5).bfloat16()
        with matrix_units("H100"):
            grouped = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            assert torch.equal(grouped, F.scaled_dot_product_attention(q, k, v, bias))

    def test_a_query_that_may_look_nowhere_gets_zeros(self) -> None:
        q = numbers("q", 1, 1, 3, 8).bfloat16().requires_grad_()
        allowed = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
        for mask in (allowed, torch.zeros(3, 3).masked_fill(~allowed, -math.inf)):
            with matrix_units("H100"):
                out = F.scaled_dot_product_attention(q, q, q, mask)
                (gradient,) = torch.autograd.grad(out.float().sum(), q)
            assert not out[..., 1, :].any()
            assert bool(out.isfinite().all())
            assert bool(gradient.isfinite().all())

    def test_double_precision_attention_is_the_cpu_s(self) -> None:
        q = numbers("q", 1, 1, 3, 8).double()
        want = F.scaled_dot_product_attention(q, q, q)
        with matrix_units("H100"):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)


class TestDeviceRandom:
    def test_draws_follow_one_another(self) -> None:
        shape, keywords = (300, 1000), {"seed": 5, "gpu": "A100"}
        with device_random("A100", seed=5) as stream:
            weight = nn.init.normal_(torch.empty(shape), std=0.02)
            assert stream.offset == offset_after("normal", shape, gpu="A100")
            dropped = F.dropout(torch.ones(shape, dtype=BFLOAT16), 0.1)
            order = torch.randperm(1000)
        assert torch.equal(weight, draws.normal(shape, std=0.02, **keywords))  # type: ignore[arg-type]
        at = offset_after("normal", shape, gpu="A100")
        keep = draws.dropout_mask(shape, 0.1, offset=at, dtype=BFLOAT16, **keywords)  # type: ignore[arg-type]
        assert torch.equal(dropped != 0, keep)
        assert dropped.max() == torch.tensor(1 / 0.9).bfloat16()
        at = offset_after("dropout_mask", shape, gpu="A100", offset=at, dtype=BFLOAT16)
        assert torch.equal(order, randperm(1000, offset=at, **keywords))  # type: ignore[arg-type]

    @pytest.mark.parametrize("draw", ["uniform_", "bernoulli_", "rand", "randn"])
    def test_two_gpus_differ_beyond_a_launch(self, draw: str) -> None:
        count = 300_000
        found = []
        for gpu in ("A100", "H100"):
            with device_random(gpu, seed=1):
                made = torch.empty(count) if draw.endswith("_") else None
                found.append(
                    getattr(made, draw)() if made is not None else getattr(torch, draw)(count)
                )
        threads = GRIDS["A100"].multiprocessors * 2048
        assert torch.equal(found[0][:threads], found[1][:threads])
        assert not torch.equal(found[0][threads:], found[1][threads:])

    def test_tensors_without_gaps_are_filled_in_the_order_of_their_memory(self) -> None:
        """TensorIterator, and get_vector_size of Dropout.cu; a tensor with gaps goes by index."""
        with device_random("A100", seed=1):
            filled = torch.empty(40, 30).T.normal_()
        assert torch.equal(filled.T, draws.normal((40, 30), seed=1, gpu="A100"))
        with device_random("A100", seed=1):
            assert torch.equal(torch.randn_like(filled), filled)
        ones = torch.ones(2, 40, 32, dtype=BFLOAT16)
        for x, back, shape, dense in (
            (ones.transpose(0, 2), lambda y: y.transpose(0, 2), (2, 40, 32), True),
            (ones[..., :30], lambda y: y, (2, 40, 30), False),
            (ones[..., :30].transpose(0, 2), lambda y: y, (30, 40, 2), False),
        ):
            with device_random("A100", seed=1):
                found = back(F.dropout(x, 0.5) != 0)
            want = draws.dropout_mask(shape, 0.5, seed=1, gpu="A100", dtype=BFLOAT16, dense=dense)
            assert torch.equal(found, want)

    def test_what_dropout_keeps_is_scaled_as_the_kernels_do(self) -> None:
        """By 1 / fp32(1 - p) forwards, and by fp32(1 / (1 - p)) backwards; fp64 stays fp64."""
        p = 0.15
        x = torch.ones(100, requires_grad=True)
        with device_random("A100", seed=1):
            y = F.dropout(x, p)
        (dx,) = torch.autograd.grad(y.sum(), x)
        forward = torch.tensor(1.0 / torch.tensor(1.0 - p).item())
        assert set(y.tolist()) == {0.0, forward.item()}
        assert set(dx.tolist()) == {0.0, torch.tensor(1.0 / (1.0 - p)).item()}
        assert set(y.tolist()) != set(dx.tolist())
        with device_random("A100", seed=1):
            double = F.dropout(torch.full((100,), 1 / 3, dtype=torch.float64), 0.5)
        assert double.max().item() == 2 / 3

    def test_a_draw_that_is_not_modelled_is_said_to_be_the_cpu_s(self) -> None:
        with device_random("A100", seed=1) as stream:
            with pytest.warns(CpuDrawWarning, match="aten.randint"):
                torch.randint(9, (3,))
            assert torch.randn(3, device="meta").is_meta
        assert stream.offset == 0

    def test_a_generator_of_one_s_own_is_left_alone(self) -> None:
        generator = torch.Generator().manual_seed(3)
        want = torch.empty(9).normal_(generator=generator)
        with device_random("H100", seed=0):
            again = torch.empty(9).normal_(generator=torch.Generator().manual_seed(3))
        assert torch.equal(again, want)

    def test_evaluation_drops_nothing(self) -> None:
        x = torch.ones(5)
        with device_random("H100", seed=0) as stream:
            assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert stream.offset == 0


SMALL = replace(prediction.CONFIG, width=32, mlp_width=64, heads=2)


class TestPrediction:
    def test_each_machine_changes_one_mechanism(self) -> None:
        machines = prediction.machines("A100", "H100")
        assert list(machines) == ["none", *prediction.MECHANISMS, "all"]
        for name in prediction.MECHANISMS:
            changed = [m for m in prediction.MECHANISMS if getattr(machines[name], m) == "H100"]
            assert changed == [name]

    @pytest.mark.parametrize("gpu", ["K80", "H100 PCIe", "V100"])
    def test_a_gpu_without_models_is_refused_with_those_that_have(self, gpu: str) -> None:
        with pytest.raises(ValueError, match="known are"):
            prediction.machines("A100", gpu)

    def test_what_a_small_model_does_not_see_leaves_equal_bits(self) -> None:
        """Its tensors fit one launch; the order of a large data set and sums over ranks differ."""
        machines = prediction.machines("A100", "H100")
        base = prediction.train(machines["none"], 1, SMALL)
        seen = {
            name: prediction.drift(base, prediction.train(machines[name], 1, SMALL))
            for name in prediction.MECHANISMS
        }
        assert seen["initial_weights"] == seen["dropout_masks"] == prediction.Drift(0, 0, 0, 0)
        assert seen["data_order"].gradient > 10 * seen["collectives"].gradient > 0

    def test_a_wider_product_ends_otherwise_on_another_unit(self) -> None:
        machines = prediction.machines("A100", "H100")
        wide = replace(SMALL, width=128)
        base, other = (
            prediction.train(machines[name], 1, wide) for name in ("none", "matrix_units")
        )
        assert prediction.drift(base, other).gradient > 0

    def test_drift_is_the_divergence_of_the_predictions(self) -> None:
        flat = torch.zeros(2)
        one = prediction.Outcome(flat + 1, flat + 1, torch.tensor([[0.0, 0.0]]))
        other = prediction.Outcome(flat + 2, flat + 1, torch.tensor([[math.log(3.0), 0.0]]))
        found = prediction.drift(one, other)
        want = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
        assert found.kl == pytest.approx(want)
        assert (found.gradient, found.parameters) == (1.0, 0.0)

    def test_samples_are_windows_of_the_text(self) -> None:
        config = Config()
        (tokens, targets), *_ = prediction.batches("A100", 1, config)
        assert tokens.shape == targets.shape == (config.batch, config.length)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])

    def test_masks_come_from_one_stream(self) -> None:
        stream = Stream("A100", 1)
        keep = prediction.dropout_masks(stream, SMALL, 2)
        assert keep.shape == (1, 2, 2, SMALL.length, SMALL.width)
        assert not torch.equal(keep[0, 0], keep[0, 1])


def own_model() -> tuple[nn.Module, object, list[torch.Tensor]]:
    """A factory as ``--model`` takes it; its model returns logits."""
    model = nn.Sequential(nn.Linear(16, 300), nn.Dropout(0.1), nn.Linear(300, 8))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).float(), torch.arange(len(batch)) % 8)

    batches = [numbers(f"batch {i}", 4, 16) for i in range(4)]
    return model, loss, batches


class TestOwnModel:
    SPEC = f"{__name__}:own_model"

    def test_a_small_one_starts_alike_and_drifts_by_its_collective(self) -> None:
        machines = prediction.machines("A100", "H100")
        names = ("none", "initial_weights", "collectives")
        base, weights, summed = (train_own(self.SPEC, machines[name], 2) for name in names)
        assert prediction.drift(base, weights) == prediction.Drift(0, 0, 0, 0)
        found = prediction.drift(base, summed)
        assert found.gradient > 0
        assert 0 < found.kl < 1e-3

    def test_weights_are_those_of_the_device(self) -> None:
        machine = prediction.Machine.of("H100")
        one, again = (train_own(self.SPEC, machine, 1) for _ in range(2))
        assert torch.equal(one.parameters, again.parameters)
        assert one.logits.shape == (16, 8)

    def test_a_factory_that_cannot_be_used_is_refused(self) -> None:
        with pytest.raises(UserModelError, match="no module nowhere"):
            train_own("nowhere:factory", prediction.Machine.of("H100"), 1)
