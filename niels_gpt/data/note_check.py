"""What a folder of notes holds before anything is trained on it: sizes, scripts, duplicates, secrets."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import shlex
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.config import NotesConfig
from niels_gpt.data.note_selection import Skipped, is_private, note_text, select_notes
from niels_gpt.data.reading.utf8 import NOT_UTF8
from niels_gpt.system.rng import mix

NEAR = 0.7
"""Smallest similarity of near-duplicates: the Jaccard index of their sets of five consecutive words."""
SHINGLE = 5
FEWEST_SHINGLES = 8
"""Notes with fewer different sequences of five words are not compared: daily notes are alike by chance."""
BANDS, ROWS = 16, 4
"""Two notes are compared if one band of their MinHashes agrees: 99 % of the pairs with similarity 0.7."""
DOMINANT = 0.5
"""Share of all text above which one note is reported."""
MOST_PAIRS = 50
"""In a larger bucket all notes are compared only with its first: a template filled in a thousand times."""


class Secret(NamedTuple):
    """A string that should not be learned; the string itself is not stored."""

    path: str
    line: int
    kind: str
    start: int
    """Offset of its first character in the text of the note, as `note_text` returns it."""
    end: int


class NearDuplicates(NamedTuple):
    """Two notes with almost the same text."""

    first: str
    second: str
    similarity: float


@dataclass(frozen=True)
class NoteCheck:
    """The result of `check_notes`; paths are relative to the folder."""

    folder: str
    notes: int
    words: int
    bytes: int
    largest: list[tuple[str, int]]
    """The largest notes and their sizes in bytes."""
    dominant: str
    """What to say of a note that is more than half of all text; empty: there is none."""
    scripts: dict[str, float]
    """Script -> share of the letters, the largest first."""
    skipped: list[Skipped]
    summary: str
    """What is read and skipped, in one or two lines."""
    not_text: list[tuple[str, str]]
    """Files that are not text, with the reason."""
    duplicates: list[list[str]]
    """Groups of notes with the same text."""
    near_duplicates: list[NearDuplicates]
    secrets: list[Secret]
    private_notes: list[str]
    """Notes that are read although their front matter says `private: true` or `publish: false`."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("skipped", "near_duplicates", "secrets"):
            plain[name] = [entry._asdict() for entry in plain[name]]
        plain["largest"] = [{"path": path, "bytes": size} for path, size in self.largest]
        plain["not_text"] = [{"path": path, "reason": reason} for path, reason in self.not_text]
        return plain


def check_notes(
    folder: str | Path, notes: NotesConfig, *, on_note: Callable[[int, int], None] = lambda done, total: None
) -> NoteCheck:
    """Read the notes of a folder and report what is in them; files that are not utf-8 are listed, not read.

    on_note: called with (notes done, number of notes). Raises as `select_notes` does.
    """
    selected = select_notes(folder, notes, errors="skip")
    names = selected.names()
    sizes: list[int] = []
    words = 0
    characters: Counter[str] = Counter()
    by_content: dict[bytes, list[int]] = {}
    shingles: list[np.ndarray] = []
    secrets: list[Secret] = []
    private: list[str] = []
    not_text = [(entry.path, entry.reason) for entry in selected.skipped if entry.kind == NOT_UTF8]
    for i, (name, path) in enumerate(zip(names, selected.paths, strict=True)):
        data = Path(path).read_bytes()
        original = data.decode("utf-8", errors="replace")
        text = note_text(original, notes)
        found = word_hashes(text)
        sizes.append(len(data))
        words += len(found)
        characters.update(text)
        by_content.setdefault(hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest(), []).append(i)
        shingles.append(shingle_hashes(found))
        if "\0" in text:
            not_text.append((name, f"binary: NUL at character {text.index(chr(0))}"))
        if is_private(original) is not None:
            private.append(name)
        secrets += find_secrets(text, name)
        on_note(i + 1, len(names))
    groups = [[names[i] for i in same] for same in by_content.values() if len(same) > 1]
    distinct = [same[0] for same in by_content.values()]
    near = [
        NearDuplicates(names[distinct[a]], names[distinct[b]], round(similarity, 3))
        for a, b, similarity in near_duplicates([shingles[i] for i in distinct])
    ]
    order = sorted(range(len(names)), key=lambda i: (-sizes[i], names[i]))
    return NoteCheck(
        folder=str(selected.root),
        notes=len(names),
        words=words,
        bytes=sum(sizes),
        largest=[(names[i], sizes[i]) for i in order[:5]],
        dominant=dominant_note(names, sizes),
        scripts=script_shares(characters),
        skipped=selected.skipped,
        summary=selected.summary(),
        not_text=sorted(not_text),
        duplicates=groups,
        near_duplicates=sorted(near, key=lambda pair: (-pair.similarity, pair.first, pair.second)),
        secrets=secrets,
        private_notes=private,
    )


