"""The parser of `benchmarks/truth.py` reads each form of HLO, and agrees with the package's; a model goes through."""

import importlib.util
import pathlib

import pytest

import truth
import truth_hlo
import truth_models
from partjit import Mesh
from partjit.inspect.hlo.optimized import read_collectives
from truth_operations import OPERATIONS

TEXT = """HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %state = (s32[], f32[4,2]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %x = f32[4,2]{1,0} get-tuple-element(%state), index=1
  %shifted = f32[4,2]{1,0} collective-permute(%x), channel_id=3, source_target_pairs={{0,2},{2,4},{1,3},{3,5}}
  ROOT %next = (s32[], f32[4,2]{1,0}) tuple(%count, %shifted)
}

%condition (state.1: (s32[], f32[4,2])) -> pred[] {
  %state.1 = (s32[], f32[4,2]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x.1: f32[4,2], y: bf16[8]) -> f32[4,2] {
  %x.1 = f32[4,2]{1,0} parameter(0)
  %y = bf16[8]{0} parameter(1)
  %zero = s32[] constant(0)
  %both = (f32[4,2]{1,0}, /*index=1*/bf16[8]{0}) all-reduce(%x.1, %y), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add
  %first = f32[4,2]{1,0} get-tuple-element(%both), index=0
  %gathered = f32[16,2]{1,0} all-gather(%first), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, \
use_global_device_ids=true
  %scattered = f32[2,2]{1,0} reduce-scatter(%first), channel_id=4, replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
dimensions={0}, use_global_device_ids=true, to_apply=%add
  %all = f32[4,2]{1,0} all-to-all(%first), channel_id=5, replica_groups=mesh['y'=2,'x'=4], \
device_ids=([4,2]T(1,0)) {'x'}, dimensions={0}
  %start = (s32[], f32[4,2]{1,0}) tuple(%zero, %first)
  %loop = (s32[], f32[4,2]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[4,2]{1,0} get-tuple-element(%loop), index=1
}
"""
AXES = {"x": 4, "y": 2}
MOVED = {
    ("all-reduce", ("y",)): truth.Tally(2, 2, 2 * (32 + 16) / 2),
    ("all-gather", ("x",)): truth.Tally(1, 1, 96),
    ("reduce-scatter", ("y",)): truth.Tally(1, 1, 16),
    ("all-to-all", ("x",)): truth.Tally(1, 1, 24),
    ("collective-permute", ("x",)): truth.Tally(1, 5, 5 * 16),
}


def test_each_kind_is_read_with_its_axes_counts_and_bytes(mesh):
    assert truth.of_text(TEXT, AXES) == MOVED
    assert truth_hlo.sent_in_a_step(TEXT, AXES) == sum(tally.nbytes for tally in MOVED.values())
    assert truth.of_report(read_collectives(TEXT, Mesh(mesh.devices, ("x", "y")))) == MOVED


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("@mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6), (5, 4), (3, 2), (1, 0))),
        ("mesh[a=8] {a:(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups_are_read_in_each_form(text, groups):
    assert truth_hlo.groups_of(text, 8) == groups


def test_groups_of_no_whole_axes_are_of_none():
    assert truth_hlo.axes_of([(0, 4), (1, 5), (2, 6), (3, 7)], AXES) == ("?",)
    assert truth_hlo.axes_of([(k,) for k in range(8)], AXES) == ()
    with pytest.raises(ValueError, match="of another form"):
        truth_hlo.groups_of("[8]{x}", 8)


def test_of_branches_the_one_that_sends_most_counts_and_of_unknown_loops_one_iteration():
    branch = "%{} (p: f32[4,2]) -> f32[4,2] {{\n  %p = f32[4,2]{{1,0}} parameter(0)\n{}}}\n"
    moving = "  %q = f32[4,2]{1,0} all-to-all(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}\n"
    text = TEXT.replace(', \\\nbackend_config={"known_trip_count":{"n":"5"}}', "")
    text = TEXT.replace('"n":"5"', "").replace(
        "ENTRY", branch.format("one", moving) + branch.format("two", "") + "ENTRY"
    )
    text = text.replace(
        "  ROOT %out", "  %c = f32[4,2] conditional(%zero, %x.1, %x.1), branch_computations={%one, %two}\n  ROOT %out"
    )
    assert truth.of_text(text, AXES) == MOVED | {
        ("collective-permute", ("x",)): truth.Tally(1, 1, 16),
        ("all-to-all", ("y",)): truth.Tally(1, 1, 16),
    }
    assert [one.is_exact for one in truth_hlo.read_program(text, AXES) if one.kind == "collective-permute"] == [False]
    assert truth_hlo.sent_in_a_step(text, AXES) == sum(tally.nbytes for tally in MOVED.values()) - 4 * 16 + 16


def test_a_model_goes_through_and_one_without_its_library_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setitem(truth_models.MODELS, "absent", "absent:absent")
    names = ["shard_map over one axis", "absent"]
    for _ in range(2):
        tables = truth.tables_of(names, [OPERATIONS[0]], tmp_path)
        (row,) = tables["models"]
        assert (row["library"], row["read"], row["lines"]) == ("plain", "equal", 100)
        assert [row["of"] for row in tables["skipped"]] == ["absent"]
        assert len(tables["bounds"]) == 10
    assert len([*tmp_path.iterdir()]) == 2


def test_a_difference_is_wrong_unless_the_report_says_so():
    assert truth.Tally(2, 4, 100.0).is_near(truth.Tally(2, 4, 104.0))
    assert not truth.Tally(2, 4, 100.0).is_near(truth.Tally(2, 4, 110.0))
    assert not truth.Tally(2, 4, 100.0).is_near(truth.Tally(2, 3, 100.0))


def test_every_model_has_a_file():
    folder = pathlib.Path(importlib.util.find_spec("truth_models").origin).parent
    for entry in truth_models.MODELS.values():
        file, function = entry.split(":")
        assert f"def {function}(" in (folder / f"{file}.py").read_text(), entry
