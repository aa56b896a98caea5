"""The reference step: its formulas, its inputs, and that the flow bound holds and is tight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fixtures.nodes import NODE_IDS
from fixtures.numerics.bounds import flow_factor, gamma
from fixtures.training import data, noise, philox, policies, sensitivity, trace
from fixtures.training.framework import FRAMEWORK, isolate
from fixtures.training.reference import REFERENCE
from fixtures.training.step import Config, MicroBatch, Ops, StepResult, Training, build

CONFIG = Config()
CPU = torch.device("cpu")
NAMES = sensitivity.quantities(CONFIG)
EPS = torch.finfo(torch.float64).eps
# A bound is tight if the observed error comes within a fifth of the root mean square predicted.
TIGHT = 0.2 / flow_factor(sensitivity.entries(CONFIG))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def truth(_one_thread: None) -> trace.Trace:
    return trace.truth_trace(CONFIG)


@pytest.fixture(scope="module")
def batch(truth: trace.Trace) -> list[MicroBatch]:
    return trace.micro_batches_of(truth, 0)


@pytest.fixture(scope="module")
def initial(truth: trace.Trace) -> dict[str, Tensor]:
    return trace.parameters_of(truth, 0)


@pytest.fixture(scope="module")
def sensitivities(batch: list[MicroBatch], initial: dict[str, Tensor]) -> sensitivity.Sensitivities:
    return sensitivity.sensitivities(CONFIG, batch, initial, draws=4)


def step(ops: Ops, batch: list[MicroBatch], **options: int) -> StepResult:
    return Training(build(CONFIG, ops, CPU), ops, CONFIG, CPU).gradients(batch, **options)


def margins(
    gradients: dict[str, Tensor], truth: trace.Trace, bound: dict[str, float]
) -> dict[str, float]:
    """Observed error of each gradient over its bound."""
    want = {name: torch.from_numpy(truth[f"step0/gradient/{name}"]) for name in gradients}
    errors = sensitivity.errors(gradients, want)
    return {name: error / bound[f"gradient/{name}"] for name, error in errors.items()}


# ---- the formulas -------------------------------------------------------------------------------


def test_every_node_is_an_operation_of_the_step() -> None:
    names = {field.name for field in fields(Ops)}
    assert names == {*NODE_IDS, "linear", "embedding", "residual"}


def test_gradients_are_the_slopes_of_the_loss(
    batch: list[MicroBatch],
    initial: dict[str, Tensor],
    sensitivities: sensitivity.Sensitivities,
) -> None:
    """Central differences of the loss along each parameter's gradient, at h and h/2.

    Their errors go as h^2, so the finer one is off by a third of what the two differ by, and by
    the rounding of two losses.
    """

    def loss(name: str, move: Tensor) -> float:
        moved = {**initial, name: initial[name] + move}
        model = build(CONFIG, REFERENCE, CPU, parameters=moved)
        total, count = 0.0, 0
        with torch.no_grad():
            for micro in batch:
                logits = model(micro.tokens, micro.keep).flatten(0, 1)
                total += micro.valid * float(
                    REFERENCE.cross_entropy(logits, micro.targets.flatten())
                )
                count += micro.valid
        return total / count

    limit = sensitivity.step_bound_for(policies.POLICIES["fp64"], sensitivities, CONFIG)
    result = step(REFERENCE, batch)
    for name, gradient in result.gradients.items():
        zero = trace.is_zero_gradient(name)
        direction = torch.ones_like(gradient) if zero else gradient
        direction = direction / direction.norm()
        coarse, fine = (
            (loss(name, h * direction) - loss(name, -h * direction)) / (2 * h) for h in (2e-3, 1e-3)
        )
        want = 0.0 if zero else float(gradient.norm())
        rounding = result.loss * limit["loss"] / 1e-3
        assert abs(fine - want) <= 0.5 * abs(coarse - fine) + rounding, name


def test_framework_in_float64_equals_the_formulas(
    truth: trace.Trace, batch: list[MicroBatch], sensitivities: sensitivity.Sensitivities
) -> None:
    bound = sensitivity.step_bound_for(policies.POLICIES["fp64"], sensitivities, CONFIG)
    observed = margins(step(FRAMEWORK, batch).gradients, truth, bound)
    assert max(observed.values()) < 1.0
    assert max(bound.values()) < 100 * EPS  # so that this says something


def test_adamw_in_float64_equals_the_formula(truth: trace.Trace) -> None:
    """Three updates by the same gradients.

    Each moment and the update are under 32 roundings away. The first moment may cancel, but its
    terms are at most sqrt(3 v), so the update is off by gamma_32 of at most two learning rates.
    """

    def parameters_after(ops: Ops) -> dict[str, Tensor]:
        training = Training(build(CONFIG, ops, CPU), ops, CONFIG, CPU)
        for index in range(trace.STEPS):
            for name, parameter in training.model.named_parameters():
                parameter.grad = torch.from_numpy(truth[f"step{index}/gradient/{name}"]).clone()
            training.optimizer.step()
        return {name: p.detach() for name, p in training.model.named_parameters()}

    got, want = parameters_after(FRAMEWORK), parameters_after(REFERENCE)
    for name, value in got.items():
        size = want[name].abs() + 2 * trace.STEPS * CONFIG.learning_rate
        assert bool(((value - want[name]).abs() <= gamma(32, EPS / 2) * size).all()), name
        stored = torch.from_numpy(truth[f"step{trace.STEPS - 1}/parameter/{name}"])
        assert torch.equal(want[name], stored), name


def test_ranks_mean_is_the_gradient_of_the_whole_batch(
    batch: list[MicroBatch], truth: trace.Trace, sensitivities: sensitivity.Sensitivities
) -> None:
    policy = policies.POLICIES["fp64"]
    total = sum(micro.valid for micro in batch)
    whole = step(REFERENCE, batch)
    for ranks in sensitivity.WORLD_SIZES:  # with 8, four ranks have no row at all
        shares = [
            step(REFERENCE, [m.shard(r, ranks) for m in batch], valid_total=total, ranks=ranks)
            for r in range(ranks)
        ]
        bound = sensitivity.step_bound_for(policy, sensitivities, CONFIG, world_size=ranks)
        loss = sum(share.loss for share in shares) / ranks
        assert math.isclose(loss, whole.loss, rel_tol=bound["loss"])
        mean = {n: sum(share.gradients[n] for share in shares) / ranks for n in whole.gradients}
        assert max(margins(mean, truth, bound).values()) < 1.0


def test_micro_batch_without_targets_changes_nothing(batch: list[MicroBatch]) -> None:
    empty = replace(batch[0], targets=torch.full_like(batch[0].targets, -100))
    for ops in (REFERENCE, FRAMEWORK):
        with_it, without = step(ops, [*batch, empty]), step(ops, batch)
        assert with_it.loss == without.loss
        for name, want in without.gradients.items():
            assert torch.equal(with_it.gradients[name], want), name


@pytest.mark.parametrize("name", ["reference", "float32", "float16"])
def test_scaler_leaves_out_a_step_with_a_non_finite_gradient(
    name: str, batch: list[MicroBatch]
) -> None:
    ops = REFERENCE if name == "reference" else isolate("grad_scaler", getattr(torch, name))
    training = Training(build(CONFIG, ops, CPU), ops, CONFIG, CPU)
    poisoned = replace(training.ops, all_reduce=lambda gradients: [g * math.inf for g in gradients])
    training.ops = poisoned
    before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
    training.gradients(batch)
    training.update()
    assert all(torch.equal(p, before[n]) for n, p in training.model.named_parameters())
    training.ops = ops
    training.gradients(batch)
    training.update()
    assert not any(torch.equal(p, before[n]) for n, p in training.model.named_parameters())


def test_isolated_scaler_is_enabled_on_the_cpu_and_its_scale_is_kept() -> None:
    scaler = isolate("grad_scaler", torch.float32).grad_scaler(CPU, CONFIG.loss_scale)
    assert float(scaler.scale(torch.ones((), dtype=torch.float64))) == CONFIG.loss_scale


def test_unknown_node_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'softmax' cannot run alone; those that can: .*attention"
    ):
        isolate("softmax", torch.float32)


# ---- the inputs ---------------------------------------------------------------------------------


def test_philox_words_are_those_of_the_published_generator() -> None:
    """The first word of Philox4x64-10 for counter 1 and key 0, from Random123's definition."""

    def philox4x64(counter: list[int], key: list[int]) -> list[int]:
        mask = 2**64 - 1
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [
                (b >> 64) ^ counter[1] ^ key[0],
                b & mask,
                (a >> 64) ^ counter[3] ^ key[1],
                a & mask,
            ]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        return counter

    words = philox4x64([1, 0, 0, 0], [7, 0])
    want = [((word >> 11) + 0.5) * 2.0**-52 - 1.0 for word in words]
    assert philox.uniform(7, "", (4,)).tolist() == want


