"""Files of recorded results, and runs that hold the models to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.hardware_models.recorded import RecordedError, by_hand, read
from meta_tests.running import Repository, copy_repository

MODULE = "precision_tests/test_hardware_models_matrix_units.py"


def words(*values: float) -> Any:
    return np.array(values, dtype=np.float32).view(np.uint32)


def arrays(**changes: Any) -> dict[str, Any]:
    """One row of an H100's bf16 unit, 1 + 2 x 3 = 7; ``changes`` replace or, as None, remove."""
    plain = {"a": words(2.0)[None], "b": words(3.0)[None], "c": words(1.0), "d_fp32": words(7.0)}
    named = {f"H100/bf16/{name}": array for name, array in plain.items()}
    named |= {f"H100/bf16/{name}": array for name, array in changes.items()}
    return {name: array for name, array in named.items() if array is not None}


def save(folder: Path, named: dict[str, Any]) -> Path:
    path = folder / "vectors.npz"
    np.savez_compressed(path, **named)
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (found,) = read(save(tmp_path, arrays()))
    assert (found.gpu, found.fmt, found.name) == ("H100", "bf16", "file-H100-bf16")
    assert (found.a.dtype, found.a.tolist(), found.c.tolist()) == (torch.bfloat16, [[2.0]], [1.0])
    assert found.predicted(torch.float32).tolist() == [7.0]


def test_results_of_fp16_accumulators_take_the_addend_rounded(tmp_path: Path) -> None:
    named = {
        "A100/fp16/a": words(0.0)[None],
        "A100/fp16/b": words(0.0)[None],
        "A100/fp16/c": words(1.0 + 2.0**-12),
        "A100/fp16/d_fp16": words(1.0),
    }
    (found,) = read(save(tmp_path, named))
    assert torch.equal(found.predicted(torch.float16), found.results[torch.float16])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "holds no arrays"),
        ({"a": words(1.0)}, "'a' is not GPU/format/name with a name of a, b, c, d_fp32, d_fp16"),
        ({"H100/bf16/e": words(1.0)}, "'H100/bf16/e' is not GPU/format/name"),
        ({"K80/bf16/a": words(1.0)}, "no model of a GPU 'K80'; known are: V100"),
        ({"V100/bf16/a": words(1.0)}, "the model of V100 has no unit for 'bf16'; it has: fp16"),
        (arrays(b=None), "H100/bf16 lacks b"),
        (arrays(d_fp32=None), "H100/bf16 lacks a result: d_fp32 or d_fp16"),
        (arrays(d_fp16=words(7.0)), "H100/bf16/d_fp16 is not modelled"),
        (arrays(c=np.ones(1)), "H100/bf16/c holds float64; it holds the bits of fp32 numbers"),
        (arrays(a=words(2.0)), r"H100/bf16/a has shape \(1,\); it is \(rows, K\)"),
        (arrays(b=words(2.0, 3.0)[None]), r"H100/bf16/b has shape \(1, 2\), not \(1, 1\)"),
        (arrays(c=words(1.0, 1.0)), r"H100/bf16/c has shape \(2,\), not \(1,\)"),
        (arrays(a=words(1.001)[None]), r"H100/bf16/a\[0, 0\] is 0x1.*: no number of a's format"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, named: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordedError, match=message):
        read(save(tmp_path, named))


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "vectors.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordedError, match=r"vectors.npz cannot be read as an npz archive"):
        read(path)


def test_results_by_hand_cover_three_generations() -> None:
    assert {(r.gpu, r.fmt) for r in by_hand()} == {
        ("V100", "fp16"),
        *((gpu, fmt) for gpu in ("A100", "H100") for fmt in ("fp16", "bf16", "tf32")),
    }


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return copy_repository(tmp_path_factory.mktemp("models"), "hardware_models_matrix_units")


def test_a_run_without_a_file_holds_the_models_to_what_is_known(repository: Repository) -> None:
    ended = repository.run("-m", "models", "--record=plain")
    assert ended.code == 0, ended.text
    assert "hardware_models   matrix_units  PASS 0." in ended.text
    listed = repository.run("--collect-only", "-q", MODULE).text
    assert "test_results_are_those_known[hand-A100-bf16]" in listed
    assert "file-" not in listed
    assert "OfDevice" not in listed


def test_a_run_with_a_file_passes_or_names_the_result(repository: Repository) -> None:
    good = save(repository.root, arrays())
    ended = repository.run("-k", "known", f"--hardware-vectors={good}", "--record=good")
    assert ended.code == 0, ended.text
    bad = save(repository.root, arrays(d_fp32=words(8.0)))
    ended = repository.run("-k", "known", f"--hardware-vectors={bad}", "--record=bad")
    assert ended.code == 1
    assert (
        "hardware_models matrix_units results-are-those-known-file-H100-bf16-float32 [cpu]"
        in ended.text
    )
    assert "got 7 (0x1.c000000000000p+2, bits 0x40e00000), wanted 8" in ended.text
    assert f"--hardware-vectors={bad.resolve()}" in ended.text


def test_a_run_with_a_bad_file_ends_before_it_starts(repository: Repository) -> None:
    ended = repository.run("--hardware-vectors=nowhere.npz")
    assert ended.code == 4
    assert "--hardware-vectors: nowhere.npz cannot be read as an npz archive" in ended.text


def test_a_gpu_that_is_not_there_is_unverified(repository: Repository) -> None:
    ended = repository.run("-m", "h100", MODULE, "--record=h100")
    assert ended.code == 22
    assert "no h100 device is visible (visible: cpu): hardware_models matrix_units (" in ended.text
