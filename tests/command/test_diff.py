"""`partjit diff`: what changed between two reports in JSON."""

import copy
import json

import jax
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.command import main
from partjit.inspect import explain


@pytest.fixture(scope="module")
def reports():
    """A layer whose weights are replicated, and sharded with the contraction over `x`."""
    mesh = partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    args = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)

    def report(*specs):
        def layer(a, w):
            return a @ w

        return explain(pjit(layer, in_shardings=specs, out_shardings=P("y")), *args, mesh=mesh)

    return report(P("y"), None), report(P("y", "x"), P("x"))


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Compares files with these contents: the exit code, what is printed, and the complaint."""
    monkeypatch.chdir(tmp_path)

    def run_(before, after, *options):
        for name, content in (("before.json", before), ("after.json", after)):
            if content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        code = main(["diff", "before.json", "after.json", *options])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def test_totals_specs_and_collectives_that_changed_are_listed(run, reports):
    before, after = reports
    code, out, err = run(before.to_json(), after.to_json())
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "layer on x=4, y=2, predicted"
    assert "sent per step 0 B 96 B" in lines
    assert "FLOPs per device 512 flop 128 flop x0.25" in lines
    assert "w float32[16,4] P(None,None) 256 B float32[16,4] P('x',None) 64 B" in lines
    assert "all-reduce x 0 0 B 1 96 B" in lines
    assert not any(line.startswith("result") for line in lines)  # has the same spec


def test_equal_reports_have_no_difference_and_long_tables_are_cut_off(run, reports):
    data = reports[0].as_data()
    assert run(data, data)[1] == "layer on x=4, y=2, predicted\n\nno difference\n"
    longer = copy.deepcopy(data)
    longer["arguments"] += [{**data["arguments"][0], "path": f"p{k}"} for k in range(30)]
    assert "... and 10 more" in run(data, longer)[1]
    out = run(data, longer, "--all")[1]
    assert "more" not in out
    assert "p29" in out


def test_findings_and_unknown_numbers_are_compared(run, reports):
    data = reports[0].as_data()
    other = copy.deepcopy(data)
    other["findings"] = [{"kind": "fight", "text": "two constraints"}]
    other["collectives"]["bytes_per_step"] = None
    other["mesh"] = {"x": 8}
    out = run(data, other)[1]
    assert out.startswith("before: layer on x=4, y=2, predicted\nafter:  layer on x=8, predicted\n")
    assert "+  fight: two constraints" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("sent per step")] == ["unknown"]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (None, "'before.json' cannot be read: No such file"),
        ("no", "'before.json' is no JSON: write it with partjit explain --json"),
        ([], "'before.json' is no report"),
        ({"error": {"message": "no data"}}, "'before.json' has an error in the place of a report: no data"),
        ({"version": 99, "collectives": {}}, "'before.json' has version 99 of the format"),
    ],
)
def test_what_is_no_report_is_a_mistake(run, before, message):
    code, out, err = run(before, "{}")
    assert (code, out) == (1, "")
    assert err.startswith(f"partjit diff: error: {message}")
    assert "\n  BEFORE before.json\n" in err