def test_permutation_and_mask_obey_their_laws() -> None:
    assert sorted(philox.permutation(1, "p", 1000)) == list(range(1000))
    count, p = 100_000, 0.9
    kept = int(philox.bernoulli(1, "b", (count,), p).sum())
    # Hoeffding's inequality at a false alarm of 1e-9.
    assert abs(kept - count * p) < math.sqrt(0.5 * count * math.log(2e9))


def test_every_byte_of_the_text_is_a_target_once() -> None:
    targets = [token for piece in data.sequences(CONFIG) for token in piece[1:]]
    lines = data.TEXT.splitlines()
    want = Counter(byte for line in lines for byte in line.encode()) + Counter({256: len(lines)})
    assert Counter(targets) == want


def test_micro_batches_are_uneven_and_the_last_is_padded() -> None:
    for first, last in data.batches(CONFIG, REFERENCE, trace.STEPS):
        assert first.valid == first.targets.numel() > last.valid > 0


def test_batches_run_on_into_further_epochs() -> None:
    per_epoch = len(data.sequences(CONFIG)) // CONFIG.batch
    many = data.batches(CONFIG, REFERENCE, 2 * per_epoch + 2)
    assert not torch.equal(many[0][0].tokens, many[per_epoch][0].tokens)


def test_prompts_are_100_and_fit() -> None:
    cases = data.prompts(CONFIG)
    assert len(cases) == 100
    assert min(map(len, cases.values())) == 1
    assert max(map(len, cases.values())) == CONFIG.length
    assert len({tuple(case) for case in cases.values()}) == 100


