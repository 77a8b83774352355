"""The page at /problems: allowed by its own policy, its examples as the schema says."""

import base64
import hashlib
import html
import json
import re

import pytest
from jsonschema import Draft202012Validator

from api.document.problem_page import POLICY, problems_page, shapes
from api.http.problems import problem_of, problem_types
from api.http.response_models import Problem
from counter.errors import CounterError

PAGE = problems_page().decode()
KINDS = problem_types()


def test_its_style_is_the_one_that_its_policy_allows() -> None:
    styles = re.findall(r"<style>(.*?)</style>", PAGE, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in styles]
    assert [f"'sha256-{each.decode()}'" in POLICY for each in digests] == [True]
    assert "<script" not in PAGE
    assert " style=" not in PAGE


def test_text_in_backticks_became_code() -> None:
    assert "`" not in re.sub(r"<pre>.*?</pre>", "", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_the_example_of_a_code_is_such_a_problem(kind: type[CounterError]) -> None:
    for error in shapes(kind):
        Draft202012Validator(Problem.model_json_schema()).validate(problem_of(error))
    shown = re.search(rf'<section id="{kind.code}">.*?<pre>(.*?)</pre>', PAGE, re.DOTALL)
    assert shown is not None
    assert json.loads(html.unescape(shown[1])) == problem_of(shapes(kind)[0])
