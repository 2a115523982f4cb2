"""The page of `evaluate.py serve` in a browser: chat, colored tokens, stopping, errors, narrow and dark screens."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.serve.conftest import CONTEXT, Serve, Served

CHROMIUM = Path("/usr/bin/chromium")
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEMPERATURE = "element => { element.value = 0; element.dispatchEvent(new Event('input')); }"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")]


@pytest.fixture(scope="module")
def browser() -> Any:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


def opened(browser: Any, served: Served, troubles: list[str], width: int = 390) -> Any:
    """Return a page with temperature 0. The page's errors and its requests to other servers are added to `troubles`."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    ours = (served.url, "data:")
    page.on("request", lambda request: None if request.url.startswith(ours) else troubles.append(request.url))
    page.goto(served.url)
    page.locator("#temperature").evaluate(TEMPERATURE)
    return page


def slow_down(page: Any) -> None:
    """Let the page receive 5,000 bytes a second, so that an answer of 500 tokens lasts more than a minute.

    Without this, the answer would take a second, and a later click would find no button.
    """
    speed = {"offline": False, "latency": 0, "downloadThroughput": 5_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", speed)


def say(page: Any, text: str, then: str = "#send", **options: Any) -> None:
    """Send a message, and wait until the element `then` is visible."""
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.locator(then, **options).first.wait_for(state="visible", timeout=60_000)


@pytest.mark.parametrize("width", [390, 1200])
def test_chat_shows_colored_tokens_with_alternatives(browser: Any, served: Served, width: int) -> None:
    troubles: list[str] = []
    page = opened(browser, served, troubles, width)
    page.click("#options-button")
    page.fill("#longest", "20")
    page.click("#options-button")
    say(page, "<b>Hello</b>")
    page.fill("#message", "two")
    page.press("#message", "Shift+Enter")
    page.locator("#message").press_sequentially("lines")
    page.press("#message", "Enter")
    page.locator("#send").wait_for(state="visible", timeout=60_000)
    assert page.locator(".user p").all_inner_texts() == ["<b>Hello</b>", "two\nlines"]
    assert page.locator(".about").first.inner_text().startswith("20 tokens") and page.locator(".text").count() == 2
    cell = page.locator(".text span").first
    background = "element => getComputedStyle(element).backgroundColor"
    plain = cell.evaluate(background)
    page.check("#colors")
    assert cell.evaluate(background) != plain and page.locator(".legend").is_visible()
    cell.click() if width == 390 else cell.hover()
    tooltip = cell.evaluate("element => getComputedStyle(element, '::after').content")
    assert tooltip.count("%") == 6 and "nats" in tooltip
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(WIDE) <= 0
    page.click("#new")
    assert page.locator(".said").count() == 0 and troubles == []


def test_stop_button_and_errors_are_shown(browser: Any, served: Served) -> None:
    troubles: list[str] = []
    page = opened(browser, served, troubles)
    slow_down(page)
    say(page, "Hello", ".text span:nth-child(4)")
    page.click("#stop")
    page.locator(".about", has_text="stopped").wait_for()
    say(page, "x" * 600, ".error", has_text="got 60")
    assert page.input_value("#message") == "x" * 600 and page.evaluate(WIDE) <= 0
    assert len(troubles) == 1 and "400" in troubles[0]


@pytest.mark.parametrize("kind", ["chat", "base"])
def test_full_context_notes_forgotten_turns(
    browser: Any, served: Served, finished: Path, serve: Serve, kind: str
) -> None:
    """The finished run has a context of 32 tokens of one byte each, and no conversation template."""
    with nullcontext(served) if kind == "chat" else serve(finished) as server:
        troubles: list[str] = []
        page = opened(browser, server, troubles)
        length = 150 if kind == "chat" else 10
        page.click("#options-button")
        page.fill("#longest", "4")
        sent = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        for letter in "abcdef":
            say(page, letter * length)
            page.locator("#send").wait_for(state="visible", timeout=60_000)
        assert page.locator(".error").count() == 0 and troubles == []
        context = CONTEXT if kind == "chat" else 32
        [note] = page.locator(".note").all_inner_texts()
        assert note == f"NOTE: the model no longer sees the oldest turns, because its context has only {context} tokens"
        turns = [len(body.get("messages") or [*body["earlier"], body["prompt"]]) for body in sent]
        assert turns[:2] == [1, 3] and max(turns) < 2 * 6 - 1  # forgotten turns are not sent again
        page.click("#new")
        assert page.locator(".note").count() == 0
        say(page, "x" * 600, ".error", has_text="message: got 6")


def test_abandoned_answers_are_not_sent_again(browser: Any, served: Served) -> None:
    page = opened(browser, served, [])
    say(page, "Hello", ".text span:nth-child(4)")
    page.click("#new")
    page.locator("#send").wait_for()
    page.route("**/v1/chat/completions", lambda _: None)  # the answer never begins
    say(page, "Hi", "#stop")
    page.click("#stop")
    page.locator(".about", has_text="0 tokens, stopped").wait_for()
    assert page.input_value("#message") == "Hi"
    with page.expect_request("**/v1/chat/completions") as request:
        page.press("#message", "Enter")
    assert request.value.post_data_json["messages"] == [{"role": "user", "content": "Hi"}]


def test_base_model_page_asks_for_the_key(browser: Any, finished: Path, serve: Serve) -> None:
    key = "0123456789abcdef"
    with serve(finished, LOCKSTEP_API_KEY=key) as served:
        page = opened(browser, served, [])
        page.locator("#key").wait_for(state="visible")
        page.fill("#key-text", key)
        page.press("#key-text", "Enter")
        say(page, "<script>1</script>")
        shown = page.locator(".text").inner_text()
        assert shown.startswith("<script>1</script>") and len(shown) > 18
        assert page.locator(".text script").count() == 0
