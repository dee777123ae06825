"""The page as a whole: Compare, themes, phone, accessibility, API key, speed, and that it needs no other host."""

import os
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
from tests.browser.conftest import Opened
from tests.browser.test_chat import chat_with, finished, say
from tests.cli import reciting
from tests.serve.conftest import cycle_model, running, served

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def compared(it):
    page = it.open("compare")
    page.get_by_label("Left model", exact=True).select_option("pretrain")
    page.get_by_label("Right model").select_option("sft")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Longest reply").fill("30")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Prompt", exact=True).fill("Tell me")
    page.keyboard.press("Enter")
    for reply in page.locator(".reply").all():
        expect(reply).to_have_attribute("aria-busy", "false")
    expect(page.locator(".reply[aria-busy=false]")).to_have_count(2)
    return page


def violations(page):
    """What axe finds that is serious or critical, as lines."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_two_models_reply_to_one_prompt_and_seed(opened, server):
    it = opened()
    page = compared(it)
    facts = page.locator(".facts").all_text_contents()
    assert "pretrain" in facts[0] and "sft" in facts[1] and all("seed 5" in each for each in facts)
    it.picture("compare")
    page.locator(".column").nth(1).locator(".token").nth(3).hover()
    page.locator(".popover .alternative:enabled").first.click()
    expect(page.locator(".reply[aria-busy=false]")).to_have_count(2)
    expect(page.locator(".column .facts").first).to_have_text(facts[0])


def test_compare_continues_a_text(opened, server):
    page = opened().open("compare")
    page.get_by_label("Left model", exact=True).select_option("cycle")
    page.get_by_label("Right model").select_option("cycle")
    page.get_by_label("The prompt is").select_option("text")
    page.get_by_label("Prompt", exact=True).fill("ab")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".reply[aria-busy=false]")).to_have_count(2)
    for reply in page.locator(".reply .tokens").all():
        assert reply.text_content().startswith("é€😀. ab")


def test_a_recited_reply_shows_its_passage(opened, server):
    it = opened()
    notes = reciting.folder() / "notes"
    note = (notes / reciting.longest(reciting.split(notes)[0], 1)[0]).read_text(encoding="utf-8")
    page = it.open("compare")
    page.get_by_label("Left model", exact=True).select_option("run")
    page.get_by_label("Right model", exact=True).select_option("cycle")
    page.get_by_label("The prompt is").select_option("text")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Longest reply").fill("80")
    page.get_by_label("Prompt", exact=True).fill(note[:40])
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".reply[aria-busy=false]")).to_have_count(2)
    for button in page.get_by_role("button", name="Where from?").all():
        button.click()
    recited, other = page.locator(".provenance").all()
    expect(recited).to_contain_text("recites")
    assert recited.locator("blockquote mark").first.text_content() in note
    assert recited.locator(".traced mark").first.text_content() in note
    expect(other).to_contain_text("not known")  # a model without a run
    recited.scroll_into_view_if_needed()
    it.picture("provenance")
    it.problems = [problem for problem in it.problems if "400" not in problem]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, server, scheme):
    it = opened(color_scheme=scheme)
    page = it.open()
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    assert violations(page) == []
    chat_with(page, "sft", max_tokens=24, seed=2)
    say(page, "hello")
    reply = finished(page)
    assert violations(page) == []
    reply.locator(".token").nth(4).click()
    reply.locator(".inside").get_by_text("Attention over the context").click()
    reply.locator(".inside").get_by_text("Logit lens").click()
    expect(reply.locator(".lens tbody tr").first).to_be_visible()
    expect(reply.locator(".context")).to_be_visible()
    assert violations(page) == []
    reply.get_by_role("button", name="Where from?").click()
    expect(reply.locator(".provenance")).to_contain_text("not known")
    it.picture(f"chat-{scheme}")
    it.problems = [problem for problem in it.problems if "400" not in problem]
    page = compared(it)
    assert violations(page) == []
    it.picture(f"compare-{scheme}")


def luminance(page):
    red, green, blue = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    return int(red) + int(green) + int(blue)


def test_dark_follows_the_system_and_the_button(opened, server):
    page = opened(color_scheme="dark").open()
    assert luminance(page) < 150
    page.get_by_role("button", name="Theme").click()
    assert luminance(page) > 600
    page.reload()
    assert luminance(page) > 600
    page.get_by_role("button", name="Theme").click()
    assert luminance(page) < 150


@pytest.mark.parametrize("view", ["chat", "compare"])
def test_a_phone_shows_everything_without_scrolling_sideways(opened, server, view):
    it = opened(**PHONE)
    if view == "chat":
        page = it.open()
        page.get_by_text("Model and sampling").tap()
        chat_with(page, "sft", max_tokens=40, seed=6)
        it.picture("phone-settings")
        page.get_by_text("Model and sampling").tap()
        say(page, "hello from a phone, with a message that is longer than one line of it")
        reply = finished(page)
        reply.locator(".token").nth(2).tap()
        expect(reply.locator(".inside h3")).to_have_text("Token 3 of 40")
    else:
        page = compared(it)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for control in page.get_by_role("button").all():
        box = control.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= 390)
    assert violations(page) == []
    it.picture(f"phone-{view}")


def test_the_panels_fold_when_the_window_becomes_narrow(opened, server):
    page = opened().open()
    panels = page.locator("details.side")
    assert panels.evaluate_all("all => all.map(each => each.open)") == [True, True]
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("() => [...document.querySelectorAll('details.side')].every(each => !each.open)")
    page.set_viewport_size({"width": 1280, "height": 844})
    page.wait_for_function("() => [...document.querySelectorAll('details.side')].every(each => each.open)")


def test_the_page_loads_from_the_server_only(opened, server):
    it = opened()
    page = it.open()
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    assert it.requests and all(url.startswith(server.url) for url in it.requests)


def test_the_page_is_soon_interactive(browser, server):
    times = []
    for _ in range(6):
        context = browser.new_context()  # nothing cached; no interception of requests, which passes through Python
        page = context.new_page()
        page.goto(f"{server.url}/")
        expect(page.get_by_label("Model", exact=True)).to_be_visible()
        times.append(page.evaluate("performance.getEntriesByName('interactive')[0].startTime"))
        context.close()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"interactive after {min(times):.0f} to {max(times):.0f} ms, {load:.1f} processes per core")
    # The goal is 300 ms on an idle machine: met on x86 (150 to 205 ms); slow ARM cores need more than a test allows.
    assert min(times) < (600 if load < 1 else 2000)


def test_the_api_key_is_asked_for_once(browser):
    with running([served("cycle", cycle_model())], routers=PAGE_ROUTERS, static=STATIC, api_key="secret") as found:
        it = Opened(browser, found)
        page = it.open()
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("alert")).to_contain_text("API key")
        say(page, "too early")  # asks again
        page.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_placeholder("that key was wrong")).to_be_visible()
        it.picture("api-key")
        page.get_by_label("API key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        finished(page)
        chat_with(page, "cycle", temperature=0, max_tokens=5)
        say(page, "hello")
        finished(page, 2)
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_be_visible()
        assert page.evaluate("Object.values(localStorage).join().includes('secret')") is False
        assert [problem for problem in it.problems if "401" not in problem] == []
        it.context.close()
