"""Multiple choice: which option letter a response gives as its answer."""

from __future__ import annotations

import re

from gvm_stream.config import VerifierSection
from gvm_stream.verify.answers import NO_MARKER, UnreadableGold, answer_text
from gvm_stream.verify.math.boxes import boxed_answers
from gvm_stream.verify.math.response import clean
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerifyItem

_WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|textit)\s*\{([^{}]*)\}")
_LETTER = r"[(\[]?(?P<letter>[A-Za-z])(?:[)\]]|(?![\w'\N{RIGHT SINGLE QUOTATION MARK}+-]))"
_ALONE = re.compile(rf"{_LETTER}[.:)]?")
_OPTION = re.compile(
    r"(?:\((?P<round>[A-Za-z])\)|\[(?P<square>[A-Za-z])\]|(?P<plain>[A-Za-z])[.:)])(?:\s.*)?", re.DOTALL
)
_STATEMENT = re.compile(
    r"""(?<!not\ )(?<!n't\ )(?<!never\ )
        (?: \b(?:answer|option|choice) (?:\ is:?|\ should\ be|\ must\ be|\ would\ be|\s*[:=])
          | \b(?:choose|choosing|pick|select|go\ with|going\ with)
        ) \s* (?:(?:probably|likely|clearly|definitely|indeed|therefore|thus)\ )? (?:the\ )?
        (?:(?:correct\ |right\ |best\ )?(?:option|choice|answer|letter)[:\ ]\s*)?"""
    + _LETTER,
    re.VERBOSE | re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(
    rf"(?:\b(?:option|choice|answer)\s+|^){_LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b",
    re.IGNORECASE | re.MULTILINE,
)
_CONCLUSION = re.compile(
    rf"\b(?:[Tt]herefore|[Hh]ence|[Tt]hus|[Ss]o|[Ii]t is|[Ii]t's|[Ii]t must be),?\s+(?=[A-Z(\[]){_LETTER}\.?\s*$"
)
_ANOTHER = re.compile(
    rf"[.)\]]?\s*(?:,?\s*\b(?:or|and)\b|[/&,])\s*(?:option\s+|also\s+|maybe\s+)?(?-i:{_LETTER})(?!\s+[a-z])",
    re.IGNORECASE,
)
_WORD_AFTER = re.compile(r"\s+(?!(?:because|since|as|is|and|or|not|but|for|due|with)\b)[a-z]")
_BRACKETED = re.compile(r"(?<!\w)\(([A-Z])\)")


def choice(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The option letter in the last box, else in the last sentence that states an answer, else standing alone."""
    right = read_choice_gold(item.answer)
    answer = answer_text(item.response, settings.answer_marker)
    if answer is None:
        return NO_MARKER
    letter, rule = find_choice(answer)
    return VerdictScored(float(letter == right), letter, right, rule)


def read_choice_gold(gold: str) -> str:
    """The letter of `B`, `(B)`, `B.`, `B) text` or `\\boxed{B}`, as a capital."""
    letter = _letter_of(_plain(gold))
    if not letter:
        raise UnreadableGold(f"{gold[:60]!r} names no option letter")
    return letter


def find_choice(answer: str) -> tuple[str, str]:
    """(option letter or nothing, the rule that found it or why there is none)."""
    boxes = boxed_answers(answer)
    if boxes or boxes is None:
        letter = _letter_of(_plain(boxes[-1].answer)) if boxes else ""
        return letter, "letter in the last box" if letter else "no option letter in the last box"
    text = _plain(answer)
    if _ALONE.fullmatch(text):
        return _letter_of(text), "the answer is an option"
    statements = sorted(
        (*_stated(text), *_CALLED_RIGHT.finditer(text), *_CONCLUSION.finditer(text)),
        key=lambda match: match.start("letter"),
    )
    if statements:
        last = statements[-1]
        if _names_another(text, last):
            return "", "several options"
        return last["letter"].upper(), "stated answer"
    last_line = text.rpartition("\n")[2].strip()
    if _ALONE.fullmatch(last_line):
        return _letter_of(last_line), "letter alone in the last line"
    letters = _letters_of_lines(text) or dict.fromkeys(_BRACKETED.findall(last_line))
    if len(letters) == 1:
        return next(iter(letters)), "the only option named"
    return "", "several options" if letters else "no option letter"


def _plain(text: str) -> str:
    """Without the marks that only set a letter off."""
    text = clean(text)
    while (unwrapped := _WRAPPING.sub(r"\1", text)) != text:
        text = unwrapped
    boxes = boxed_answers(text)
    if boxes and boxes[-1].start == 0:
        text = boxes[-1].answer
    return re.sub(r"[*$`\"]|\\[()]", "", text).strip()


def _letter_of(text: str) -> str:
    """The letter of a text that is one option: `B`, `(B)`, `B) with its text`."""
    if match := _ALONE.fullmatch(text):
        return match["letter"].upper()
    if (match := _OPTION.fullmatch(text)) and (letter := match["round"] or match["square"] or match["plain"]):
        return letter.upper()
    return ""


def _letters_of_lines(text: str) -> dict[str, None]:
    """Letters of the lines that are options, in their order."""
    return dict.fromkeys(letter for line in text.splitlines() if (letter := _letter_of(line.strip())))


def _stated(text: str) -> list[re.Match[str]]:
    """Statements of an answer. A letter that could be a word, such as `a`, counts where it cannot be one: in brackets
    or at the end of a sentence, and as a capital before anything but the noun or verb it would belong to."""
    found = []
    for match in _STATEMENT.finditer(text):
        bracketed = text[match.end() - 1] in ")]"
        if match["letter"].isupper():
            is_letter = match["letter"] not in "AI" or not _WORD_AFTER.match(text, match.end())
        else:
            is_letter = text[match.end() : match.end() + 1] in ("", ".", ",", "\n")
        if bracketed or is_letter:
            found.append(match)
    return found


def _names_another(text: str, match: re.Match[str]) -> bool:
    other = _ANOTHER.match(text, match.end())
    return other is not None and other["letter"].isupper() and other["letter"] != match["letter"].upper()
