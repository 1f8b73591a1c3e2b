"""The page on searches shows what happens."""

import doctest
import pathlib

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "search.md"


def test_the_examples_of_the_page_run():
    # A fence is no part of what an example prints.
    text = PAGE.read_text(encoding="utf-8").replace("```", "\n")
    test = doctest.DocTestParser().get_doctest(text, {}, "search.md", str(PAGE), 0)
    assert len(test.examples) > 10
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test).failed == 0
