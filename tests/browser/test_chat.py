"""Chat in a real browser: streaming, stop, retry, edit, what is kept, export, and that HTML stays text."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import IMAGE, LIMITS, LONGEST, SCRIPT
from tests.serve.conftest import CYCLE

ROLES = ("user .text", "assistant .tokens")


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
    chat_with(page, "cycle", max_tokens=LONGEST)
    say(page, "go")
    tokens = page.locator(".tokens .token")
    expect(tokens).not_to_have_count(0)
    expect(page.locator(".reply")).to_have_attribute("aria-busy", "true")
    before = tokens.count()
    page.wait_for_function("n => document.querySelectorAll('.tokens .token').length > n", arg=before)
    page.keyboard.press("Escape")
    finished(page)


def streaming(page, text, tokens=20):
    """Send a message, and wait until this many tokens of a long reply have arrived."""
    chat_with(page, "cycle", temperature=0, max_tokens=LONGEST)
    say(page, text)
    expect(page.locator(".message.user .text").last).to_have_text(text)
    expect(page.locator(".message.assistant").last.locator(".token").nth(tokens)).to_be_attached()


@pytest.mark.parametrize("turns_before", [0, 1])
def test_a_reload_keeps_the_message_and_what_has_arrived(opened, server, turns_before):
    page = opened().open()
    before = ["earlier"] * turns_before
    for text in before:
        chat_with(page, "cycle", max_tokens=5)
        say(page, text)
        finished(page)
    streaming(page, "precious")
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text([*before, "precious"])
    expect(page.locator(".conversations li")).to_have_count(1)
    reply = page.locator(".message.assistant").last
    text = reply.locator(".tokens").text_content().rstrip("\ufffd")
    assert len(text) >= 20 and text in CYCLE * 600
    expect(reply.locator(".facts")).to_contain_text("stopped")
    chat_with(page, "cycle", max_tokens=5)
    reply.get_by_role("button", name="Retry").click()
    expect(reply.locator(".versions")).to_contain_text("2 of 2")
    expect(reply.locator(".facts")).to_contain_text("5 tokens")
    expect(page.locator(".message.user .text")).to_have_text([*before, "precious"])


def test_a_reply_is_saved_while_it_streams(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=LONGEST)
    say(page, "go")
    page.wait_for_function(
        """() => {
          const key = Object.keys(localStorage).find((each) => each.startsWith("niels-gpt-conversation-"));
          const reply = key && JSON.parse(localStorage[key]).children[0].children[0];
          const busy = document.querySelector(".reply[aria-busy=true]");
          return busy && reply?.ids.length > 20 && reply.finished === "aborted";
        }"""
    )
    page.keyboard.press("Escape")
    finished(page)


@pytest.mark.parametrize("leave_by", ["New chat", "another"])
def test_a_chat_that_is_left_while_its_reply_streams_is_listed_and_kept(opened, server, leave_by):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=5)
    say(page, "another")
    finished(page)
    page.get_by_role("button", name="New chat").click()
    streaming(page, "left alone")
    page.get_by_role("button", name=leave_by, exact=True).click()
    titles = page.locator(".conversations li button:first-child")
    expect(titles).to_have_text(["left alone", "another"], timeout=2000)
    server.wait_until(lambda: server.app.state.models["cycle"].admission.active == 0)
    page.get_by_role("button", name="left alone", exact=True).click()
    expect(page.locator(".message.user .text")).to_have_text(["left alone"])
    assert len(page.locator(".message.assistant .tokens").text_content()) >= 20
    expect(page.locator(".message.assistant .facts")).to_contain_text("stopped")


def test_a_chat_that_is_deleted_while_its_reply_streams_stays_deleted(opened, server):
    page = opened().open()
    streaming(page, "throw away")
    page.get_by_role("button", name="Delete throw away").click()
    expect(page.locator(".message")).to_have_count(0)
    server.wait_until(lambda: server.app.state.models["cycle"].admission.active == 0)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    expect(page.locator(".conversations li")).to_have_count(0)


def test_stop_ends_the_reply_on_the_server_too(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=LONGEST)
    say(page, "go")
    expect(page.locator(".tokens .token").nth(20)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    reply = finished(page)
    expect(reply.locator(".facts")).to_contain_text("stopped")
    server.wait_until(lambda: server.app.state.models["cycle"].admission.active == 0)
    count = int(re.search(r"([\d,]+) tokens", reply.locator(".facts").text_content())[1].replace(",", ""))
    assert 20 < count < LONGEST
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
    page.locator(".message.assistant").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("mine")
    page.keyboard.press("Enter")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export Markdown").click()
    waiting.value.save_as(tmp_path / "edited")
    assert "## Reply (edited by hand)\n\nmine" in (tmp_path / "edited").read_text(encoding="utf-8")
    page.get_by_role("button", name="Delete keep me").click()
    expect(page.locator(".conversations li")).to_have_count(1)


def test_an_error_of_the_server_is_one_line(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "sft")
    say(page, "x" * (LIMITS.prompt_bytes + 1))
    expect(page.get_by_role("alert")).to_contain_text(str(LIMITS.prompt_bytes))
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


def test_a_message_has_the_font_of_the_page(opened, server):
    page = opened().open()
    chat_with(page, "pretrain", max_tokens=5)
    say(page, "in which font?")
    finished(page)
    fonts = [page.locator(f".message.{each}").evaluate("e => getComputedStyle(e).fontFamily") for each in ROLES]
    assert fonts == [page.locator("body").evaluate("e => getComputedStyle(e).fontFamily")] * 2


def test_two_tabs_lose_nothing(opened, server):
    it = opened()
    one = it.open()
    chat_with(one, "pretrain", max_tokens=5)
    say(one, "first tab")
    finished(one)
    two = it.context.new_page()
    two.goto(f"{it.url}/#/chat")
    expect(two.locator(".message.assistant")).to_have_count(1)
    say(two, "second tab")
    finished(two, 2)
    expect(one.locator(".message.user .text")).to_have_text(["first tab", "second tab"])
    expect(one.locator(".facts").last).to_contain_text("reached the longest reply")  # not one that still streams
    say(one, "first tab again")
    finished(one, 3)
    expect(two.locator(".message.user .text")).to_have_text(["first tab", "second tab", "first tab again"])


def test_what_another_tab_saved_during_a_reply_stays(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "pretrain", max_tokens=5)
    say(page, "mine")
    finished(page)
    page.evaluate(
        """() => {
          const key = Object.keys(localStorage).find((each) => each.startsWith("niels-gpt-conversation-"));
          const theirs = { ...JSON.parse(localStorage[key]), saved: "by another tab" };
          theirs.children[0].children = [];
          localStorage[key] = JSON.stringify(theirs);
        }"""
    )
    say(page, "more")
    finished(page, 2)
    page.reload()
    expect(page.locator(".conversations li")).to_have_count(2)
    expect(page.locator(".message.user .text")).to_have_text(["mine", "more"])
    page.locator(".conversations li button").nth(2).click()
    expect(page.locator(".message.user .text")).to_have_text(["mine"])


def test_sampling_is_kept_with_the_conversation(opened, server):
    page = opened().open()
    chat_with(page, "pretrain", max_tokens=5)
    say(page, "hello")
    finished(page)
    page.get_by_label("Top-k").fill("3")
    page.get_by_label("Top-k").blur()
    page.reload()
    expect(page.get_by_label("Top-k")).to_have_value("3")


def test_a_failed_reply_can_be_retried(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "pretrain", max_tokens=5)
    page.route("**/api/reply", lambda route: route.abort())
    say(page, "are you there?")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/api/reply")
    page.locator(".message.user").get_by_role("button", name="Retry").click()
    finished(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".message.user")).to_have_count(1)
    it.problems = [problem for problem in it.problems if "ERR_FAILED" not in problem]


def test_the_text_before_a_lost_connection_is_kept(opened, server):
    it = opened()
    page = it.open()
    chat_with(page, "pretrain")
    token = {"id": 104, "token": "h", "bytes": [104], "logprob": -1.0, "entropy": 1.0, "top": []}
    body = f"data: {json.dumps({'tokens': [token]})}\n\n"  # no [DONE]
    page.route("**/api/reply", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("connection")
    expect(page.locator(".message.assistant .tokens")).to_have_text("h")
    page.reload()
    expect(page.locator(".message.assistant .tokens")).to_have_text("h")
    expect(page.locator(".message.assistant .facts")).to_contain_text("cut off")


def test_a_new_chat_keeps_the_model_and_the_sampling(opened, server):
    page = opened().open()
    chat_with(page, "cycle", max_tokens=5)
    say(page, "hello")
    finished(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.get_by_label("Model", exact=True)).to_have_value("cycle")
    expect(page.get_by_label("Longest reply")).to_have_value("5")


def test_a_draft_is_kept_while_another_view_is_shown(opened, server):
    page = opened().open()
    message = page.get_by_label("Message", exact=True)
    message.fill("not sent yet")
    for view in ("Compare", "Chat"):
        page.get_by_role("link", name=view).click()
        expect(page.get_by_role("heading", level=1, name=view)).to_be_attached()
    expect(message).to_have_value("not sent yet")
    chat_with(page, "cycle", max_tokens=5)
    message.press("Enter")
    finished(page)
    for view in ("Compare", "Chat"):
        page.get_by_role("link", name=view).click()
        expect(page.get_by_role("heading", level=1, name=view)).to_be_attached()
    expect(message).to_have_value("")


def test_the_first_chat_is_with_a_tuned_model(opened, server):
    it = opened()

    def with_tasks(route):
        response = route.fetch()
        models = response.json()
        models["data"] = [each | {"task": "sft" if each["id"] == "sft" else "pretrain"} for each in models["data"]]
        route.fulfill(response=response, json=models)

    it.page.route("**/v1/models", with_tasks)
    page = it.open()
    expect(page.get_by_label("Model", exact=True)).to_have_value("sft")