# ---- the truth ----------------------------------------------------------------------------------


def test_truth_is_the_same_whatever_torch_draws(truth: trace.Trace) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = trace.truth_trace(CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.keys() == truth.keys()
    assert all(np.array_equal(again[key], truth[key]) for key in truth)


def test_truth_is_finite_small_and_has_exact_inputs(truth: trace.Trace) -> None:
    assert all(np.isfinite(value).all() for value in truth.values())
    assert sum(v.size * (4 if v.dtype.kind == "f" else v.itemsize) for v in truth.values()) < 2e6
    for key, value in truth.items():
        if key.startswith("input/parameter/"):
            assert np.array_equal(value.astype(np.float32), value), key


def test_key_bias_has_gradient_zero_and_no_other_parameter_has(truth: trace.Trace) -> None:
    for key, value in truth.items():
        if "/gradient/" in key:
            assert (not value.any()) == trace.is_zero_gradient(key), key


# ---- the flow bound -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    "node",
    ["attention", "layer_norm", "gelu", "dropout_mask", "cross_entropy", "grad_scaler"],
)
def test_flow_of_each_node_is_within_its_bound(
    node: str,
    dtype: torch.dtype,
    truth: trace.Trace,
    batch: list[MicroBatch],
    sensitivities: sensitivity.Sensitivities,
) -> None:
    bound = sensitivity.flow_bound_for(node, dtype, sensitivities, CONFIG)
    observed = margins(step(isolate(node, dtype), batch).gradients, truth, bound)
    assert max(observed.values()) < 1.0
    if dtype != torch.float64:  # in float64 the rest of the step errs alike in truth and observed
        relative = [m for name, m in observed.items() if not trace.is_zero_gradient(name)]
        assert max(relative) > TIGHT


