"""RDI018: placeholders of images among sampled tokens, and other ids that prompts repeat."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.io.parquet.cells import Place
from rolloutdoctor.io.parquet.hashes import placeholders

CODE = "RDI018"
PAD, START, END, EOS = 151655, 151652, 151653, 151645
ROWS = 64


def rows(*, prompt=None, response=None, mask=None):
    """Responses to prompts with an image, unless told otherwise."""
    found = []
    for row in range(ROWS):
        draw = np.random.default_rng(row)
        words = draw.integers(0, 1000, 20).tolist()
        image = [START, *[PAD] * int(draw.integers(64, 300)), END]
        said = [*draw.integers(0, 1000, 30).tolist(), EOS]
        said = said if response is None else response(row, said)
        found.append(
            {
                "step": row // 32,
                "group_id": str(row // 4),
                "prompt_ids": [*words[:5], *image, *words[5:]] if prompt is None else prompt(row, words),
                "response_ids": said,
                "response_mask": [1] * len(said) if mask is None else mask(row, said),
                "reward": float(row % 2),
            }
        )
    return found


def report(tmp_path, **kwargs):
    pq.write_table(pa.Table.from_pylist(rows(**kwargs)), tmp_path / "run.parquet")
    return rd.check(tmp_path / "run.parquet", select=[CODE])


def sampled(row, said):
    """One response has a placeholder in its middle, another one two."""
    return {3: [*said[:7], PAD, *said[7:]], 40: [PAD, *said[:5], PAD, *said[5:]]}.get(row, said)


def test_placeholders_that_the_policy_sampled(tmp_path):
    (finding,) = report(tmp_path, response=sampled).findings
    assert (finding.severity.label, finding.verdict) == ("warning", "exposed")
    assert {name: one.value for name, one in finding.measures.items()} == {
        "sampled_tokens": 3,
        "rows": 2,
        "responses": ROWS,
    }
    assert finding.headline == "the policy sampled 3 placeholders of an image (id 151655) in 2 responses of 64"
    assert finding.examples[0].note == "2 tokens with the id 151655"


@pytest.mark.parametrize(("count", "severity"), [(1, "info"), (2, "info"), (3, "warning")])
def test_few_tokens_are_no_warning(count, severity, tmp_path):
    (finding,) = report(tmp_path, response=lambda row, said: [*said[:7], *[PAD] * (row < count), *said[7:]]).findings
    assert (finding.severity.label, finding.measures["sampled_tokens"].value) == (severity, count)


def test_without_them_it_is_clean(tmp_path):
    assert [code for code, _ in report(tmp_path).clean] == [CODE]


def test_images_that_a_tool_returned_are_not_sampled(tmp_path):
    """Masked, and where a wrong mask trains them: that is another fault."""

    def seen(row, said):
        return [*said[:10], START, *[PAD] * 100, END, *said[10:]]

    masked = report(tmp_path, response=seen, mask=lambda row, said: [int(one != PAD) for one in said])
    assert [code for code, _ in masked.clean] == [CODE]
    assert [code for code, _ in report(tmp_path, response=seen).clean] == [CODE]


def test_padding_of_prompts_is_no_placeholder(tmp_path):
    """Some models end responses with the token that pads prompts."""
    found = report(tmp_path, prompt=lambda row, words: [*[EOS] * 100, *words])
    (one,) = found.not_applicable
    assert "no prompt has a run of 64 equal ids" in one.reason


def test_the_end_of_a_response_is_not_sampled(tmp_path):
    found = report(tmp_path, response=lambda row, said: [*said[:-1], PAD])
    assert [code for code, _ in found.clean] == [CODE]


def test_digits_of_a_grid_are_ordinary_tokens(tmp_path):
    found = report(
        tmp_path,
        prompt=lambda row, words: [*words[:3], *[15] * 81, *words[3:]],
        response=lambda row, said: [*said[:4], 15, 16, 15, *said[4:]],
    )
    (one,) = found.not_applicable
    assert "ordinary tokens" in one.reason


def test_a_line_in_few_prompts_is_text(tmp_path):
    found = report(
        tmp_path,
        prompt=lambda row, words: [*words[:3], *[12] * 80 * (row == 5), *words[3:]],
        response=lambda row, said: [*said[:4], 12, *said[4:]] if row == 5 else said,
    )
    assert found.not_applicable


def test_a_run_without_prompts_is_skipped(tmp_path):
    table = pa.Table.from_pylist(rows()).drop_columns(["prompt_ids"])
    pq.write_table(table, tmp_path / "run.parquet")
    (skipped,) = rd.check(tmp_path / "run.parquet", select=[CODE]).skipped
    assert "prompt_ids" in skipped.reason


def slow(prompt):
    """The first id with a run of 64 between other ids."""
    start = 0
    while start < len(prompt):
        end = start
        while end < len(prompt) and prompt[end] == prompt[start]:
            end += 1
        if end - start >= 64 and start > 0 and end < len(prompt):
            return prompt[start]
        start = end
    return -1


def test_placeholders_are_those_of_a_slow_loop():
    draw = np.random.default_rng(1)
    prompts = [
        np.repeat(draw.integers(0, 4, parts), draw.choice([1, 2, 63, 64, 90], parts)).tolist()
        for parts in draw.integers(0, 5, 500)
    ]
    for some in (prompts, prompts[:1], []):
        column = pa.chunked_array([pa.array(some, pa.list_(pa.int32()))])
        found = placeholders(column, Place("run.parquet", "prompt_ids", np.arange(len(some)))).tolist()
        assert found == [slow(prompt) for prompt in some]
