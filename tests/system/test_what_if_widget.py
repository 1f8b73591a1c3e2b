"""The what-if widget: its state as a notebook sends and gets it, and what a reader does with it in a real browser."""

import json
import warnings

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from partjit import pjit
from partjit.inspect.live.widget import what_if_widget
from partjit.inspect.what_if import Question, WhatIf
from tests.inspect.browser import NAMES, find_browser, start_browser
from tests.inspect.inspected import f32, mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the packages of Jupyter say about each other
    pytest.importorskip("anywidget")


def forward(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["in"]) @ layer["out"]
    return x


IN = "params['layers'][0]['in']"


@pytest.fixture(scope="module")
def engine():
    layer = {"in": f32(16, 32), "out": f32(32, 16)}
    return WhatIf(pjit(forward), {"layers": [layer] * 3}, f32(8, 16), mesh=mesh(), isolated=False)


@pytest.fixture
def widget(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.widget()


def test_a_message_of_the_page_is_answered(widget, engine):
    widget.set_state({"specs": {IN: "P(None, 'model')"}})  # what ipywidgets does with a message
    state = widget.get_state(["answer", "specs", "follow"])
    then = engine.ask(Question({IN: P(None, "model")}))
    assert json.loads(json.dumps(state)) == state
    assert state["answer"]["of"] == state["specs"] == {IN: "P(None, 'model')"}
    assert state["answer"]["axes"][IN] == [[], ["model"]]
    assert widget.question == Question({IN: P(None, "model")})
    assert [*then.bytes_by_axes] == [tuple(row[0].split(", ")) for row in state["answer"]["by_axes"]]


def test_changes_that_come_together_are_one_question(widget):
    before = widget.answer["number"]
    widget.set_state({"specs": {IN: "P('model')"}, "follow": False})
    assert widget.answer["number"] == before + 1
    assert widget.answer["error"] == ""


def test_an_error_is_an_answer_and_the_next_one_is_none(widget):
    widget.set_state({"specs": {IN: "P('modle')"}})
    assert "did you mean 'model'?" in widget.answer["error"]
    assert widget.answer["wrong"] == [IN]
    widget.set_state({"specs": {}})
    assert widget.answer["error"] == ""
    assert widget.answer["specs"] == []


def test_python_may_name_all_layers_at_once(widget):
    widget.specs = {"params['layers'][*]['out']": "P('model')"}
    assert [*widget.specs] == [f"params['layers'][{k}]['out']" for k in range(3)]
    with pytest.raises(TypeError, match=r"specs\['x'\]"):
        widget.specs = {"x": 3}


def test_without_anywidget_the_error_says_what_to_install(engine, monkeypatch):
    monkeypatch.setattr("partjit.inspect.live.widget._widget_class", lambda: __import__("no_such_package"))
    with pytest.raises(ImportError, match=r'pip install "partjit\[notebooks\]"'):
        what_if_widget(engine)


PAGE = """<!doctype html><html data-theme="THEME"><meta charset="utf-8"><style>CSS</style><body><div id="el"></div>
<script type="module">
SCRIPT
const state = STATE, listeners = {};
window.sent = [];
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; },
  save_changes: () => window.sent.push(JSON.parse(JSON.stringify({ specs: state.specs, follow: state.follow }))),
  on: (name, call) => { listeners[name] = call; },
  off: () => {},
};
window.answer = (answer) => { state.answer = answer; listeners["change:answer"](); };
widget.render({ model, el: document.getElementById("el") });
</script></body></html>"""


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
    with start_browser(path) as started:
        yield started


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_reader_changes_specs_with_the_keyboard(browser, widget, tmp_path, theme):
    script = widget._esm.replace("export default { render };", "const widget = { render };")
    state = json.dumps(widget.get_state(["program", "specs", "follow", "answer"]))
    parts = {"THEME": theme, "CSS": widget._css, "SCRIPT": script, "STATE": state}
    text = PAGE
    for name, part in parts.items():
        text = text.replace(name, part.replace("</", "<\\/") if name == "STATE" else part)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    page = browser.open((tmp_path / "page.html").as_uri(), scheme=theme)

    def answered():
        """Answers as the kernel does."""
        while sent := page.evaluate("window.sent.shift() ?? null"):
            widget.set_state(sent)
            page.evaluate(f"window.answer({json.dumps(widget.get_state(['answer'])['answer'])})")

    assert page.evaluate("document.querySelectorAll('.pj-row').length") == 4  # layers are one row; x and the result
    assert page.evaluate("document.querySelector('.pj-name').textContent") == "params['layers'][*]['in'] x 3"
    page.evaluate("document.querySelector('.pj-row input').focus()")
    page.type("P(None, 'modle')")
    page.press("Enter")
    page.type(" ")  # while the answer is pending
    answered()
    assert "did you mean 'model'?" in page.evaluate("document.querySelector('[role=alert]').textContent")
    assert page.evaluate("document.querySelector('.pj-row input').getAttribute('aria-invalid')") == "true"
    page.press("Escape")
    answered()
    assert page.evaluate("document.querySelector('[role=alert]').hidden")
    assert widget.specs == {}
    page.evaluate("document.querySelectorAll('.pj-row select')[1].focus()")
    page.press("ArrowDown")
    page.press("ArrowDown")
    answered()
    assert widget.specs == dict.fromkeys([f"params['layers'][{k}]['in']" for k in range(3)], "P(None, 'model')")
    assert page.evaluate("document.querySelector('[aria-label=\"specs that changed\"] th.pj-mono').textContent")
    back = page.evaluate("getComputedStyle(document.querySelector('.pj-what-if')).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]
    page.screenshot(str(tmp_path / f"{theme}.png"))
    assert page.complaints == []
    assert [*map(str, page.requests)] == [(tmp_path / "page.html").as_uri()]
    page.close()