@pytest.mark.parametrize("name", [name for name in policies.POLICIES if name != "fp64"])
@pytest.mark.parametrize("index", range(trace.STEPS))
def test_step_under_each_policy_is_within_its_bound(
    name: str, index: int, truth: trace.Trace, sensitivities: sensitivity.Sensitivities
) -> None:
    """Steps 1 and 2 are judged by the sensitivities of step 0: three updates move them little."""
    stored = {n: v.float().double() for n, v in trace.parameters_of(truth, index).items()}
    micro_batches = trace.micro_batches_of(truth, index)
    model = build(CONFIG, REFERENCE, CPU, parameters=stored)
    want = Training(model, REFERENCE, CONFIG, CPU).gradients(micro_batches)
    policy = policies.POLICIES[name]
    got = policies.run_step(policy, CONFIG, micro_batches, CPU, stored)
    bound = sensitivity.step_bound_for(policy, sensitivities, CONFIG)
    here = {f"step0/gradient/{n}": gradient.numpy() for n, gradient in want.gradients.items()}
    observed = margins(got.gradients, here, bound)
    relative = [m for n, m in observed.items() if not trace.is_zero_gradient(n)]
    assert max(observed.values()) < 1.0
    assert np.median(relative) > TIGHT


def test_tanh_for_erf_is_seen_in_fp32_and_drowns_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
    truth: trace.Trace,
    batch: list[MicroBatch],
    sensitivities: sensitivity.Sensitivities,
) -> None:
    true_gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: true_gelu(x, approximate="tanh"))

    def worst(dtype: torch.dtype) -> float:
        bound = sensitivity.flow_bound_for("gelu", dtype, sensitivities, CONFIG)
        return max(margins(step(isolate("gelu", dtype), batch).gradients, truth, bound).values())

    assert worst(torch.float32) > 100
    assert worst(torch.bfloat16) < 1


def test_division_left_out_of_unscaling_is_seen_in_every_format(
    monkeypatch: pytest.MonkeyPatch,
    truth: trace.Trace,
    batch: list[MicroBatch],
    sensitivities: sensitivity.Sensitivities,
) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, optimizer: None)
    for dtype in DTYPES:
        bound = sensitivity.flow_bound_for("grad_scaler", dtype, sensitivities, CONFIG)
        gradients = step(isolate("grad_scaler", dtype), batch).gradients
        assert max(margins(gradients, truth, bound).values()) > 100


def test_noise_of_another_stream_is_as_large_as_predicted(
    batch: list[MicroBatch],
    initial: dict[str, Tensor],
    sensitivities: sensitivity.Sensitivities,
) -> None:
    clean = sensitivity.observe(CONFIG, REFERENCE, batch, initial)
    for node, kind in noise.TERMS:
        other = noise.Noise(kind, sensitivity.SCALE, CONFIG.seed + 1, "other")
        moved = sensitivity.observe(CONFIG, noise.noisy(node, other), batch, initial)
        for name, a, b, size in zip(
            NAMES, moved, clean, sensitivities[f"{node}/{kind}"], strict=True
        ):
            if trace.is_zero_gradient(name):
                continue
            change = float((a - b).norm() / b.norm()) / sensitivity.SCALE
            assert change <= flow_factor(1) * size, (node, kind, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_formats_are_those_the_policies_assume(
    dtype: torch.dtype, batch: list[MicroBatch]
) -> None:
    (policy,) = (p for p in policies.POLICIES.values() if p.autocast == dtype)
    training = policies.training_for(policy, CONFIG, CPU)
    with trace.recorded_outputs(training.model) as outputs:
        training.gradients(batch)
    in_16_bit = {name for name, output in outputs.items() if output.dtype == dtype}
    assert in_16_bit == {name for name in outputs if "norm" not in name}
    assert all(outputs[name].dtype == torch.float32 for name in outputs if "norm" in name)
