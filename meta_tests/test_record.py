"""Records: what is written is what is read, damage is named, and a failed write leaves nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fixtures import record
from fixtures.files import new_folder, to_json, write_whole
from fixtures.numerics.errors import ulp_distance
from fixtures.numerics.formats import from_bits
from fixtures.record import Case, Observed, Record, RecordError, max_ulps, observe, sample_positions

CASE = Case(
    node="gelu",
    promise="op",
    name="forward-erf",
    device="cpu",
    dtype="bf16",
    implementation="eager",
    test="precision_tests/test_gelu.py::TestOp::test_forward[cpu]",
    outcome="outside",
    reason="two lines\nof reason, with µ",
    margin=math.inf,
    bound="one rounding to bf16",
    inputs="0123",
    marks=("cpu", "gelu"),
    figures={"errors": {"weight": math.nan}, "max_abs": math.inf, "worst_index": [0, 3]},
    observed={
        "value": observe(np.array([[1, 2, 0xFFFF]], np.uint16), "bf16"),
        "empty": observe(np.zeros((0, 3), np.uint32), "fp32"),
        "scalar": observe(np.array(2**63, np.uint64), "fp64"),
        "large": observe(np.arange(9999, dtype=np.uint32), "fp32"),
        "text": record.observe_text("naïve"),
    },
)
OTHER = Case("all_reduce", "flow", "norm", "cpu")


def a_record(*cases: Case) -> Record:
    return Record(
        environment={"cpu": {"torch": "2.13.0", "threads": 1}},
        cases={case.id: case for case in cases or (CASE, OTHER)},
        run={"host": "here", "seconds": 1.5},
        verdict={"exit_code": 1},
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def comparable(case: Case) -> Any:
    """Dataclass equality fails on arrays and on NaN: compare their text and bytes."""
    tensors = {
        n: (t.dtype, t.shape, t.sha256, t.bits.dtype, t.bits.tobytes())
        for n, t in case.observed.items()
    }
    return repr(replace(case, observed={})), tensors


@pytest.fixture
def written(tmp_path: Path) -> Path:
    record.write(a_record(), tmp_path / "run")
    return tmp_path / "run"


class TestRoundTrip:
    def test_what_is_written_is_read(self, written: Path) -> None:
        found, wanted = record.read(written), a_record()
        assert replace(found, cases={}) == replace(wanted, cases={})
        assert list(found.cases) == sorted(wanted.cases)
        for case_id, case in wanted.cases.items():
            assert comparable(found.cases[case_id]) == comparable(case)

    @pytest.mark.parametrize("case", [CASE, OTHER], ids=lambda case: case.node)
    def test_what_is_packed_is_unpacked(self, case: Case) -> None:
        travelled = json.loads(json.dumps(record.pack(case)))
        assert comparable(record.unpack(travelled)) == comparable(case)

    def test_the_same_content_gives_the_same_bytes(self, written: Path) -> None:
        again = written.with_name("again")
        reordered = a_record()
        reordered = replace(reordered, cases=dict(reversed(reordered.cases.items())))
        record.write(reordered, again)
        assert contents(again) == contents(written)

    def test_a_folder_that_exists_is_refused_and_kept(self, written: Path) -> None:
        before = contents(written)
        with pytest.raises(FileExistsError, match=r"run exists; name another folder, or remove it"):
            record.write(a_record(OTHER), written)
        assert contents(written) == before


class TestWhatIsKept:
    @pytest.mark.parametrize(("size", "whole"), [(0, True), (4096, True), (4097, False)])
    def test_tensors_of_up_to_4096_elements_are_whole(self, size: int, whole: bool) -> None:
        assert observe(np.zeros(size, np.uint16), "bf16").is_whole is whole

    @pytest.mark.parametrize("size", [4097, 65_536, 10**6 + 1, 2**40])
    def test_256_positions_of_a_larger_one_are_fixed_and_hold_its_ends(self, size: int) -> None:
        positions = sample_positions(size)
        assert (len(positions), positions[0], positions[-1]) == (256, 0, size - 1)
        assert (np.diff(positions) >= 0).all()
        assert np.array_equal(positions, sample_positions(size))

    def test_positions_are_those_of_every_earlier_record(self) -> None:
        assert sample_positions(65_536)[:6].tolist() == [0, 516, 1013, 1032, 1344, 1548]

    def test_an_element_outside_the_sample_changes_the_digest(self) -> None:
        bits = np.zeros(10_000, np.uint32)
        moved = bits.copy()
        moved[(set(range(10_000)) - set(sample_positions(10_000).tolist())).pop()] = 1
        old, new = observe(bits, "fp32"), observe(moved, "fp32")
        assert np.array_equal(old.bits, new.bits)
        assert old.sha256 != new.sha256


finite_bf16 = st.integers(0, 2**16 - 1).filter(lambda bits: bits & 0x7F80 != 0x7F80)


def observed_fp64(*values: float) -> Observed:
    return observe(np.array(values).view(np.uint64), "fp64")


class TestUlps:
    @pytest.mark.parametrize(
        ("old", "new", "ulps"),
        [
            (1.0, math.nextafter(1.0, 2.0), 1.0),
            (1.0, math.nextafter(1.0, 0.0), 1.0),
            (-1.0, math.nextafter(-1.0, 0.0), 1.0),
            (1.0, 2.0, 2.0**52),
            (0.0, -0.0, 0.0),
            (5e-324, -5e-324, 2.0),
            (0.0, -5e-324, 1.0),
            (1.7976931348623157e308, math.inf, 1.0),
        ],
    )
    def test_fp64(self, old: float, new: float, ulps: float) -> None:
        assert max_ulps(observed_fp64(3.0, old), observed_fp64(3.0, new)) == ulps
        assert max_ulps(observed_fp64(3.0, new), observed_fp64(3.0, old)) == ulps

    @given(st.lists(st.tuples(finite_bf16, finite_bf16), min_size=1, max_size=20))
    def test_agree_with_the_numerics_in_bf16(self, pairs: list[tuple[int, int]]) -> None:
        old, new = (np.array(patterns, np.uint16) for patterns in zip(*pairs, strict=True))
        as_tensors = (
            from_bits(torch.from_numpy(b.view(np.int16)), torch.bfloat16) for b in (old, new)
        )
        expected = ulp_distance(*as_tensors).max_ulp
        assert max_ulps(observe(old, "bf16"), observe(new, "bf16")) == expected

    def test_have_no_meaning_across_types_and_shapes_nor_for_integers_and_text(self) -> None:
        pair = observe(np.zeros(2, np.uint32), "fp32")
        for other in (replace(pair, dtype="int32"), replace(pair, shape=(2, 1))):
            assert max_ulps(pair, other) is None
        assert max_ulps(record.observe_text("a"), record.observe_text("b")) is None
        assert max_ulps(CASE.observed["empty"], CASE.observed["empty"]) == 0.0


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def without_a_tensor(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    tensors = load_file(path)
    del tensors["gelu/op/forward-erf/cpu/bf16/eager#value"]
    save_file(tensors, path)


class TestDamage:
    """Each is a RecordError that names the file and the remedy."""

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (shutil.rmtree, r"run/cases\.json is missing: .*run is not a record; .*--record DIR"),
            (removed("run.json"), r"run/run\.json is missing"),
            (removed("tensors.safetensors"), r"run/tensors\.safetensors cannot be read .*again"),
            (truncated("cases.json"), r"run/cases\.json cannot be read .*record it again"),
            (truncated("verdict.json"), r"run/verdict\.json cannot be read .*record it again"),
            (truncated("tensors.safetensors"), r"run/tensors\.safetensors cannot .*again"),
            (without_a_tensor, r"run/tensors\.safetensors lacks .*eager#value.*record it again"),
            (replaced("cases.json", b"[]"), r"run/cases\.json is damaged .*record it again"),
            (replaced("cases.json", b'{"schema": 9}'), r"schema 9, this suite reads 1; record it"),
            (replaced("cases.json", b'{"schema": 1}'), r"run/cases\.json is damaged .*again"),
            (replaced("cases.json", b"\xff"), r"run/cases\.json cannot be read .*record it again"),
        ],
    )
    def test_is_named(self, written: Path, damage: Callable[[Path], None], message: str) -> None:
        damage(written)
        with pytest.raises(RecordError, match=message):
            record.read(written)

    @pytest.mark.parametrize("junk", [None, 7, "x", [1], {"x": 1}], ids=repr)
    def test_wherever_it_is_nothing_but_a_record_error_comes_out(
        self, tmp_path: Path, junk: Any
    ) -> None:
        small = replace(CASE, observed={"value": CASE.observed["value"]})
        record.write(a_record(small), tmp_path / "run")
        path = tmp_path / "run" / "cases.json"
        whole = path.read_text()
        for place in places(json.loads(whole)):
            tree = json.loads(whole)
            reduce(getitem, place[:-1], tree)[place[-1]] = junk
            path.write_text(json.dumps(tree))
            # Free text may hold junk; anything else than this error fails the test.
            with suppress(RecordError):
                record.read(tmp_path / "run")


def places(tree: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every node of a JSON tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, below in pairs:
        yield (*above, key)
        if isinstance(below, (dict, list)):
            yield from places(below, *above, key)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["disk-full", "ctrl-c"])
class TestInterruptedWrites:
    @pytest.mark.parametrize(
        "place", ["pathlib.Path.write_bytes", "pathlib.Path.write_text", "os.fsync"]
    )
    def test_leave_neither_a_record_nor_a_temporary_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
    ) -> None:
        monkeypatch.setattr(place, raising(error))
        with pytest.raises(type(error)):
            record.write(a_record(), tmp_path / "run")
        assert list(tmp_path.iterdir()) == []

    def test_of_a_folder_remove_what_was_in_it(self, tmp_path: Path, error: BaseException) -> None:
        def half_way() -> None:
            with new_folder(tmp_path / "new") as folder:
                (folder / "sub").mkdir()
                (folder / "sub" / "file").write_text("half")
                raise error

        with pytest.raises(type(error)):
            half_way()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("place", ["os.fsync", "os.replace"])
    def test_of_a_file_keep_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
    ) -> None:
        target = tmp_path / "log"
        write_whole(target, b"old")
        monkeypatch.setattr(place, raising(error))
        with pytest.raises(type(error)):
            write_whole(target, b"new")
        assert contents(tmp_path) == {"log": b"old"}


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_json_has_sorted_keys_and_no_bare_nan() -> None:
    portable = {"a": ["nan"], "b": ["inf", "-inf"]}
    assert json.loads(to_json({"b": [math.inf, -math.inf], "a": (math.nan,)})) == portable
    assert to_json({"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}\n'
