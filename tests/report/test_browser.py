"""The report in a browser: headless Chromium, where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indictune.report.report_page import write_report
from tests.report.folders import run_folder

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]

_QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
# Of each text that is seen: its words, its colours as red, green, blue and alpha, and whether it is large. The canvas
# turns colours of any notation into numbers.
TEXTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const numbers = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), behind = [];
    for (let each = element; each; each = each.parentElement) {
      behind.push(numbers(getComputedStyle(each).backgroundColor));
    }
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    found.push([text, numbers(element.closest('svg') ? style.fill : style.color), behind, isLarge]);
  }
  return found;
}"""


def luminance(colour: list[float]) -> float:
    """As of WCAG 2.2."""
    parts = [value / 255 for value in colour[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def over(above: list[float], below: list[float]) -> list[float]:
    return [
        alpha * top + (1 - alpha) * bottom for alpha in [above[3]] for top, bottom in zip(above, below, strict=False)
    ]


def contrast(colour: list[float], behind: list[list[float]]) -> float:
    """Of a text's colour with those of the elements around it, the innermost first."""
    ground = [255.0, 255.0, 255.0]
    for each in reversed(behind):
        ground = over(each, ground)
    lighter, darker = sorted((luminance(over(colour, ground)), luminance(ground)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With reports of a run and of two."""
    made = tmp_path_factory.mktemp("report")
    one, other = run_folder(made / "one"), run_folder(made / "other", learns=0.4)
    write_report([one])
    write_report([one, other], made / "comparison.html")
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        yield started
        started.close()


@pytest.mark.parametrize("page_name", ["one/report.html", "comparison.html"])
def test_a_report_can_be_read_everywhere(browser: Any, folder: Path, page_name: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport=DESK)
        page, said, asked = context.new_page(), list[str](), list[str]()
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto((folder / page_name).as_uri())
        assert said == []
        assert [url for url in asked if not url.startswith(("data:", (folder / page_name).as_uri()))] == []
        texts = page.evaluate(TEXTS)
        assert len(texts) > 100
        low = [(text, ratio) for text, colour, behind, is_large in texts
               if (ratio := round(contrast(colour, behind), 2)) < (3 if is_large else 4.5)]  # fmt: skip
        assert low == []
        dark = luminance(texts[0][2][-2][:3]) < 0.1
        assert dark == (scheme == "dark")
        sizes = page.eval_on_selector_all(
            "svg[role=img]", "all => all.map(each => each.getBoundingClientRect().width)"
        )
        assert len(sizes) >= 4
        assert min(sizes) > 250
        for size in (DESK, PHONE):
            page.set_viewport_size(size)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        context.close()


def test_the_keyboard_reaches_links_and_boxes_that_scroll(browser: Any, folder: Path) -> None:
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto((folder / "one/report.html").as_uri())
    expected = page.evaluate("document.querySelectorAll('a[href], summary, [tabindex=\"0\"]').length")
    reached = []
    for _ in range(expected):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.outerHTML.slice(0, 90)"))
    assert len({*reached}) == expected
    assert 'class="skip"' in reached[0]
    page.keyboard.press("Tab")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    unreachable = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth
             && ['auto', 'scroll'].includes(getComputedStyle(each).overflowX)
             && !(each.tabIndex === 0 && each.getAttribute('aria-label'))).length"""
    )
    assert unreachable == 0
    box = page.locator(".scores .scroll").first
    assert box.evaluate("each => each.scrollWidth > each.clientWidth")
    box.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    assert box.evaluate("each => each.scrollLeft") > 0
    context.close()