def dominant_note(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return a line about the note that is more than half of all text: the model will write like it; "" if none is."""
    total, largest = sum(sizes), max(sizes, default=0)
    if len(sizes) < 2 or largest <= DOMINANT * total:
        return ""
    name = names[sizes.index(largest)]
    return (
        f"{name} is {largest / total:.0%} of all text, so the model will be mostly of it: split it, or leave it out "
        f"with --exclude {shlex.quote(name)}"
    )


# --- scripts -----------------------------------------------------------------------------------------

_SCRIPTS = {
    "ANATOLIAN": "Anatolian Hieroglyphs",
    "CANADIAN": "Canadian Aboriginal",
    "CJK": "Han",
    "EGYPTIAN": "Egyptian Hieroglyphs",
    "HALFWIDTH": "Kana",
    "HENTAIGANA": "Kana",
    "HIRAGANA": "Kana",
    "IDEOGRAPHIC": "Han",
    "KATAKANA": "Kana",
    "NKO": "N'Ko",
    "ROMAN": "Latin",
    "TURNED": "Latin",
}
"""First word of a Unicode name -> script, where they differ."""
_LONG_NAMES = re.compile(
    r"""(?:BASSA|CAUCASIAN|DIVES|GUNJALA|HANIFI|IMPERIAL|INSCRIPTIONAL|KAYAH|LINEAR|MASARAM|MEETEI|MENDE|MEROITIC|OL
        |PAHAWH|PSALTER|SORA|SYLOTI|TAI|WARANG|ZANABAZAR)[ ]\w+
      | OLD[ ](?:NORTH[ ]|SOUTH[ ])?\w+ | NEW[ ]TAI[ ]LUE | PAU[ ]CIN[ ]HAU | NYIAKENG[ ]PUACHUE[ ]HMONG
      | KHITAN[ ]SMALL[ ]SCRIPT | PHAGS-PA | CYPRO-MINOAN""",
    re.VERBOSE,
)
"""Scripts whose names have more than one word."""
_NO_SCRIPT = ("CARON", "MASU", "MODIFIER", "VEDIC", "VERTICAL")
"""First words of letters that several scripts share."""


def script_shares(characters: Counter[str]) -> dict[str, float]:
    """Return {script: share of the letters}, the largest first; letters without a script are not counted."""
    scripts: Counter[str] = Counter()
    for character, number in characters.items():
        script = _script(character)
        if script is not None:
            scripts[script] += number
    total = scripts.total()
    return {name: number / total for name, number in scripts.most_common()}


@functools.cache
def _script(character: str) -> str | None:
    """The script of a letter, from its Unicode name (LATIN SMALL LETTER A); None: not a letter, or of no script.

    Variants count as their plain letter: º, ﬁ and 𝐱 are Latin, µ is Greek.
    """
    if not character.isalpha():
        return None
    plain = next(filter(str.isalpha, unicodedata.normalize("NFKC", character)), character)
    name = unicodedata.name(plain, "")
    long_name = _LONG_NAMES.match(name)
    if long_name:
        return long_name[0].title()
    first = re.split("[ -]", name, maxsplit=1)[0]
    return None if not first or first in _NO_SCRIPT else _SCRIPTS.get(first, first.capitalize())


# --- duplicates --------------------------------------------------------------------------------------

_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|\w+")
"""A word; of scripts without spaces, a character."""
_POWERS = np.array([pow(0x9E3779B97F4A7C15, k + 1, 1 << 64) for k in range(SHINGLE)], dtype=np.uint64)


@functools.lru_cache(maxsize=1 << 20)
def _word_id(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass"))


def word_hashes(text: str) -> list[int]:
    """Return the hashes of the words of a text, in lower case."""
    return list(map(_word_id, _WORD.findall(text.lower())))


def shingle_hashes(words: Sequence[int]) -> np.ndarray:
    """Return the sorted distinct hashes of all sequences of five words, given as hashes."""
    ids = np.array(words, dtype=np.uint64)
    number = len(ids) - SHINGLE + 1
    if number <= 0:
        return np.empty(0, dtype=np.uint64)
    mixed = np.zeros(number, dtype=np.uint64)
    for k in range(SHINGLE):
        mixed = (mixed ^ (ids[k : k + number] + np.uint64(k)) * _POWERS[k]) * _POWERS[0]
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def near_duplicates(shingles: Sequence[np.ndarray]) -> Iterator[tuple[int, int, float]]:
    """Yield (i, j, similarity) of the pairs of notes that are at least `NEAR` alike, found by MinHash.

    Similarities are exact; which pairs are compared is not (see `BANDS`).
    """
    factors, offsets = mix(np.arange(2 * BANDS * ROWS)).reshape(2, -1)
    factors |= np.uint64(1)
    buckets: dict[tuple[int, bytes], list[int]] = {}
    for i, hashes in enumerate(shingles):
        if len(hashes) >= FEWEST_SHINGLES:
            smallest = _min_hashes(hashes, factors, offsets).reshape(BANDS, ROWS)
            for band in range(BANDS):
                buckets.setdefault((band, smallest[band].tobytes()), []).append(i)
    compared: set[tuple[int, int]] = set()
    for members in buckets.values():
        for a, b in _pairs(members):
            if (a, b) not in compared:
                compared.add((a, b))
                both = len(np.intersect1d(shingles[a], shingles[b], assume_unique=True))
                similarity = both / (len(shingles[a]) + len(shingles[b]) - both)
                if similarity >= NEAR:
                    yield a, b, similarity


def _min_hashes(hashes: np.ndarray, factors: np.ndarray, offsets: np.ndarray, chunk: int = 4096) -> np.ndarray:
    """The smallest of all hashes under each of the hash functions x -> (x * factor + offset) >> 16."""
    smallest = np.full(len(factors), np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(hashes), chunk):
        mixed = (hashes[None, start : start + chunk] * factors[:, None] + offsets[:, None]) >> np.uint64(16)
        smallest = np.minimum(smallest, mixed.min(axis=1))
    return smallest


def _pairs(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    firsts = len(members) if len(members) <= MOST_PAIRS else 1
    return ((members[a], members[b]) for a in range(firsts) for b in range(a + 1, len(members)))


# --- secrets -----------------------------------------------------------------------------------------

_NOISY = ("Base64 High Entropy String", "Hex High Entropy String", "Public IP (ipv4)", "Secret Keyword")
"""Detectors that take hashes, addresses and prose for secrets."""
_MORE = {
    "Google API Key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}"),
    "GitHub Token": re.compile(r"\bgithub_pat_[0-9A-Za-z_]{50,}"),
    "OpenAI Token": re.compile(r"\bsk-(?:proj|svcacct)-[0-9A-Za-z_-]{40,}"),
    "Anthropic Token": re.compile(r"\bsk-ant-[0-9A-Za-z_-]{40,}"),
}
"""Tokens that detect-secrets 1.5 does not know."""
_PASSWORD = re.compile(
    r"""\b(?P<wifi>(?:wi-?fi|wlan|network|router|hotspot|guest)[ \t-]+)?
        (?:password|passwort|kennwort|passwd|passphrase|passcode|pwd|pw
          |api[ _-]?key|secret[ _-]?key|access[ _-]?token)\b
        (?:[ \t]+(?:for|of|to|at|on|für|von|vom|zum)[ \t][^\n:=.,;]{1,40}?)?
        ["'`*_]*[ \t]*(?:[:=]|\b(?:is|was|ist|war|lautet)\b[ \t]*:?)["'`*_ \t]*(?P<value>[^\s"'`<>\[\](){}]{6,})""",
    re.IGNORECASE | re.VERBOSE,
)
_PIN = re.compile(
    r"""\b(?:pin(?:[ -]?(?:code|number|nummer))?|passcode|(?:door|gate|alarm|safe|lock|entry|unlock)[ -]code)\b
        ["'`*]*[ \t]*(?:[:=]|is\b|ist\b)?["'`* \t]*(?P<value>\d{4,8})(?![\w/-]|[.,]\d)""",
    re.IGNORECASE | re.VERBOSE,
)
_ASSIGNED = re.compile(
    r"""(?P<name>(?i:secret(?:[ _-]?(?:access[ _-]?)?key)?|token|password|passwd|(?:api|access|private)[ _-]?key)
          s?(?![a-z])[\w-]{0,40})
        ["'`*]*[ \t]*(?::=|=>|[:=])["'`* \t]*
        (?P<value>[\w+/!@$%^*.~-][\w+/!@#$%^&*=.~?-]{15,}+)(?=["'`,;)}|\s\\]|\Z)""",
    re.VERBOSE | re.ASCII,
)
"""Any name with one of these words, and a value of 16 characters: `aws_secret_access_key = ...`."""
_ABOUT_A_SECRET = re.compile(
    r"(?:name|file|path|dir|folder|url|uri|arn|ref|type|endpoint|version|model)s?", re.IGNORECASE
)
"""Last words of names whose value is not the secret itself: `secretName`, `token_url`."""
_WORDS = re.compile(
    r"(?:(?:[A-Z]?[a-z]+(?:[A-Z][a-z]+)*|[A-Z]+)\d{0,3}|\d{1,4}[a-zA-Z]?)"
    r"(?:[._/@=-]+(?:(?:[A-Z]?[a-z]+(?:[A-Z][a-z]+)*|[A-Z]+)\d{0,3}|\d{1,4}[a-zA-Z]?|\Z))+"
    r"|[a-z]+(?:[A-Z][a-z]+)+\d{0,3}"
)
"""Words joined to an identifier, a path or a model's name: `self.oauth2_client`, `meta-llama/Llama-2-7b-hf`."""
SHORTEST_WPA = 8
"""Characters of the shortest password of a Wi-Fi network."""
_KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
_MASKED = re.compile(r"[xX]{4,}|\*{3,}|\.{3,}")
_CARD = re.compile(
    r"(?<![\w.,/+-])(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?![\w/-])"
)
_ISSUERS = re.compile(
    r"""4(?:\d{12}|\d{15}|\d{18})                                               # Visa
      | 5[1-5]\d{14} | 2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}        # Mastercard
      | 3[47]\d{13}                                                             # American Express
      | 3(?:0[0-5]|[689]\d)\d{11}                                               # Diners Club
      | 6(?:011|5\d\d|4[4-9]\d)\d{12,15}                                        # Discover
      | 35(?:2[89]|[3-8]\d)\d{12,15}                                            # JCB
      | 62\d{14,17}                                                             # UnionPay""",
    re.VERBOSE,
)


_IBAN = re.compile(r"(?<![^\W_])(?=([A-Z]{2}\d\d(?:[ -]?[A-Z\d]){11,30}))", re.IGNORECASE)
_IBAN_LENGTHS = {
    country: int(length)
    for country, length in re.findall(
        r"(\D\D)(\d\d)",
        "AD24AE23AL28AT20AZ28BA20BE16BG22BH22BI27BR29BY28CH21CR22CY28CZ24DE22DJ27DK18DO28EE20EG29ES24FI18FK18FO18FR27"
        "GB22GE22GI23GL18GR27GT28HR21HU28IE22IL23IQ23IS26IT27JO30KW30KZ20LB28LC32LI21LT20LU20LV21LY25MC27MD24ME22MK19"
        "MN20MR27MT31MU30NI28NL18NO15OM23PK24PL28PS29PT25QA29RO24RS22RU33SA24SC31SD18SE24SI19SK24SM27SO23ST25SV28TL23"
        "TN24TR26UA29VA22VG24XK20YE30",
    )
}
"""Characters of an IBAN by country (SWIFT's registry)."""
_SSN = re.compile(
    r"(?<![\w./-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\w-]|[./]\d)"
    r"|(?i:\b(?:ssn|social security(?: (?:number|no\.?))?)\b[^\w\n]{0,4}(?:is )?)"
    r"(?P<value>(?!000|666|9)\d{3}[ -]?(?!00)\d\d[ -]?(?!0000)\d{4})(?![\w-])"
)
_PHONE = re.compile(
    r"""(?<![\w.+/=@-])(?<!\d[ ])(?:
          (?:\+|00(?=[1-9]))(?:1[ .-]?(?=\(?[2-9])|[2-9])                    # +49 170 4825519, 0049 ...
            (?:[ ./-]?\(?\d\)?){7,13}
        | (?:1[ .-])?(?:\([2-9]\d\d\)[ ]?|[2-9]\d\d(?P<us>[.-]))\d{3}(?(us)(?P=us)|[.-])\d{4}  # (555) 123-4567
        | \(?0[1-9]\d{1,4}\)?[ ]?[/-][ ]?\d{3,8}(?:[ -]?\d{2,4}){0,2}      # 0170-4825519, 030/12345678
        | 0[1-9](?:(?P<fr>[ .])\d\d)(?:(?P=fr)\d\d){3}                       # 06 12 34 56 78
        | 0[1-9]\d{1,4}[ ]\d{3,4}[ ]?\d{3,5} | 0[1-9]\d{8,10}                # 020 7946 0958, 01704825519
        )(?![\w/=-]|[.,:]\d)
      | \b(?:tele(?:phone|fon)|tel|phone|mobile?|handy|cell|fax|whatsapp|sms)\b[^\n\d+(]{0,12}
        (?P<value>\+?\(?\d(?:[ ()./-]{0,2}\d){6,14})(?![\w/=-]|[.,:]\d)""",
    re.IGNORECASE | re.VERBOSE,
)
"""A number with a country code, in one of the usual forms, or after a word such as `tel`."""
_IS_BOOK = re.compile(r"\b(?:ISBN|ISSN|OCLC|LCCN|DOI|PMID|arXiv)(?:-1[03])?\W{0,4}\Z", re.IGNORECASE)
"""What stands before the number of a book or an article."""
_DATE = re.compile(r"(?:19|20)\d\d[ ./-]\d\d?[ ./-]\d\d?|\d\d?[./-]\d\d?[./-](?:19|20)\d\d")


def find_secrets(text: str, path: str = "") -> list[Secret]:
    """Return the keys, tokens, private keys, passwords, PINs, card and phone numbers, IBANs and SSNs in a text.

    Sorted by their offsets; of two that overlap, only the one of the more exact kind. path: that of the note.
    """
    found: list[tuple[int, int, str]] = []
    taken = bytearray(len(text))
    for start, end, kind in _candidates(text):
        if not any(taken[start:end]):
            taken[start:end] = b"\1" * (end - start)
            found.append((start, end, kind))
    secrets, line, counted = [], 1, 0
    for start, end, kind in sorted(found):
        line, counted = line + text.count("\n", counted, start), start
        secrets.append(Secret(path, line, kind, start, end))
    return secrets


def _candidates(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, kind) of what may be secrets: the most exact kinds first."""
    lines = list(_lines_with(_CANDIDATE, text))
    for start, line in lines:
        for kind, detector in _detectors():
            for value in detector.analyze_string(line):
                found = re.search(rf"[\w-]*{re.escape(value)}[\w-]*", line)  # `value` may be a part: ghp of ghp_a1B2
                begin, end = (start + offset for offset in (found.span() if found else (0, len(line))))
                yield begin, _key_end(text, end) if kind == "Private Key" else end, kind
        for kind, pattern in _MORE.items():
            yield from ((start + match.start(), start + match.end(), kind) for match in pattern.finditer(line))
    for match in _PASSWORD.finditer(text):
        value = match["value"].rstrip(".,;:")
        if _is_password(value) or (match["wifi"] and len(value) >= SHORTEST_WPA and _ends_line(text, match.end())):
            yield match.start("value"), match.start("value") + len(value), "Password"
    for start, line in lines:
        yield from ((start + begin, start + end, kind) for begin, end, kind in _assigned_secrets(line))
    for start, line in _lines_with(_DIGITS, text):
        for match in _IBAN.finditer(line):
            if end := _iban_end(match[1]):
                yield start + match.start(), start + match.start() + end, "IBAN"
        for kind, pattern, accepted in _NUMBERS:
            for match in pattern.finditer(line):
                group = "value" if "value" in pattern.groupindex and match["value"] else 0
                if accepted(match[group]) and not _IS_BOOK.search(line, max(0, match.start() - 12), match.start()):
                    yield start + match.start(group), start + match.end(group), kind


def _key_end(text: str, start: int) -> int:
    """The end of a private key whose first line ends at `start`: that of its last line, if it has one."""
    end = _KEY_END.search(text, start)
    return end.end() if end else start


def _is_password(value: str) -> bool:
    """Whether the word after `password:` is one: it has letters and digits, and is no link, path or variable."""
    has_both = any(c.isalpha() for c in value) and any(c.isdigit() for c in value)
    return has_both and not value.startswith(("$", "%", "http:", "https:", "/", "~")) and len(set(value)) > 3


def _ends_line(text: str, offset: int) -> bool:
    """Whether only punctuation is left of the line: `Wifi password is sunflowers`, but no sentence about one."""
    return not text[offset:].partition("\n")[0].strip(" \t\r.,;!)*`\"'")


def _assigned_secrets(line: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, kind) of the secrets that a line assigns to a name: `db_password: ...`."""
    lower = line.lower()
    if not any(word in lower for word in ("secret", "token", "passw", "key")):  # faster than the pattern
        return
    for match in _ASSIGNED.finditer(line):
        name, value = match["name"], match["value"]
        is_password = name.lower().startswith("passw")
        before = line[max(0, match.start() - 200) : match.start()].split(" ")[-1]
        if "://" in before or "?" in before or "&" in before:
            continue  # part of a URL
        last_word = re.split(r"[_-]|(?<=[a-z])(?=[A-Z])", name)[-1]
        if _ABOUT_A_SECRET.fullmatch(last_word) or not _is_password(value) or value.startswith("."):
            continue
        may_be_words = is_password and not re.search("[._/@]", value)  # correct-horse-battery-staple9
        if len(_MASKED.sub("", value)) >= 16 and (may_be_words or not _WORDS.fullmatch(value)):
            yield *match.span("value"), "Password" if is_password else "Key or token"


def _iban_end(text: str) -> int:
    """The length of the IBAN that a text begins with; 0: it is none. Its check digits are those of ISO 7064."""
    ends = [i + 1 for i, character in enumerate(text) if character not in " -"]
    length = _IBAN_LENGTHS.get(text[:2].upper(), 0)
    if not length or len(ends) < length:
        return 0
    end = ends[length - 1]
    characters = re.sub(r"[ -]", "", text[:end])
    number = int("".join(str(int(character, 36)) for character in characters[4:] + characters[:4]))
    return end if number % 97 == 1 and not text[end : end + 1].isalnum() else 0


def _is_phone(number: str) -> bool:
    """Whether a match of `_PHONE` has as many digits as phone numbers have, and is no date."""
    digits = re.sub(r"\D", "", number)
    least = 9 if number.startswith("0") else 7  # 0930-1130 are times
    return least <= len(digits) <= 15 and len(set(digits)) > 3 and not _DATE.match(number)


def is_card(number: str) -> bool:
    """Whether a number is that of a payment card: 13 to 19 digits, a known issuer, and a valid check digit (Luhn)."""
    digits = re.sub(r"[ -]", "", number)
    if not _ISSUERS.fullmatch(digits) or len(set(digits)) < 2:
        return False
    values = [int(digit) for digit in reversed(digits)]
    return sum(values[0::2], sum(sum(divmod(2 * value, 10)) for value in values[1::2])) % 10 == 0


def _lines_with(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """(offset, line) of the lines with a match: all others are not worth forty patterns."""
    end = -1
    for match in pattern.finditer(text):
        if match.start() > end:
            start = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.start())
            end = len(text) if end < 0 else end
            yield start, text[start:end]


_CANDIDATE = re.compile(r"[!-~]{16,}|PRIVATE KEY")
"""Sixteen printable ASCII characters without a space, or the first line of a private key."""
_DIGITS = re.compile(r"\d(?:[ ()./-]{0,3}\d){3}")
_NUMBERS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("Card number", _CARD, is_card),
    ("Social security number", _SSN, bool),
    ("PIN", _PIN, bool),
    ("Phone number", _PHONE, _is_phone),
)
"""(kind, pattern, whether a match is one); the group `value`, if it matched, is without the word before."""


@functools.cache
def _detectors() -> list[tuple[str, Any]]:
    """(kind, detector of detect-secrets)."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    classes: dict[str, Any] = get_mapping_from_secret_type_to_class()
    return [(kind, cls()) for kind, cls in classes.items() if kind not in _NOISY]
