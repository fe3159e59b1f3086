"""The HLO parser against lines that torch-xla 2.9 printed for a world of four, tp 2 and dp 2."""

from __future__ import annotations

import pytest

from nxtrain.tools.trace.hlo import Collective, parse

HEAD = "HloModule IrToHlo.3200, entry_computation_layout={(f32[], bf16[64]{0})->(f32[])}\n"
ADD = """
%AddComputation.1115 (x.1116: bf16[], y.1117: bf16[]) -> bf16[] {
  %x.1116 = bf16[] parameter(0)
  %y.1117 = bf16[] parameter(1)
  ROOT %add.1118 = bf16[] add(bf16[] %x.1116, bf16[] %y.1117)
}
"""
BUCKET = """
  %all-reduce.1129 = (bf16[128,64]{1,0}, bf16[64]{0}, bf16[64,64]{0,1}, bf16[96,64]{1,0}, bf16[64]{0}, /*index=5*/bf16[]) all-reduce(bf16[128,64]{1,0} %get-tuple-element.1119, bf16[64]{0} %get-tuple-element.1120, bf16[64,64]{0,1} %get-tuple-element.1121, bf16[96,64]{1,0} %get-tuple-element.1122, bf16[64]{0} %get-tuple-element.1123, /*index=5*/bf16[] %get-tuple-element.1124), replica_groups={{0,2},{1,3}}, to_apply=%AddComputation.1115
  %get-tuple-element.1162 = bf16[64]{0} get-tuple-element((bf16[128,64]{1,0}, bf16[64]{0}, bf16[64,64]{0,1}, bf16[96,64]{1,0}, bf16[64]{0}, /*index=5*/bf16[]) %all-reduce.1129), index=1
  %constant.1163 = bf16[] constant(0.001953)
  %broadcast.1164 = bf16[64]{0} broadcast(bf16[] %constant.1163), dimensions={}
  %multiply.1165 = bf16[64]{0} multiply(bf16[64]{0} %get-tuple-element.1162, bf16[64]{0} %broadcast.1164)
"""  # noqa: E501
ACTIVATIONS = """
  %reduce-scatter.98 = bf16[32,1,64]{2,1,0} reduce-scatter(bf16[64,1,64]{2,1,0} %add.93), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%AddComputation.94
  %gather.101 = bf16[] gather(bf16[32,1,64]{2,1,0} %reduce-scatter.98, s32[3]{0} %broadcast.100), offset_dims={}, collapsed_slice_dims={0,1,2}, start_index_map={0,1,2}, index_vector_dim=0, slice_sizes={1,1,1}
  %all-gather.142 = bf16[64,1,64]{2,1,0} all-gather(bf16[32,1,64]{2,1,0} %add.141), replica_groups={{0,1},{2,3}}, dimensions={0}
  %constant.107 = f32[] constant(1)
  %multiply.130 = f32[] multiply(f32[] %p0.3, f32[] %constant.107)
"""  # noqa: E501
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
ACTIVATION_BYTES = 64 * 64 * 2


def test_collectives_come_with_their_groups_and_the_larger_of_their_two_sides() -> None:
    assert parse(HEAD + ADD + ACTIVATIONS).collectives == (
        Collective("reduce-scatter", TP, ACTIVATION_BYTES, frozenset()),
        Collective("all-gather", TP, ACTIVATION_BYTES, frozenset()),
    )


def test_a_bucket_is_one_collective_whose_factor_is_the_number_that_its_digits_stand_for() -> None:
    num_bytes = 2 * (128 * 64 + 64 + 64 * 64 + 96 * 64 + 64 + 1)  # torch-xla adds one number that chains collectives
    (result,) = parse(HEAD + ADD + BUCKET).collectives
    assert result == Collective("all-reduce", DP, num_bytes, frozenset({1 / 512}))


def test_a_factor_of_float32_keeps_its_digits() -> None:
    text = BUCKET.replace("bf16", "f32").replace("0.001953)", "0.333333343)")
    (result,) = parse(HEAD + text).collectives
    (factor,) = result.scales
    assert factor == pytest.approx(1 / 3, rel=1e-7)


def test_a_scattered_sum_and_a_lone_number_have_factors_too() -> None:
    text = """
  %reduce-scatter.7 = f32[8]{0} reduce-scatter(f32[16]{0} %p.1), replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%Add.2
  %constant.8 = f32[] constant(0.5)
  %broadcast.9 = f32[8]{0} broadcast(f32[] %constant.8), dimensions={}
  ROOT %multiply.10 = f32[8]{0} multiply(f32[8]{0} %reduce-scatter.7, f32[8]{0} %broadcast.9)
  %all-reduce.11 = f32[] all-reduce(f32[] %p.1), replica_groups={{0,2},{1,3}}, to_apply=%Add.2
  %multiply.12 = f32[] multiply(f32[] %constant.8, f32[] %all-reduce.11)
"""  # noqa: E501
    assert [result.scales for result in parse(text).collectives] == [{0.5}, {0.5}]


def test_a_product_with_one_or_with_a_computed_number_is_no_factor() -> None:
    text = """
  %all-reduce.11 = f32[] all-reduce(f32[] %p.1), replica_groups={{0,1},{2,3}}, to_apply=%Add.2
  %constant.8 = f32[] constant(1)
  %multiply.12 = f32[] multiply(f32[] %constant.8, f32[] %all-reduce.11)
  %multiply.13 = f32[] multiply(f32[] %p.1, f32[] %all-reduce.11)
"""
    assert [result.scales for result in parse(text).collectives] == [frozenset()]


def test_no_groups_and_pairs_of_ranks_are_read() -> None:
    text = """
  %all-reduce.3 = pred[5]{0} all-reduce(pred[5]{0} %p.1), replica_groups={}, to_apply=%Or.2
  %collective-permute.4 = s64[2,3]{1,0} collective-permute(s64[2,3]{1,0} %p.1), source_target_pairs={{0,1},{1,2},{2,3}}
"""
    assert parse(text).collectives == (
        Collective("all-reduce", (), 5, frozenset()),
        Collective("collective-permute", ((0, 1), (1, 2), (2, 3)), 48, frozenset()),
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  %convert.4142 = f64[32,64]{1,0} convert(f32[32,64]{1,0} %abs.4141)", True),
        ("  %compare.41 = pred[] compare(f64[] %p.1, f64[] %p.2), direction=LE", True),
        ("  %convert.4142 = f32[32,64]{1,0} convert(s64[32,64]{1,0} %abs.4141)", False),
    ],
)
def test_double_precision_is_seen(line: str, expected: bool) -> None:
    assert parse(HEAD + line).has_f64 is expected
