"""Views of made-up numbers: self-contained, well-formed for any tokens, true to numbers."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jinfer import RequestError
from jinfer.engine.output.completion import TokenLogprob
from jinfer.html.html_page import page
from jinfer.views.activation_outliers import largest
from jinfer.views.alternatives_tree import Branch, draw_alternatives
from jinfer.views.attention_maps import head_scores
from jinfer.views.cell_grid import grid
from jinfer.views.logit_attribution import Attribution, draw_attribution
from jinfer.views.logit_lens import Lens, draw_lens
from jinfer.views.memory_use import MemoryUse, draw_memory
from jinfer.views.token_likelihoods import draw_tokens
from jinfer.views.view_table import VIEWS, keywords
from jinfer.views.weight_errors import percent, relative_error
from tests.views.made_up import SCRIPT, nat, views

MADE = views()
NAMES = sorted(MADE)


def test_every_view_is_tested() -> None:
    assert set(VIEWS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_view_is_well_formed_and_self_contained(name: str, tmp_path: Path) -> None:
    """Markup is XML for any tokens; nothing in it is fetched, and no token becomes markup."""
    view = MADE[name]
    shown = view._repr_html_()
    root = ElementTree.fromstring(shown)
    scripts = root.findall(".//script")
    assert [script.get("src") for script in scripts] == [None]
    assert "title='run'" not in (scripts[0].text or "")
    names = shown.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"""(?:src|href)=|https?:|url\((?!"data:image/png;base64,)""", names)
    assert view.save(tmp_path / "view.svg") == tmp_path / "view.svg"
    picture = ElementTree.parse(tmp_path / "view.svg").getroot()
    assert float(picture.get("height", 0)) > 60
    assert not picture.findall(".//{http://www.w3.org/1999/xhtml}script")
    text = view.save(tmp_path / "view.html").read_text("utf-8")
    assert text == page(view.title, view._content())
    assert "default-src 'none'" in text
    assert repr(view) == f"View({view.title}: {view.about})"


@pytest.mark.parametrize("name", NAMES)
def test_views_have_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MADE[name].table()
    assert len({len(column) for column in table.values()}) == 1
    made = ModuleType("pandas")
    made.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert list(MADE[name].to_pandas()) == list(table)


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RequestError, match=r"^to_pandas needs pandas: pip install pandas$"):
        MADE["lens"].to_pandas()
    with pytest.raises(RequestError, match=r"lens\.png: a view is a page or an image"):
        MADE["lens"].save(tmp_path / "lens.png")
    with pytest.raises(RequestError, match=r"no/lens\.svg: cannot be written: No such file"):
        MADE["lens"].save(tmp_path / "no" / "lens.svg")
    with pytest.raises(LookupError) as error:
        keywords("lens", {"top": 3, "layer": 2})
    assert error.value.args == ("layer", ["patterns"])
    assert keywords("lens", {"top": 3, "layer": None}) == {"top": 3}


def cells(view: Any) -> list[list[tuple[str, str, str]]]:
    """Text, what is said, and style of each cell of a grid, by row."""
    root = ElementTree.fromstring(view._repr_html_())
    return [
        [(each.text or "", each.get("title", ""), each.get("style", "")) for each in row.iter("td")]
        for row in root.iter("tr")
        if row.find("td") is not None
    ]


def test_logit_lens() -> None:
    logprobs = np.log(np.array([[[0.5, 0.25], [0.9, 0.05]], [[0.6, 0.3], [0.2, 0.1]]]))
    ids = np.array([[[0, 1], [2, 0]], [[1, 0], [2, 1]]])
    texts = {0: " a", 1: "b\n", 2: SCRIPT}
    view = draw_lens(
        Lens(["embed", "0"], [" a", "b\n"], ids, logprobs, texts, np.log([[0.25], [0.6]]))
    )
    (first, second), (third, _) = cells(view)
    assert first[0] == "␣a"
    assert (
        first[1].splitlines() if "\n" in first[1] else first[1].startswith("after embed, at 0 ␣a")
    )
    assert " 50.0%  ␣a  0" in first[1]
    assert " 25.0%  b↵, which follows" in first[1]
    assert first[2] == "--s:.50"
    assert second[0].startswith("</scri")
    assert third[0] == "b↵"
    assert "strong" in re.findall(r"<td class=\"(\w+)\"", view._repr_html_())
    table = view.table()
    assert list(table["predicted"]) == [" a", "b\n", SCRIPT, " a", "b\n", " a", SCRIPT, "b\n"]
    assert list(table["layer"][:4]) == ["embed"] * 4


