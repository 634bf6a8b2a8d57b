"""A flipped bit on a GPU: what of D's log, counters and tokens makes it a bit that was caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LAYER = "model.layers.2.mixer"
SAID = (
    f"checksum_mismatch (rank 0 after 0.0 s, region 3 ({LAYER}), block 17, section conv q units "
    "0-1: expected 00000000000000aa, got 00000000000000ab; 1 sums of rank 0 differ)"
)


@pytest.fixture(scope="module")
def flips(gpu_programs: Path) -> Any:
    import flipped_bits

    return flipped_bits


def row(flips: Any, **changed: Any) -> dict[str, Any]:
    good = {
        "layer": LAYER, "counted": {"different": 1}, "failures": 1, "recomputed": 1,
        "tokens_right": True, "said": SAID, "place": flips.place_in(SAID),
    }  # fmt: skip
    return {**good, **changed}


def test_the_place_is_read_from_the_log(flips: Any) -> None:
    assert flips.place_in(SAID) == {
        "region": "3", "layer": LAYER, "block": "17", "section": "conv q",
    }  # fmt: skip
    tokens = SAID.replace("units 0-1:", "units 0-0 tokens 128-143:")
    assert flips.place_in(tokens)["section"] == "conv q"
    assert flips.place_in("") == {}


def test_the_words_are_those_of_the_connector(flips: Any) -> None:
    """What `place_in` reads is what the verifier writes."""
    source = (
        Path(__file__).resolve().parents[2] / "connector/hybridpd_connector/verifier.py"
    ).read_text()
    assert 'f"region {region} ({place.layer}), block {block}, {where}: "' in source
    assert 'where = ids[-1], f"section {place.section} units"' in source
    assert f'"{flips.REASON}"' in source


def test_a_bit_that_was_caught(flips: Any) -> None:
    assert flips.judged(row(flips))["ok"]


@pytest.mark.parametrize(
    "changed",
    [
        {"counted": {"ok": 1}},
        {"counted": {"different": 1, "ok": 1}},
        {"failures": 0},
        {"recomputed": 0},
        {"tokens_right": False},
        {"said": "", "place": {}},
        {"place": {"layer": "model.layers.0.mixer"}},
    ],
)
def test_a_bit_that_was_not(flips: Any, changed: dict[str, Any]) -> None:
    assert not flips.judged(row(flips, **changed))["ok"]


def test_the_pair_of_a_flip(flips: Any, tmp_path: Path) -> None:
    """P knows its tensors, D computes again what it refuses, a plain engine stays as it is."""
    from hybridpd_testkit.engines import PROBE, SHIPPED, EngineSpec

    roles = (None, "kv_producer", "kv_consumer")
    specs = [EngineSpec(f"e{at}", Path("m"), role=role) for at, role in enumerate(roles)]
    plain, prefill, decode = flips.with_probe(specs, tmp_path)
    assert plain == specs[0]
    assert (prefill.connector, prefill.failure_policy) == (PROBE, "fail")
    assert Path(*prefill.environment.values()).is_dir()
    assert (decode.connector, decode.failure_policy) == (SHIPPED, "recompute")
