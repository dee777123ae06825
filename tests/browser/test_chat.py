"""Chat in a real browser: streaming, stop, retry, edit, what is kept, export, and that HTML stays text."""

import json
import re

from playwright.sync_api import expect

from tests.browser.conftest import IMAGE, SCRIPT
from tests.serve.conftest import CYCLE


def chat_with(page, model, *, temperature=None, max_tokens=None, seed=None):
    page.get_by_label("Model", exact=True).select_option(model)
    if temperature is not None:
        page.get_by_label("Temperature").fill(str(temperature))
    for label, value in (("Longest reply", max_tokens), ("Seed", seed)):
        if value is not None:
            page.get_by_label(label).fill(str(value))
            page.get_by_label(label).blur()


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page, number=1):
    """Wait for this many finished replies and return the last one."""
    replies = page.locator(".message.assistant .reply")
    expect(replies).to_have_count(number)
    expect(replies.last).to_have_attribute("aria-busy", "false")
    return replies.last


def test_a_reply_streams_and_the_conversation_goes_on(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "cycle", temperature=0, max_tokens=60)
    say(page, "first")
    reply = finished(page)
    assert reply.locator(".tokens").text_content().rstrip("\ufffd") in CYCLE * 20
    expect(reply.locator(".facts")).to_contain_text("60 tokens")
    say(page, "second")
    finished(page, 2)
    expect(page.locator(".message.user .text")).to_have_text(["first", "second"])
    it.picture("chat")


def test_tokens_arrive_one_after_the_other(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=3000)
    say(page, "go")
    tokens = page.locator(".tokens .token")
    expect(tokens).not_to_have_count(0)
    expect(page.locator(".reply")).to_have_attribute("aria-busy", "true")
    before = tokens.count()
    page.wait_for_function("n => document.querySelectorAll('.tokens .token').length > n", arg=before)
    page.keyboard.press("Escape")
    finished(page)


def test_stop_ends_the_reply_on_the_server_too(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=4096)
    say(page, "go")
    expect(page.locator(".tokens .token").nth(20)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    reply = finished(page)
    expect(reply.locator(".facts")).to_contain_text("stopped")
    server.wait_until(lambda: server.app.state.models["cycle"].admission.active == 0)
    count = int(re.search(r"([\d,]+) tokens", reply.locator(".facts").text_content())[1].replace(",", ""))
    assert 20 < count < 4096
    say(page, "again")
    expect(page.locator(".message.user")).to_have_count(2)
    page.keyboard.press("Escape")
    finished(page, 2)


def test_html_in_a_reply_and_in_a_message_is_text(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "html", temperature=0, max_tokens=200)
    say(page, f"{SCRIPT}{IMAGE}")
    reply = finished(page)
    assert SCRIPT in reply.locator(".tokens").text_content()
    assert IMAGE in reply.locator(".tokens").text_content()
    expect(page.locator(".message.user .text")).to_have_text(f"{SCRIPT}{IMAGE}")
    assert page.locator("main script, main img").count() == 0
    page.reload()
    expect(page.locator(".message.assistant .tokens")).to_contain_text(SCRIPT)
    expect(page.locator(".conversations li")).to_have_count(1)
    page.wait_for_timeout(200)
    assert page.title() != "ran" and page.locator("main script, main img").count() == 0
    it.picture("chat-html")


def test_retry_edit_and_versions_lose_nothing(opened, server):
    page = opened().open()
    chat_with(page, "pretrain", max_tokens=20)
    say(page, "first")
    one = finished(page).locator(".tokens").text_content()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".assistant .versions")).to_contain_text("2 of 2")
    two = finished(page).locator(".tokens").text_content()
    assert one != two
    page.get_by_role("button", name="Earlier version").click()
    assert page.locator(".message.assistant .tokens").text_content() == one
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("changed")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.locator(".message.user .text")).to_have_text("changed")
    page.locator(".message.user").get_by_role("button", name="Earlier version").click()
    expect(page.locator(".message.user .text")).to_have_text("first")
    assert page.locator(".message.assistant .tokens").text_content() == one


def test_a_seed_repeats_a_reply(opened, server):
    page = opened().open()
    chat_with(page, "pretrain", max_tokens=30, seed=11)
    say(page, "again")
    one = finished(page).locator(".tokens").text_content()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".assistant .versions")).to_contain_text("2 of 2")
    assert finished(page).locator(".tokens").text_content() == one


def test_the_system_prompt_and_the_sampling_reach_the_server(opened, server):
    page = opened().open()
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data) if "/api/reply" in request.url else None)
    chat_with(page, "sft", temperature=0.5, max_tokens=5, seed=3)
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Top-k").fill("7")
    page.get_by_label("Top-p").fill("0.5")
    say(page, "hello")
    finished(page)
    sent = json.loads(bodies[0])
    assert sent["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["seed"]) == (0.5, 7, 0.5, 3)


def test_conversations_are_kept_and_exported(opened, server, tmp_path):
    it = opened()
    page = it.open()
    chat_with(page, "sft", max_tokens=12, seed=4)
    say(page, "keep me")
    text = finished(page).locator(".tokens").text_content()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    say(page, "another")
    finished(page)
    page.reload()
    expect(page.locator(".conversations li")).to_have_count(2)
    page.get_by_role("button", name="keep me", exact=True).click()
    expect(page.locator(".message.assistant .tokens")).to_have_text(text, use_inner_text=False)
    for kind in ("Markdown", "JSON"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Export {kind}").click()
        waiting.value.save_as(tmp_path / kind)
    markdown = (tmp_path / "Markdown").read_text(encoding="utf-8")
    assert "keep me" in markdown and text in markdown and "sft, seed 4" in markdown
    exported = json.loads((tmp_path / "JSON").read_text(encoding="utf-8"))
    assert exported["children"][0]["children"][0]["content"] == text
    assert len(exported["children"][0]["children"][0]["ids"]) == 12
    page.get_by_role("button", name="Delete keep me").click()
    expect(page.locator(".conversations li")).to_have_count(1)


def test_an_error_of_the_server_is_one_line(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "sft", max_tokens=100_000)
    say(page, "too long")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens must be at most 4096")
    expect(page.locator(".message.assistant")).to_have_count(0)
    it.problems = [problem for problem in it.problems if "400" not in problem]  # Chromium prints the status


def test_shift_enter_starts_a_line(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=2)
    page.get_by_label("Message", exact=True).click()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    finished(page)
    assert page.locator(".message.user .text").text_content() == "one\ntwo"
