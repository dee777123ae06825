"""The check of a folder of notes, against brute force and known numbers."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.config import NotesConfig
from niels_gpt.data.note_check import (
    Secret,
    check_notes,
    find_secrets,
    is_card,
    near_duplicates,
    script_shares,
    shingle_hashes,
)

CARDS = {  # published test numbers of the issuers
    "4111111111111111": True,
    "4111 1111 1111 1111": True,
    "5555-5555-5555-4444": True,
    "378282246310005": True,
    "3782 822463 10005": True,
    "6011111111111117": True,
    "3530111333300000": True,
    "30569309025904": True,
    "4222222222222": True,
    "4111111111111112": False,  # check digit
    "1234567812345670": False,  # valid check digit, no issuer
    "0000000000000000": False,
    "9780306406157": False,  # an ISBN
    "411111111111111": False,  # too short for its issuer
}


@pytest.mark.parametrize(("number", "card"), CARDS.items())
def test_card_numbers(number: str, card: bool) -> None:
    assert is_card(number) == card
    found = find_secrets(f"a\nmy card is {number}, valid\n")
    assert found == ([Secret("", 2, "Card number", 13, 13 + len(number))] if card else [])


def test_numbers_inside_other_strings_are_no_cards() -> None:
    for text in ("id-4111111111111111", "x4111111111111111", "3.4111111111111111", "/4111111111111111/"):
        assert find_secrets(text) == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("AKIA" + "IOSFODNN7EXAMPL3", "AWS Access Key"),
        ("-----BEGIN RSA PRIVATE " + "KEY-----", "Private Key"),
        ("token ghp_" + "a1B2" * 9, "GitHub Token"),
        ("https://me:" + "hunter22@example.com/x", "Basic Auth Credentials"),
        ("key AIza" + "Sy0123456789" * 2 + "abcdefghijk", "Google API Key"),
        ("**Password:** hunter22", "Password"),
        ("wifi password = `correct7horse`", "Password"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzz" + "zzzzzz", "Key or token"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY", "Key or token"),
        ("export DB_PASSWORD=correct-horse-battery-" + "staple9", "Password"),
        ('"clientSecret": "aB3dEfGh1J' + 'kLmN0pQrSt",', "Key or token"),
        ("- **Access key:** aB3dEfGh1J" + "kLmN0pQrSt", "Key or token"),
        ("token: 550e8400-e29b-41d4-" + "a716-446655440000", "Key or token"),
        ("PrivateKey = yAnz5TF+lXXJte14tji3zlMNq+" + "hd2rYUIgJBgB3fBmk=", "Key or token"),
        ("github_token = ghp_" + "a1B2" * 9, "GitHub Token"),  # once, by its more exact name
    ],
)
def test_secrets_are_found_with_their_line(line: str, kind: str) -> None:
    (found,) = find_secrets(text := f"one\ntwo {line}\nthree", "a.md")
    assert (found.path, found.line, found.kind) == ("a.md", 2, kind)
    assert len(text[found.start : found.end]) >= 6
    assert text[found.start : found.end] in line


PERSONAL = {
    "Wifi password is {hunter22}": "Password",
    "the Wi-Fi password is {sunflowers}.": "Password",
    "Password for the router in the hall is {Xy12345!}": "Password",
    "WLAN-Passwort: {sonnenblume}": "Password",
    "tel {0170-4825519} pin 49": "Phone number",
    "tel {1704825519}": "Phone number",
    "{+49 170 4825519}": "Phone number",
    "{+1 (212) 555-0187} at work": "Phone number",
    "call {(555) 123-4567}": "Phone number",
    "or {555-123-4567}, at night": "Phone number",
    "{030/12345678}": "Phone number",
    "{020 7946 0958}": "Phone number",
    "{06 12 34 56 78}": "Phone number",
    "{01704825519}": "Phone number",
    "pin {4917} for the door": "PIN",
    "the door code is {48213}.": "PIN",
    "SSN {123-45-6789}": "Social security number",
    "social security number: {123 45 6789}": "Social security number",
    "IBAN {DE89 3704 0044 0532 0130 00} BIC COBADEFF": "IBAN",
    "{GB82WEST12345698765432}, ours": "IBAN",
    "iban: {de89370400440532013000}": "IBAN",
    "{FR14 2004 1010 0505 0001 3M02 606}": "IBAN",
}


@pytest.mark.parametrize(("marked", "kind"), PERSONAL.items())
def test_personal_numbers_are_found_with_their_span(marked: str, kind: str) -> None:
    line = marked.replace("{", "").replace("}", "")
    start, end = 4 + marked.index("{"), 4 + marked.index("}") - 1
    assert find_secrets(f"one\n{line}\n", "a.md") == [Secret("a.md", 2, kind, start, end)]


def test_two_ibans_in_a_line_are_both_found() -> None:
    line = "from DE89 3704 0044 0532 0130 00 to GB29NWBK60161331926819"
    assert [line[found.start : found.end] for found in find_secrets(line)] == [line[5:32], line[36:]]


def test_a_private_key_ends_with_its_last_line() -> None:
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEow\nAB12\n-----END RSA PRIVATE " + "KEY-----"
    (found,) = find_secrets(f"x\n{key}\ny")
    assert (found.line, found.end) == (2, 2 + len(key))


@pytest.mark.parametrize(
    "line",
    [
        "the secret: love",
        "password reset: tomorrow2",
        "password: see the safe",
        "password: ${PASSWORD1}",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "https://example.com/a/very/long/path/with/1234567890/digits",
        "[[a very long link without any secret in it]]",
        "2024-01-01T12:30:00.000000 1700000000000",
        "token: str",
        'api_key = os.environ["MY_LONG_API_KEY_1"]',
        "token = get_token_v2_from_request(request)",
        "token = accessTokenFromRequest2",
        "token = hashlib.sha256(data).hexdigest()",
        "access_key = settings.aws_s3_access_key2",
        "db_password = settings.database2.password",
        "token == aB3dEfGh1JkLmN0pQrSt",
        "token: https://example.com/oauth2/token/1234567890",
        "https://example.com/?next=1&page_token=aB3dEfGh1JkLmN0pQrSt",
        "tokenizer: meta-llama/Llama-2-7b-hf",
        "secretary: aB3dEfGh1JkLmN0pQrSt",
        "secretName: a1b2c3d4e5f6a7b8c9",
        "secret: sh.helm.release.v1.my-app.v3",
        "secret: /run/secrets/db_password1",
        "api_key: ${{ secrets.MY_API_KEY_1 }}",
        "token: ghp_xxxxxxxxxxxxxxxxxxxx1",
        "token: your-api-token-here-123",
        "token_expires: 2024-01-01T00:00:00Z",
        "max_tokens = 1000000000000000000",
        "secret_owner: someone1@example.com",
        "public key: aB3dEfGh1JkLmN0pQrSt",
        "the wifi password is on the fridge",
        "the password is required",
        "the password is stored in the safe at home",
        "DE88 3704 0044 0532 0130 00",  # check digits
        "XX89 3704 0044 0532 0130 00",
        "DE89 3704 0044 0532 0130",  # too short for its country
        "000-12-3456 and 666-12-3456 and 123-00-4567",
        "ISBN 0-306-40615-2, ISBN 0306406152, ISBN-13: 978-3-16-148410-0, ISSN 0317-8471",
        "2024-01-15 0930-1130, 15.01.2024, 01/02/2024",
        "phone: 2024-01-02 12:00",
        "version 1.2.3.4-20240115, 10.1000/182-123-4567",
        "https://example.com/0170-4825519",
        "192.168.178.21 fe80::1 127.0.0.1:8080",
        "1,234,567.89 and 100 000 000 people, -273.15, 3.14159265358979",
        "@@ -120,7 +120,7 @@ +1000000000",
        "pin 13 of the board, and pin 2 on line 1234",
        "id 550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_prose_hashes_and_links_are_no_secrets(line: str) -> None:
    assert find_secrets(line) == []


def test_near_duplicates_agree_with_all_pairs() -> None:
    draw = random.Random(0)
    texts = [[draw.randrange(1000) for _ in range(draw.randint(30, 200))] for _ in range(60)]
    for i in range(20):  # copies with a few changed words
        copy = list(texts[i])
        for _ in range(i // 5):
            copy[draw.randrange(len(copy))] = -1 - draw.randrange(1000)
        texts.append([word % (1 << 32) for word in copy])
    shingled = [{tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in texts]
    expected = {}
    for a, b in itertools.combinations(range(len(texts)), 2):
        similarity = len(shingled[a] & shingled[b]) / len(shingled[a] | shingled[b])
        if similarity >= 0.7:
            expected[a, b] = similarity
    found = {(a, b): s for a, b, s in near_duplicates([shingle_hashes(text) for text in texts])}
    assert len(expected) >= 15
    assert found == pytest.approx(expected)


def test_short_texts_and_many_copies() -> None:
    assert list(near_duplicates([shingle_hashes([1, 2, 3])] * 2)) == []
    assert len(shingle_hashes(list(range(4)))) == 0
    same = shingle_hashes(list(range(100)))
    pairs = list(near_duplicates([same] * 300))
    assert len(pairs) == 299 and all(similarity == 1.0 for *_, similarity in pairs)
    assert same.dtype == np.uint64


def test_scripts() -> None:
    shares = script_shares(Counter("abcdéДЖλδ你好こカｱ한بא123 !?"))
    numbers = {"Latin": 5, "Cyrillic": 2, "Greek": 2, "Han": 2, "Kana": 3, "Hangul": 1, "Arabic": 1, "Hebrew": 1}
    assert shares == pytest.approx({name: number / 17 for name, number in numbers.items()})
    assert script_shares(Counter("123")) == {}


@pytest.mark.parametrize(
    ("letters", "script"),
    [
        ("aºªﬁ\U0001d431\u2113\uff21", "Latin"),
        ("µλ", "Greek"),
        ("ᐅ", "Canadian Aboriginal"),
        ("𐌀", "Old Italic"),
        ("ﾞー", "Kana"),
    ],
)
def test_variants_count_as_their_letter(letters: str, script: str) -> None:
    assert script_shares(Counter(letters)) == {script: 1.0}


def test_letters_of_no_script_and_symbols_are_not_counted() -> None:
    assert script_shares(Counter("\u02bc\u02c8½№→😀_\u0301")) == {}
    assert script_shares(Counter("a\u02bc")) == {"Latin": 1.0}


def test_check_counts_the_folder(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(80)]
    files = {
        "a.md": " ".join(words),
        "copy.txt": " ".join(words) + "\n",
        "near.md": " ".join(words[:-1]),
        "b.md": "Hello my wörld\npassword: hunter22\n",
        ".trash/old.md": "password: hunter33",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "bad.md").write_bytes(b"caf\xe9")
    (tmp_path / "nul.md").write_bytes(b"some \0 bytes")
    found = check_notes(tmp_path, NotesConfig(formats="text"))
    read = ["a.md", "b.md", "copy.txt", "near.md", "nul.md"]
    assert found.notes == 5
    assert found.bytes == sum((tmp_path / name).stat().st_size for name in read)
    assert found.words == 80 + 80 + 79 + 5 + 2
    assert found.largest[0] == ("copy.txt", (tmp_path / "copy.txt").stat().st_size)
    assert found.duplicates == [["a.md", "copy.txt"]]
    assert [(pair.first, pair.second) for pair in found.near_duplicates] == [("a.md", "near.md")]
    assert found.near_duplicates[0].similarity == pytest.approx(75 / 76, abs=1e-3)
    assert [(secret.path, secret.line, secret.kind) for secret in found.secrets] == [("b.md", 2, "Password")]
    assert [path for path, _ in found.not_text] == ["bad.md", "nul.md"]
    assert {entry.path for entry in found.skipped} == {".trash/", "bad.md"}
    text = json.dumps(found.as_dict())
    assert "hunter" not in text and json.loads(text)["secrets"][0]["kind"] == "Password"


def test_private_notes_that_are_read_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("private: true", encoding="utf-8")
    (tmp_path / "b.md").write_text("---\nprivate: true\n---\nmine", encoding="utf-8")
    for notes in (NotesConfig(), NotesConfig(strip_front_matter=True)):
        found = check_notes(tmp_path, notes)
        assert found.notes == 2 and found.as_dict()["private_notes"] == ["b.md"]
    found = check_notes(tmp_path, NotesConfig(respect_front_matter=True))
    assert found.notes == 1 and found.private_notes == []


def test_an_empty_folder(tmp_path: Path) -> None:
    found = check_notes(tmp_path, NotesConfig())
    assert (found.notes, found.words, found.bytes, found.scripts) == (0, 0, 0, {})
