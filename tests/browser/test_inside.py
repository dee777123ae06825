"""Look inside: probabilities, forks by ids, attention, logit lens."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.test_chat import chat_with, finished, say
from tests.browser.test_page import PHONE


def replied(it, model="sft", seed=9, max_tokens=16):
    page = it.open()
    narrow = page.viewport_size["width"] < 500  # the settings are folded
    for step in range(1 + narrow):
        if narrow:
            page.get_by_text("Model and sampling").tap()
        if step == 0:
            chat_with(page, model, temperature=0.9, max_tokens=max_tokens, seed=seed)
    say(page, "look")
    return page, finished(page)


def hover(reply, cell):
    """Point at a cell; return the number of its first token."""
    reply.locator(".token").nth(cell).hover()
    return int(reply.locator(".token").nth(cell).get_attribute("data-index"))


def test_hovering_a_token_shows_its_probability_and_alternatives(opened, server):
    it = opened()
    page, reply = replied(it)
    reply.locator(".token").nth(3).hover()
    popover = page.locator(".popover")
    expect(popover).to_be_visible()
    expect(popover).to_contain_text("entropy")
    assert popover.locator(".alternative").count() == 6
    shares = [float(text.split()[-2].lstrip("<")) for text in popover.locator(".number").all_text_contents()]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 101
    it.picture("token-popover")


@pytest.mark.parametrize("turns", [1, 2])
def test_the_popover_covers_no_button_of_a_short_reply(opened, server, turns):
    page, reply = replied(opened(), "cycle", max_tokens=24)
    if turns == 2:
        say(page, "again")
        reply = finished(page, 2)
    popover = page.locator(".popover")
    for cell in (0, 2, 5):
        hover(reply, cell)
        expect(popover).to_be_visible()
        box = popover.bounding_box()
        for each in (reply.locator(".toolbar button"), page.get_by_role("button", name="Send")):
            for button in each.all():
                at = button.bounding_box()
                beside = at["x"] >= box["x"] + box["width"] or at["x"] + at["width"] <= box["x"]
                assert beside or at["y"] >= box["y"] + box["height"] or at["y"] + at["height"] <= box["y"]
    reply.get_by_role("button", name="Where from?").hover()
    expect(popover).to_be_hidden()


def test_the_popover_hides_on_escape_and_when_the_panel_opens(opened, server):
    page, reply = replied(opened())
    popover = page.locator(".popover")
    hover(reply, 3)
    expect(popover).to_be_visible()
    page.keyboard.press("Escape")
    expect(popover).to_be_hidden()
    hover(reply, 4)
    expect(popover).to_be_visible()
    reply.locator(".token").nth(4).click()
    expect(reply.locator(".inside h3")).to_be_visible()
    expect(popover).to_be_hidden()
    hover(reply, 5)
    page.wait_for_timeout(100)
    expect(popover).to_be_hidden()


@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_where_from_is_seen_when_it_opens_below_look_inside(opened, server, device):
    it = opened(**device)
    _, reply = replied(it, "run", max_tokens=120)
    reply.get_by_role("button", name="Look inside").click()
    expect(reply.locator(".inside h3")).to_be_visible()
    reply.get_by_role("button", name="Where from?").click()
    expect(reply.locator(".provenance h3")).to_be_in_viewport(ratio=1)
    expect(reply.locator(".provenance .verdict")).to_be_in_viewport(ratio=1)
    it.picture(f"where-from-{'phone' if device else 'desktop'}")


@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_the_help_says_what_the_device_can_do(opened, server, device):
    it = opened(**device)
    expect(it.open().locator(".empty.hint")).to_contain_text("Tap a word" if device else "Point at a word")
    _, reply = replied(it, "cycle", max_tokens=4)
    reply.locator(".token").first.click()
    expect(reply.locator(".inside")).to_contain_text("Tap a token" if device else "Click on a token")


def test_a_click_on_an_alternative_forks_the_reply_by_ids(opened, server):
    it = opened()
    page, reply = replied(it)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data) if "/api/reply" in request.url else None)
    before = page.evaluate("() => JSON.parse(localStorage[Object.keys(localStorage).find(k => k.includes('tion-'))])")
    ids = before["children"][0]["children"][0]["ids"]
    at = hover(reply, 5)
    page.locator(".popover .alternative:enabled").first.click()
    expect(page.locator(".assistant .versions")).to_contain_text("2 of 2")
    finished(page)
    sent = json.loads(bodies[0])
    assert sent["reply"][:at] == ids[:at] and len(sent["reply"]) == at + 1 and sent["reply"][at] != ids[at]
    assert sent["seed"] == 9
    after = page.evaluate("() => JSON.parse(localStorage[Object.keys(localStorage).find(k => k.includes('tion-'))])")
    forked = after["children"][0]["children"][1]
    assert forked["ids"][: at + 1] == sent["reply"] and forked["started"] == at + 1 and len(forked["ids"]) > at + 1


def test_the_keyboard_chooses_tokens_and_forks(opened, server):
    it = opened()
    page, reply = replied(it)
    reply.get_by_role("button", name="Look inside").focus()
    page.keyboard.press("Enter")
    listbox = reply.get_by_role("listbox")
    expect(listbox).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(reply.locator(".inside h3")).to_have_text("Token 3 of 16")
    expect(reply.locator(".token[aria-selected=true]")).to_have_count(1)
    page.keyboard.press("End")
    expect(reply.locator(".inside h3")).to_have_text("Token 16 of 16")
    page.keyboard.press("Home")
    reply.locator(".inside .alternative:enabled").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .versions")).to_contain_text("2 of 2")
    finished(page)


def test_attention_and_logit_lens_of_a_token(opened, server):
    it = opened()
    page, reply = replied(it)
    reply.locator(".token").nth(7).click()
    inside = reply.locator(".inside")
    at = int(reply.locator(".token").nth(7).get_attribute("data-index"))
    expect(inside.locator("h3")).to_contain_text(f"Token {at + 1} ")
    inside.get_by_text("Attention over the context").click()
    expect(inside.locator(".context .token").nth(8)).to_be_visible()
    inside.get_by_text("Logit lens").click()
    model = server.app.state.models["sft"].model.config
    expect(inside.locator(".lens tbody tr")).to_have_count(model.L)
    expect(inside.locator(".lens td.chosen")).not_to_have_count(0)
    inside.get_by_label("Head", exact=True).select_option(label="2")
    expect(inside.locator("caption").first).to_contain_text("head 2")
    prompt = inside.locator(".context .token").count()
    reply.get_by_role("listbox").focus()
    page.keyboard.press("ArrowRight")
    expect(inside.locator(".context .token")).to_have_count(prompt + 1)
    it.picture("look-inside")


def test_probabilities_of_an_earlier_visit_are_the_same(opened, server):
    it = opened()
    page, reply = replied(it)
    reply.locator(".token").first.click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    shown = reply.locator(".inside .details p").text_content()
    page.reload()
    again = page.locator(".message.assistant .reply")
    again.get_by_role("button", name="Look inside").click()
    expect(again.locator(".inside h3")).to_contain_text("Token 1 ")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(again.locator(".inside .details p")).to_have_text(shown)


def test_pointing_at_a_reply_of_an_earlier_visit_scores_it(opened, server):
    it = opened()
    page, _ = replied(it)
    page.reload()
    page.locator(".message.assistant .tokens").hover()
    page.locator(".message.assistant .token").nth(2).hover()
    expect(page.locator(".popover .alternative").first).to_be_visible()
    page.reload()
    page.locator(".message.assistant .tokens").dispatch_event("click")  # a tap does not hover
    expect(page.locator(".inside h3")).to_contain_text("Token 1 ")


def test_the_keyboard_stays_in_the_conversation_after_a_fork(opened, server):
    page, reply = replied(opened())
    reply.locator(".token").first.click()
    reply.locator(".inside .alternative:enabled").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .versions")).to_contain_text("2 of 2")
    expect(page.get_by_role("log", name="Conversation")).to_be_focused()


@pytest.mark.parametrize(
    ("p", "shown"),
    [(1, "100 %"), (0.9996, "100 %"), (0.9991, "99.9 %"), (0.996, "99.6 %"), (0.5, "50 %"), (0, "<0.1 %")],
)
def test_probabilities_as_percent(opened, server, p, shown):
    page = opened().open()
    assert page.evaluate("async (p) => (await import('/static/format.js')).percent(p)", p) == shown


def test_a_character_of_several_bytes_is_one_cell(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "cycle", temperature=0, max_tokens=24)
    say(page, "look")
    reply = finished(page)
    cells = reply.locator(".token").all_text_contents()
    assert "é" in cells and "😀" in cells and all(len(cell) == 1 for cell in cells)
    reply.locator(".token", has_text="😀").first.hover()
    expect(page.locator(".popover .details")).to_have_count(4)
    assert re.fullmatch(r"bytes:\\xf0.*", page.locator(".popover .what").first.text_content())
