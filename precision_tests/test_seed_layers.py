"""Seeds and initialisation: what a seed fixes, and whether draws follow their law.

What goes wrong: a layer is left unseeded; something is drawn before the seed; parameters are drawn
in 16 bit; ranks start from different parameters, or share their dropout; a generator clips tails.

Theorems: a draw is a function of the seed and of the draws before it. Of n draws the empirical law
is within sqrt(ln(2/q)/2n) of the true one (Massart 1990), the largest has a known exact law (David
and Nagaraja), and so has the count of distinct ones (McDiarmid 1989); q = 1e-9 per check.

Truth: an independent MT19937 (``numerics/mersenne_twister.py``) and what the CPU makes of its words
(``numerics/draw_references.py``). CUDA draws from Philox: there laws and repetition are checked.

Claims of the ledger: 1, 2 (seeds of the runs they compare), 47 (seven layers, all needed: false, a
layer matters exactly for what draws from it; torch.manual_seed seeds CUDA too), 48 (PYTHONHASHSEED
set in the script: no effect there, children inherit it), 49 (the order of steps: they commute; what
counts is that they precede the first draw), 50 and 51 (nn.Linear takes its values from cuBLAS, or
from CUBLAS_WORKSPACE_CONFIG: false, they are uniform_ of the generator, bit for bit), 52 (uniform_
has the same bits on every instruction set: so on [0, 1); between other ends the last bit depends on
whether the compiler fuses, so truth has both forms; normal draws are held to a bound).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import bounds, draw_references, mersenne_twister, seed_layers_bounds
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.numerics.mersenne_twister import MersenneTwister
from fixtures.training import seeding
from fixtures.training.policies import POLICIES, training_for
from fixtures.training.truth import CONFIG, StepTruth

SEED = 2718
SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 625, 1000)
NORMAL_SIZES = (1, 5, 15, 16, 17, 24, 31, 32, 33, 100, 1000)
INPUTS, OUTPUTS = 37, 19

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)


# --- golden cases -------------------------------------------------------------------------------


def uniform_truth() -> Truth:
    """rand as integers: 24 bits of each word for fp32, 53 of each two for fp64."""
    singles = draw_references.uniform24(MersenneTwister(SEED), max(SIZES)) * 2.0**24
    doubles = draw_references.uniform53(MersenneTwister(SEED), max(SIZES)) * 2.0**53
    values = {"fp32": torch.from_numpy(singles).int(), "fp64": torch.from_numpy(doubles).long()}
    return Truth(inputs={}, values=values)


def linear_truth() -> Truth:
    """Weight, then bias, of nn.Linear: uniform on +-1/sqrt(inputs), fused or not."""
    values = {}
    for fused in (True, False):
        source = MersenneTwister(SEED)
        for name, shape in (("weight", (OUTPUTS, INPUTS)), ("bias", (OUTPUTS,))):
            unit = draw_references.uniform24(source, math.prod(shape))
            drawn = draw_references.between(unit, -(INPUTS**-0.5), INPUTS**-0.5, fused=fused)
            values[f"{name}-{_form(fused)}"] = torch.from_numpy(drawn).reshape(shape)
    return Truth(inputs={}, values=values)


def _form(fused: bool) -> str:
    return "fused" if fused else "separate"


def normal_truth() -> Truth:
    """randn, with the radius and the angle of each value."""
    inputs, values = {}, {}
    for size in NORMAL_SIZES:
        drawn = draw_references.normal(MersenneTwister(SEED), size)
        value, radius, angle = (torch.from_numpy(part).float() for part in drawn)
        values[f"n{size}"] = value
        inputs |= {f"radius{size}": radius, f"angle{size}": angle}
    return Truth(inputs=inputs, values=values)


def _golden(name: str, generate: Callable[[], Truth], bound: str = "exact") -> Golden:
    return Golden(
        node="seed_layers",
        name=name,
        generate=generate,
        arguments={},
        precision="integers from an independent MT19937; normal: float64, rounded once to fp32",
        bound=bound,
        uses=(mersenne_twister, draw_references, _form),
        last_bit=bound != "exact",
    )


GOLDEN = (
    _golden("uniform", uniform_truth),
    _golden("linear", linear_truth),
    _golden("normal", normal_truth, "Box-Muller in fp32"),
)


# --- promise: bound -----------------------------------------------------------------------------

DRAWS = (256, 1024)
COUNT = math.prod(DRAWS)
STD_TRUNCATED = stats.truncnorm(-2, 2)


def _uniform(half_width: float) -> Any:
    return stats.uniform(-half_width, 2 * half_width)


# By name: what fills a tensor of 256 rows and 1024 columns, and the law of its elements.
INITIALISERS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "uniform": (lambda t: nn.init.uniform_(t, -0.5, 0.5), _uniform(0.5)),
    "normal": (lambda t: nn.init.normal_(t, std=0.5), stats.norm(0, 0.5)),
    "trunc-normal": (lambda t: nn.init.trunc_normal_(t, a=-2, b=2), STD_TRUNCATED),
    # As models of language do it: the ends are 100 standard deviations away.
    "trunc-normal-narrow": (lambda t: nn.init.trunc_normal_(t, std=0.02), stats.norm(0, 0.02)),
    "xavier-uniform": (nn.init.xavier_uniform_, _uniform(math.sqrt(6 / 1280))),
    "xavier-normal": (nn.init.xavier_normal_, stats.norm(0, math.sqrt(2 / 1280))),
    "kaiming-uniform": (lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)), _uniform(1 / 32)),
    "kaiming-normal": (nn.init.kaiming_normal_, stats.norm(0, math.sqrt(2 / 1024))),
    "randn": (lambda t: torch.randn(t.shape, dtype=t.dtype, device=t.device), stats.norm()),
}


class TestBound:
    @formats
    @pytest.mark.parametrize("initialiser", INITIALISERS)
    def test_law(self, check: Check, device: Device, fmt: Format, initialiser: str) -> None:
        """Distribution, mean, variance and largest value of 2^18 draws."""
        fill, law = INITIALISERS[initialiser]
        torch.manual_seed(SEED)
        got = fill(torch.empty(DRAWS, dtype=fmt.dtype, device=device.torch)).cpu()
        distance = seed_layers_bounds.distance_from_law(got, law, fmt)
        self._near(check, distance, 0.0, seed_layers_bounds.empirical_law(COUNT, fmt), "law")
        moment = seed_layers_bounds.mean(COUNT, law, fmt)
        self._near(check, float(got.double().mean()), 0.0, moment, "mean")
        square = seed_layers_bounds.mean_square(COUNT, law, fmt)
        variance = float(law.moment(2))
        self._near(check, float(got.double().square().mean()), variance, square, "variance")
        score = seed_layers_bounds.largest_score(float(got.double().abs().max()), COUNT, law, fmt)
        self._near(check, score, 0.0, seed_layers_bounds.score(), "largest")
        if fmt in (FP32, FP64) and law.dist.name == "norm":
            repeated = COUNT - len(got.unique())
            limit = seed_layers_bounds.collisions(COUNT, 2**23)
            self._near(check, float(repeated), 0.0, limit, "distinct")
        if fmt in (BF16, FP16):
            expected, limit = seed_layers_bounds.distinct_in_16_bit(COUNT, law, fmt)
            self._near(check, float(len((got + 0.0).unique())), expected, limit, "distinct")

    def _near(self, check: Check, got: float, want: float, bound: Bound, name: str) -> None:
        pair = (torch.tensor([number], dtype=torch.float64) for number in (got, want))
        check.within(*pair, bound, name=name)

    def test_uniform_has_2_to_the_24_values(self, check: Check, device: Device) -> None:
        torch.manual_seed(SEED)
        got = len(torch.rand(COUNT, device=device.torch).unique())
        want, bound = seed_layers_bounds.distinct(COUNT, 2**24)
        self._near(check, float(got), want, bound, "distinct")

    def test_constants_and_orthogonal(self, check: Check, device: Device) -> None:
        """Those that draw nothing are exact; orthogonal_ is so within n u."""
        t = torch.empty(6, 9, device=device.torch)
        check.exact(nn.init.eye_(t).cpu(), torch.eye(6, 9), name="eye")
        check.exact(nn.init.constant_(t, 0.1).cpu(), torch.full((6, 9), 0.1), name="constant")
        torch.manual_seed(SEED)
        rows = nn.init.orthogonal_(torch.empty(32, 64, device=device.torch)).double()
        check.within(
            rows @ rows.mT,
            torch.eye(32, dtype=torch.float64),
            seed_layers_bounds.orthogonal(64, 32),
        )
        sparse = nn.init.sparse_(torch.empty(100, 7, device=device.torch), sparsity=0.25)
        check.exact((sparse == 0).sum(0).tolist(), [25] * 7, name="sparse")

    @example(seed=-1)
    @example(seed=2**32)
    @given(seed=st.integers(-(2**63), 2**64 - 1))
    def test_any_seed_gives_its_words(self, check: Check, seed: int) -> None:
        """On the CPU; only 32 bits of the seed count."""
        got = torch.rand(700, generator=torch.Generator().manual_seed(seed))
        want = draw_references.uniform24(MersenneTwister(seed), 700)
        check.exact(got, torch.from_numpy(want).float())


# --- promise: op --------------------------------------------------------------------------------


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


class TestOp:
    @pytest.mark.sentinel
    @pytest.mark.parametrize("size", SIZES, ids=lambda n: f"n{n}")
    def test_uniform(self, check: Check, truth: LoadTruth, size: int) -> None:
        """On the CPU, from the generator's words, in memory's order whatever the strides."""
        case = truth("uniform")
        for fmt, bits in ((FP32, 24), (FP64, 53)):
            got = torch.rand(size, generator=generator(), dtype=fmt.dtype)
            want = case.values[fmt.name][:size]
            same = (got.double() * 2.0**bits).to(want.dtype)
            check.exact(same, want, name=fmt.name, inputs=case.digest)
            strided = torch.empty(size, 2, dtype=fmt.dtype)[:, 0].uniform_(generator=generator())
            check.exact(strided.contiguous(), got, name=f"{fmt.name}-strided")

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
    def test_uniform_in_16_bit_is_the_fp32_draw_rounded(
        self, check: Check, truth: LoadTruth, fmt: Format
    ) -> None:
        """Where rounding reaches 1, the excluded end, 0 is taken."""
        case = truth("uniform")
        want = (case.values["fp32"].float() * 2.0**-24).to(fmt.dtype)
        want[want == 1] = 0
        got = torch.rand(max(SIZES), generator=generator(), dtype=fmt.dtype)
        check.exact(got, want, inputs=case.digest)

    @pytest.mark.parametrize("size", NORMAL_SIZES, ids=lambda n: f"n{n}")
    def test_normal(self, check: Check, truth: LoadTruth, size: int) -> None:
        """In fp32 on the CPU; below 16 values the formula runs in double precision."""
        case = truth("normal")
        want = case.values[f"n{size}"]
        radius, angle = case.inputs[f"radius{size}"], case.inputs[f"angle{size}"]
        bound = seed_layers_bounds.box_muller(radius, angle)
        if size < 16:
            bound = bounds.rounding(want, FP32)
        got = torch.randn(size, generator=generator())
        bound += bounds.stored_reference(want)
        check.within(got, want, bound, inputs=case.digest)

    def test_linear_initialisation(self, check: Check, truth: LoadTruth) -> None:
        """Bit for bit; fused or not is the compiler's choice, by instruction set."""
        case = truth("linear")
        seeding.seed_everything(SEED)
        layer = nn.Linear(INPUTS, OUTPUTS)
        for name, parameter in layer.named_parameters():
            got = parameter.detach()
            forms = [case.values[f"{name}-{_form(fused)}"] for fused in (True, False)]
            want = next((form for form in forms if torch.equal(form, got)), forms[0])
            check.exact(got, want, name=name, inputs=case.digest)

    def test_embedding_initialisation(self, check: Check) -> None:
        """It is the stream of normal draws, whose truth test_normal holds."""
        seeding.seed_everything(SEED)
        got = nn.Embedding(40, 25).weight.detach()
        check.exact(got, torch.randn(40, 25, generator=generator()))

    def test_streams(self, check: Check, device: Device) -> None:
        """Each repeats under its seed. Its digest is recorded: a stream that moved is named."""
        seeding.seed_everything(SEED)
        first = seeding.digests(seeding.streams(device.torch))
        seeding.seed_everything(SEED)
        again = seeding.digests(seeding.streams(device.torch))
        for name, digest in first.items():
            check.exact(again[name] == digest, True, name=f"{name}-repeats")
            check.observe(digest, name=name)

    @pytest.mark.parametrize("layer", ["", "random", "numpy", "torch"])
    def test_layer_matters_for_what_draws_from_it(
        self, check: Check, device: Device, layer: str
    ) -> None:
        """Two runs without one layer differ in its streams and in no other; with all, in none."""
        runs = []
        for _ in range(2):
            seeding.unseed()
            seeding.seed_everything(SEED, without=layer)
            runs.append(seeding.digests(seeding.streams(device.torch)))
        moved = {name for name in runs[0] if runs[0][name] != runs[1][name]}
        own = {"random": {"random"}, "numpy": {"numpy"}, "": set()}
        want = own.get(layer, runs[0].keys() - {"random", "numpy"})
        check.exact(sorted(moved), sorted(want), name=layer or "all")

    def test_steps_commute(self, check: Check, device: Device) -> None:
        found = []
        for order in itertools.permutations(seeding.LAYERS.values()):
            for set_seed in order:
                set_seed(SEED)
            found.append(seeding.digests(seeding.streams(device.torch)))
        check.exact(all(digests == found[0] for digests in found), True)

    def test_fresh_processes_agree(self, check: Check) -> None:
        """In every stream, with this process too; not in the hashes of strings, for which
        PYTHONHASHSEED comes too late within the process, and in time for its children."""
        one, two = seeding.fresh_processes(2, SEED)
        seeding.seed_everything(SEED)
        here = seeding.digests(seeding.streams(torch.device("cpu")))
        for name, digest in here.items():
            check.exact([one[name] == digest, two[name] == digest], [True, True], name=name)
        check.exact(one["hash"] == two["hash"], False, name="hash")
        check.exact(one["hash-of-child"] == two["hash-of-child"], True, name="hash-of-child")


