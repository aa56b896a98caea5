"""Parts that ranks hold are put together rightly, and what is missing or changed shows."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fixtures.distributed.pool import RankPool
from fixtures.distributed.ranks import Rank
from fixtures.distributed.wrapping import Place, Wrapping, copies_of, joined, plain_name, wrap
from fixtures.numerics.formats import BF16, FP32, Format
from fixtures.training.wrapped_checks import changed, reduction_format
from fixtures.training.wrapped_step import Moment

VECTOR, MATRIX = torch.Size([3]), torch.Size([2, 2])
LAYOUT = {"a": [("a", VECTOR)], "flat": [("b", MATRIX), ("c", VECTOR)]}
WHOLE = {"a": torch.arange(3.0), "b": torch.arange(4.0).reshape(2, 2), "c": torch.arange(3.0) + 9}


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestJoined:
    def test_parts_follow_each_other_and_padding_is_cut(self) -> None:
        held = [
            {"a": numbers(0, 1), "flat": numbers(0, 1, 2, 3)},
            {"a": numbers(2), "flat": numbers(9, 10, 11, 777)},
        ]
        got = joined(held, LAYOUT)
        assert got.keys() == WHOLE.keys()
        assert all(torch.equal(got[name], WHOLE[name]) for name in WHOLE)

    def test_what_no_rank_holds_is_nan_and_what_none_has_is_left_out(self) -> None:
        got = joined([{"a": numbers(0)}, {}], LAYOUT)
        assert got.keys() == {"a"}
        assert got["a"].isnan().tolist() == [False, True, True]

    def test_a_counter_comes_from_every_rank(self) -> None:
        got = joined([{"flat": torch.tensor(2.0)}, {"flat": torch.tensor(3.0)}], LAYOUT)
        assert got["b"].tolist() == got["c"].tolist() == [2.0, 3.0]

    def test_copies_are_kept_apart_and_their_ranks_in_order(self) -> None:
        layout = {"a": LAYOUT["a"]}
        places = {
            Place(1, 1): numbers(7),
            Place(1, 0): numbers(5, 6),
            Place(0, 0): numbers(0, 1, 2),
        }
        ranks = [Moment(p, layout, {"parameter": {"a": t}}, {}) for p, t in places.items()]
        got = [copy["parameter"]["a"].tolist() for copy in copies_of(ranks)]
        assert got == [[0, 1, 2], [5, 6, 7]]


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("blocks.0.norm1.weight", "blocks.0.norm1.weight"),
        ("module.blocks.0.norm1.weight", "blocks.0.norm1.weight"),
        ("_fsdp_wrapped_module.tokens.weight", "tokens.weight"),
        ("_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module._flat_param", "blocks.1._flat_param"),
        ("blocks.0._checkpoint_wrapped_module.mlp.up.bias", "blocks.0.mlp.up.bias"),
    ],
)
def test_plain_names(wrapped: str, plain: str) -> None:
    assert plain_name(wrapped) == plain


@pytest.mark.parametrize(
    ("wrapping", "hold_back", "fmt"),
    [
        (Wrapping("ddp", param_dtype=torch.bfloat16), True, FP32),
        (Wrapping("ddp", reduce_dtype=torch.bfloat16), False, BF16),
        (Wrapping("fully_shard", param_dtype=torch.bfloat16), False, BF16),
        (Wrapping("fully_shard", "", 0, False, torch.bfloat16, torch.float32), True, FP32),
        (Wrapping("fsdp1", "FULL_SHARD", 0, False, torch.bfloat16, torch.float32), False, FP32),
        (Wrapping("fsdp1", "FULL_SHARD", 0, False, torch.bfloat16, torch.float32), True, BF16),
    ],
)
def test_format_in_which_gradients_are_added(
    wrapping: Wrapping, hold_back: bool, fmt: Format
) -> None:
    assert reduction_format(wrapping, hold_back=hold_back) == fmt


def test_a_changed_bit_a_lost_state_and_a_counter_show() -> None:
    before = {"parameter": {"a": numbers(1, 2)}, "step": {"a": numbers(2, 2)}}
    same = {"parameter": {"a": numbers(1, 2)}, "step": {"a": numbers(2)}}
    assert changed([before], [same]) == []
    moved = {"parameter": {"a": numbers(1, 2.0000002)}, "step": {"a": numbers(2, 3)}}
    assert changed([before], [moved]) == ["copy 0: parameter of a", "copy 0: step of a"]
    assert changed([{}], [{"exp_avg": {"a": numbers(0, 0)}}]) == []
    assert changed([{}], [{"exp_avg": {"a": numbers(0, 1)}}]) == ["copy 0: exp_avg of a"]


def test_what_a_rank_shows_travels_unchanged() -> None:
    moment = Moment(Place(1, 2), LAYOUT, {"step": {"a": torch.tensor(2.0)}, "parameter": WHOLE}, {})
    got = pickle.loads(pickle.dumps(moment))
    assert (got.place, got.layout) == (moment.place, moment.layout)
    assert got.held["step"]["a"].shape == ()
    assert all(torch.equal(got.held["parameter"][name], WHOLE[name]) for name in WHOLE)


# --- on ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(preload=[__name__]) as pool:
        yield pool


def unscaled(rank: Rank, wrapping: Wrapping) -> float:
    """A gradient of 1, scaled by 8 and unscaled over the ranks."""
    model = nn.Linear(4, 4, bias=False)
    wrapped = wrap(model, [], wrapping, rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=8.0)
    scaler.scale(wrapped(torch.ones(1, 4)).sum()).backward()
    optimizer = torch.optim.SGD(wrapped.parameters())
    scaler.unscale_(optimizer)
    gradient = next(wrapped.parameters()).grad
    return float(gradient.to_local().mean())


def test_a_hybrid_mesh_outlives_the_group_that_it_was_made_in(pool: RankPool) -> None:
    """DTensor keeps what it worked out for a mesh; one of another group equals it."""
    hybrid = Wrapping("fully_shard", replicas=2)
    others = [(4, replace(hybrid, replicas=4)), (4, replace(hybrid, replicas=1))]
    # The third mesh of a group, then the first of another: subgroups are named by a counter.
    for world_size, wrapping in (*others, (4, hybrid), (2, Wrapping("fully_shard")), (4, hybrid)):
        assert pool.run(unscaled, world_size, wrapping) == [1.0] * world_size


def test_what_is_gone_has_changed() -> None:
    """Moments that a checkpoint lost; zeros and nothing are the same."""
    whole = {"exp_avg": {"w": torch.ones(2), "b": torch.zeros(1)}}
    assert changed([whole], [{"exp_avg": {}}]) == ["copy 0: exp_avg of w"]
    assert changed([{"exp_avg": {}}], [whole]) == ["copy 0: exp_avg of w"]
    assert changed([whole], [whole]) == []
