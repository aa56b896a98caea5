"""The golden store: every bit comes back, and damage is named before anything is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from fixtures import golden
from fixtures.golden import (
    Golden,
    GoldenError,
    GoldenStore,
    Truth,
    encode_file,
    encode_manifest,
    from_bits,
    source_hash,
    syntax_hash,
    to_bits,
)

FLOATS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
INTEGERS = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]


def small_truth(scale: float) -> Truth:
    x = torch.tensor([[1.0, -0.0], [math.inf, 2.0**-149]])
    finite = torch.isfinite(x)
    inputs = {"x": x.bfloat16(), "empty": torch.zeros(0, 2), "scalar": torch.tensor(7)}
    return Truth(inputs, {"y": x * scale, "n": torch.arange(3)}, {"y": finite})


def case_of(name: str, scale: float = 1.0, **changes: Any) -> Golden:
    case = Golden("gelu", name, small_truth, {"scale": scale}, "float64", "gelu_erf")
    return replace(case, **changes)


def write_store(root: Path, *cases: Golden) -> GoldenStore:
    (root / "truth").mkdir(parents=True)
    data, entry = encode_file((case, case.make()) for case in cases)
    (root / "truth" / "gelu.safetensors").write_bytes(data)
    (root / "truth" / "manifest.json").write_bytes(encode_manifest({"gelu.safetensors": entry}))
    return GoldenStore(root)


def bits_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    array, dtype = to_bits(tensor)
    return dtype, tuple(tensor.shape), array.tobytes()


class TestBits:
    @pytest.mark.parametrize("dtype", FLOATS)
    @given(shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), data=st.data())
    def test_of_floats_come_back_whatever_they_mean(
        self, dtype: str, shape: tuple[int, ...], data: st.DataObject
    ) -> None:
        bits = data.draw(hnp.arrays(f"u{FLOATS[dtype]}", shape))
        again, name = to_bits(from_bits(bits, dtype))
        assert (name, again.dtype, again.shape) == (dtype, bits.dtype, bits.shape)
        assert again.tobytes() == bits.tobytes()

    @pytest.mark.parametrize(
        ("dtype", "pattern"),
        [
            ("bf16", 0x7F81),  # a signalling NaN
            ("fp16", 0xFE55),  # a negative NaN with a payload
            ("fp32", 0x7F800001),
            ("fp64", 0x7FF0_0000_DEAD_BEEF),
            ("fp64", 0x8000_0000_0000_0000),
        ],
    )
    def test_of_nan_payloads_and_signed_zeros_come_back(self, dtype: str, pattern: int) -> None:
        bits = np.array([pattern], f"u{FLOATS[dtype]}")
        assert to_bits(from_bits(bits, dtype))[0] == bits

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    @pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
    def test_of_integers_come_back(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.randint(0, 2, shape).to(dtype)
        array, name = to_bits(tensor)
        assert name == str(dtype).removeprefix("torch.")
        assert torch.equal(from_bits(array, name), tensor)
        assert from_bits(array, name).dtype == dtype

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.t(),
            lambda x: x[::2, 1:],
            lambda x: x[:1, :1].expand(3, 5),
            lambda x: x[0, 0].expand(1),
            lambda x: x.requires_grad_(),
        ],
        ids=["transposed", "strided", "expanded", "stride-0", "requires-grad"],
    )
    def test_are_those_of_the_values_not_of_the_memory(
        self, view: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        tensor = view(torch.arange(12, dtype=torch.float32).reshape(3, 4).bfloat16())
        array, name = to_bits(tensor)
        assert torch.equal(from_bits(array, name), tensor)

    def test_of_another_dtype_are_refused_with_what_is_storable(self) -> None:
        with pytest.raises(TypeError, match=r"cannot store torch\.complex64; storable: bf16, bool"):
            to_bits(torch.zeros(1, dtype=torch.complex64))


class TestStore:
    def test_truth_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        case = case_of("small", 3.0)
        found, made = write_store(tmp_path, case).truth("gelu", "small"), case.make()
        for part in ("inputs", "values", "finite"):
            expected = {name: bits_of(t) for name, t in getattr(made, part).items()}
            assert {name: bits_of(t) for name, t in getattr(found, part).items()} == expected

    def test_the_same_truth_gives_the_same_bytes(self) -> None:
        pairs = [(case, case.make()) for case in (case_of("a"), case_of("b", 2.0))]
        first, again = encode_file(pairs), encode_file(pairs)
        assert first == again
        assert first[1]["sha256"] == hashlib.sha256(first[0]).hexdigest()

    def test_the_digest_is_of_the_case_and_of_no_other(self, tmp_path: Path) -> None:
        alone = write_store(tmp_path / "1", case_of("a")).truth("gelu", "a").digest
        both = write_store(tmp_path / "2", case_of("a"), case_of("b", 2.0))
        assert both.truth("gelu", "a").digest == alone
        assert both.truth("gelu", "b").digest != alone

    def test_a_sound_store_verifies(self, tmp_path: Path) -> None:
        store = write_store(tmp_path, case_of("a"))
        store.verify()
        assert store.source_sha256("gelu", "a") == source_hash(case_of("a"))


def of_file(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: change(root / "truth" / name)


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def in_manifest(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return of_file("manifest.json", change)


def hide_a_tensor(root: Path) -> None:
    """Both file and digest are changed: only the entry of the case tells."""
    path = root / "truth" / "gelu.safetensors"
    path.write_bytes(save({k: v for k, v in load(path.read_bytes()).items() if k != "a/value/y"}))
    entry = json.loads((root / "truth" / "manifest.json").read_text())["files"]["gelu.safetensors"]
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    in_manifest(files={"gelu.safetensors": entry})(root)


class TestDamage:
    """Each is a GoldenError that names the file and the remedy."""

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (of_file("gelu.safetensors", Path.unlink), "gelu.safetensors is missing .*from git"),
            (of_file("gelu.safetensors", truncate), "gelu.safetensors is not what .*restore it fr"),
            (of_file("gelu.safetensors", flip_last_bit), "gelu.safetensors is not what .*restore"),
            (of_file("x.safetensors", Path.touch), "x.safetensors is orphaned: .*; remove it, or"),
            (of_file("manifest.json", Path.unlink), "manifest.json is missing; restore it from g"),
            (of_file("manifest.json", truncate), "manifest.json cannot be read .*restore it from"),
            (in_manifest(schema=9), "manifest.json has golden schema 9, this suite reads 1; check"),
            (in_manifest(files=None), "manifest.json cannot be read .*restore it from git"),
            (in_manifest(files={}), "gelu.safetensors is orphaned"),
            (in_manifest(files={"gelu.safetensors": {}}), "manifest.json .*restore it from git"),
            (in_manifest(files={"gelu.safetensors": 7}), "manifest.json .*restore it from git"),
            (hide_a_tensor, "gelu.safetensors lacks a/value/y.*restore both from git"),
        ],
    )
    def test_is_named(self, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
        write_store(tmp_path, case_of("a"))
        damage(tmp_path)
        with pytest.raises(GoldenError, match=message):
            use(tmp_path)

    def test_a_case_it_lacks_is_named_with_those_it_has(self, tmp_path: Path) -> None:
        store = write_store(tmp_path, case_of("a"), case_of("b"))
        with pytest.raises(GoldenError, match=r"no case gelu/c \(it has: a, b\); run --golden=pro"):
            store.truth("gelu", "c")
        with pytest.raises(GoldenError, match=r"no case dropout/a \(it has: none\)"):
            store.truth("dropout", "a")


def use(root: Path) -> None:
    store = GoldenStore(root)
    store.verify()
    store.truth("gelu", "a")
    store.source_sha256("gelu", "a")


class TestMaking:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_truth_needs_a_mask_that_says_so(self, value: float) -> None:
        def broken(**_: Any) -> Truth:
            return Truth({}, {"y": torch.tensor([[1.0, value], [value, 0.0]])})

        with pytest.raises(GoldenError, match=r"truth gelu/a: y\[0, 1\] is .*\(2 such values\)"):
            case_of("a", generate=broken).make()

    def test_a_mask_must_not_say_more_than_is_so(self) -> None:
        def hidden(**_: Any) -> Truth:
            return Truth({}, {"y": torch.ones(2)}, {"y": torch.tensor([True, False])})

        with pytest.raises(GoldenError, match=r"y\[1\] is 1\.0, which its finite mask does not"):
            case_of("a", generate=hidden).make()


def module_of(source: str, folder: Path) -> ModuleType:
    """A module whose source can be looked up."""
    path = folder / f"m{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    path.write_text(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


class TestSourceHash:
    PLAIN = "def make(x):\n    return x + 1\n"

    @pytest.mark.parametrize(
        ("source", "same"),
        [
            (
                '"""Of the module."""\n# And why.\ndef make(x):\n    """What."""\n    return x+1',
                True,
            ),
            ("def make(x):\n\n    return (x + 1)  # one\n", True),
            ("def make(x):\n    return x + 2\n", False),
            ("def make(y):\n    return y + 1\n", False),
            ("def make(x):\n    'what'\n    assert x\n    return x + 1\n", False),
        ],
    )
    def test_sees_code_not_docstrings_and_comments(
        self, tmp_path: Path, source: str, same: bool
    ) -> None:
        plain, other = module_of(self.PLAIN, tmp_path), module_of(source, tmp_path)
        assert (syntax_hash(other) == syntax_hash(plain)) is same
        assert (syntax_hash(other.make) == syntax_hash(plain.make)) is same

    def test_sees_arguments_and_what_the_generator_uses(self) -> None:
        changed = (case_of("a", 2.0), case_of("a", uses=(golden,)), case_of("a", uses=(bits_of,)))
        assert len({source_hash(case) for case in (case_of("a"), *changed)}) == 4

    def test_does_not_see_the_name_and_the_words(self) -> None:
        renamed = case_of("b", precision="mpmath", bound="other", last_bit=True)
        assert source_hash(renamed) == source_hash(case_of("a"))