# --- promise: flow ------------------------------------------------------------------------------


def on_rank(rank: Rank, shapes: dict[str, torch.Size]) -> tuple[dict[str, Tensor], Tensor]:
    """Initial parameters under the shared seed, then the dropout mask of the rank's own."""
    seeding.seed_everything(SEED)
    parameters = {n: torch.empty(shape, device=rank.device) for n, shape in shapes.items()}
    seeding.initialise(parameters)
    torch.manual_seed(seeding.rank_seed(SEED, rank.index))
    mask = F.dropout(torch.ones(256, device=rank.device), 0.5)
    return {name: parameter.cpu() for name, parameter in parameters.items()}, mask.cpu()


def drawn_anew(shapes: dict[str, torch.Size], fused: bool) -> dict[str, Tensor]:
    """The same parameters from the independent generator."""
    source, parameters = MersenneTwister(SEED), {}
    for name, shape in shapes.items():
        width = math.sqrt(3) * (math.sqrt(1 / 3) / math.sqrt(shape[1])) if len(shape) == 2 else 0
        width = width or shape[0] ** -0.5
        drawn = draw_references.between(
            draw_references.uniform24(source, math.prod(shape)), -width, width, fused=fused
        )
        parameters[name] = torch.from_numpy(np.ascontiguousarray(drawn)).reshape(shape)
    return parameters