def test_attributions_add_up() -> None:
    values, heads = np.array([[1.0, 2.0], [-0.5, np.nan]]), np.array([[0.75, 0.25], [np.nan] * 2])
    found = Attribution("logit", 0.5, ("attn", "ffn"), values, heads, -0.25, 2.75)
    assert found.total == 2.75
    np.testing.assert_array_equal(found.layers, [3.0, -0.5])
    rows = cells(draw_attribution(found))
    assert [text for text, _, _ in rows[1]] == ["+0.75", "+0.25", "+1.00", "+2.00", "+3.00"]
    assert [text for text, _, _ in rows[2]] == ["", "", "-0.50", "", "-0.50"]
    assert rows[2][2][2] == "--n:.17"
    assert rows[-1][-1][0] == "+2.75"


def test_grid_of_own_values() -> None:
    view = grid([[1.0, -2.0], [np.nan, 0.0]], ["a", " b"], ["\n", "<"], "t")  # type: ignore[arg-type]
    rows = cells(view)
    assert [[text for text, _, _ in row] for row in rows] == [["1.00", "-2.00"], ["nan", "0.00"]]
    assert rows[0][1][1:] == ("a, <: -2", "--n:1.00")
    assert list(view.table()["column"]) == ["\n", "<", "\n", "<"]
    assert view.about == "2 × 2 values, from -2 to 1"
    assert ">two words␣</th>" in grid(np.eye(1), [" a"], ["two words "])._repr_html_()
    assert list(grid(np.eye(2), range(2), range(2)).table()["row"]) == ["0", "0", "1", "1"]
    with pytest.raises(RequestError, match="the values are 1 × 2, and there are 2 × 2 names"):
        grid(np.ones((1, 2)), ["a", "b"], ["c", "d"])


def test_heads_are_scored() -> None:
    """A head that attends to the token before, and one that finds what followed the same token."""
    words = ["a", "b", "c", "a", "b", "c"]
    before = np.eye(6, k=-1)
    before[0, 0] = 1
    scores = head_scores(before, words)
    assert (scores.previous, scores.own) == (1.0, pytest.approx(1 / 6))
    induction = np.zeros((6, 6))
    induction[:3, 0] = 1
    induction[[3, 4, 5], [1, 2, 3]] = 1
    assert head_scores(induction, words).induction == 1.0
    assert np.isnan(head_scores(before[:3, :3], words[:3]).induction)
    assert head_scores(np.ones((1, 1)), ["a"]).first == 1.0


def test_figures() -> None:
    values = np.ones((3, 16), np.float32)
    values[1, 7] = -9
    found = largest(values)
    assert (found.token, found.dimension, found.value) == (1, 7, -9.0)
    assert found.ratio == pytest.approx(9 / np.sqrt((15 + 81) / 16))
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == 0.1
    assert [percent(share) for share in (0, 0.0123, 0.00012)] == ["0", "1.2%", ".012%"]


def test_tokens_and_their_perplexity() -> None:
    other = TokenLogprob(2, " other", nat(0.5))
    tokens = [TokenLogprob(1, "<i>", nat(0.25), (other,)), TokenLogprob(3, "x\n", 0.0)]
    view = draw_tokens("<s>", tokens)
    assert "perplexity 2.00" in view.about
    shown = view._repr_html_()
    assert '<span class="token" style="--s:.75" tabindex="0" title=" 25.0%  &lt;i&gt;  1' in shown
    assert ">x↵\n</span>" in shown
    assert "<span>&lt;s&gt;</span>" in shown


def test_alternatives_branch_at_their_token() -> None:
    answer = [TokenLogprob(at, text, nat(0.5)) for at, text in enumerate(["a", "b", "c"])]
    view = draw_alternatives("p", answer, [Branch(1, [TokenLogprob(9, "B", nat(0.25))], True)])
    root = ElementTree.fromstring(view._repr_html_())
    trunk = root.find(".//div[@class='trunk']")
    assert trunk is not None
    assert ["".join(part.itertext()) for part in trunk] == ["a", "50%b", "25%B ∎", "c"]


def test_memory_adds_up() -> None:
    weights = {"embed.weight": 3072, "decoder.0.attn.q.weight": 1024, "decoder.0.ffn.up": 1024}
    view = draw_memory(MemoryUse(weights, {"all": 1 << 20}, 64))
    assert view.about == "weights 5.00 KiB, cache 1.00 MiB"
    ((attn, ffn, together),) = cells(view)
    assert (attn[0], ffn[0], together[0]) == ("1.00 KiB", "1.00 KiB", "2.00 KiB")