class TestFlow:
    def test_gradients_from_the_seed_equal_those_from_the_weights(
        self, check: Check, truth: LoadTruth, device: Device
    ) -> None:
        """Seed, initialisation and the step in fp32, against the step from the independent
        generator's weights: bit for bit."""
        step = StepTruth.load(truth)
        shapes = {name: value.shape for name, value in step.parameters.items()}
        seeding.seed_everything(SEED)
        seeded = {name: torch.empty(shape) for name, shape in shapes.items()}
        seeding.initialise(seeded)
        forms = [drawn_anew(shapes, fused) for fused in (True, False)]
        same = [all(torch.equal(form[name], seeded[name]) for name in form) for form in forms]
        stored = forms[same.index(True) if any(same) else 0]
        got, want = (
            training_for(POLICIES["fp32"], CONFIG, device.torch, weights)
            .gradients([batch.to(device.torch) for batch in step.micro_batches])
            .gradients
            for weights in (seeded, stored)
        )
        for name in want:
            check.exact(got[name].cpu(), want[name].cpu(), name=name)

    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_ranks_share_parameters_and_not_dropout(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, world_size: int
    ) -> None:
        step = StepTruth.load(truth)
        found = ranks(on_rank, world_size, {n: v.shape for n, v in step.parameters.items()})
        for rank, (parameters, _) in enumerate(found[1:], 1):
            same = {n for n, value in parameters.items() if torch.equal(value, found[0][0][n])}
            check.exact(sorted(same), sorted(parameters), name=f"parameters-rank{rank}")
        masks = torch.stack([mask for _, mask in found])
        check.exact(len(masks.unique(dim=0)), world_size, name="masks")
