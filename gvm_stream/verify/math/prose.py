"""Answers in sentences: "The answer is ...", "#### ...", "Answer: ..." and, failing those, the closing sentence."""

from __future__ import annotations

import re

from gvm_stream.verify.math.boxes import Given, has_unit

LONGEST_CLAUSE = 600
LONGEST_CLOSING = 1000
MOST_CUES = 32
"""Of the statements of an answer only so many, the last ones, are read."""

_TO_ITS_VERB = r"[^.\n:=!?$\\]{0,60}?"
_ENGLISH = rf"""\b(?: final\s+(?:answer|result|value|solution) | answers? | ans | solutions? )\b
    (?: {_TO_ITS_VERB} (?: \b(?:is|are|equals?|was|(?:would|should|must|will)\s+be)\b | [:=] | -> ) | [ \t\#*_]*\n )"""
_EUROPEAN = rf"""\b(?:respuesta|resposta|risposta|r\u00e9ponse|antwort|wynik)\b
    {_TO_ITS_VERB} (?: \b(?:es|est|ist|lautet)\b | (?<!\w)[\u00e9\u00e8](?!\w) | [:=] )"""
_SLAVIC = r"(?:\u043e\u0442\u0432\u0435\u0442|\u0432\u0456\u0434\u043f\u043e\u0432\u0456\u0434\u044c)\s*[:=\u2014-]"
_CHINESE = r"(?:\u7b54\u6848|\u7b54)\s*(?:\u662f|\u4e3a|\u70ba|[:=])"
_JAPANESE = r"\u7b54\u3048\s*(?:\u306f|:)"
_KOREAN = r"(?:\uc815\ub2f5|\ub2f5)(?:\uc740|\s*:)"
_GSM8K = r"^\#{4}(?!\#)(?=[ \t]*[-+]?[$\\]?[-+]?[.\d\\({])"  # and no heading of level four
CUE = re.compile(
    rf"""(?: {_ENGLISH} | {_EUROPEAN} | {_SLAVIC} | {_CHINESE} | {_JAPANESE} | {_KOREAN} | {_GSM8K} )
        (?: [\s:]* \b(?:thus|therefore|then|simply|just|indeed|exactly|about|approximately|roughly|probably|likely
                       |given\s+by|equal\s+to|as\s+follows|option|choice)\b )* [ \t:=*_]*""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
"""What announces an answer, in English, Spanish, French, German, Portuguese, Italian, Polish, Russian, Ukrainian,
Chinese, Japanese and Korean; and the `####` of GSM8K."""

_PIECE = re.compile(
    r"""(?P<formula> \$\$[^$]{1,600}\$\$ | (?<!\\)\$(?=\S)(?:[^$\n\\]|\\.){1,600}(?<=\S)\$(?!\d) | \$\ [^$\n]{1,600}\ \$
                   | \\\((?:[^\\]|\\(?!\))){1,600}\\\) | \\\[(?:[^\\]|\\(?!\])){1,600}\\\] )
      | (?P<stop> [.?](?=["')\]*_`]*(?:\s|$)) | !+(?=["')\]*_`.]*(?:\s+(?![=<>+*/^-])|$)) | \n | \N{EM DASH} )
      | (?P<reason> ,?\s(?: because|since|which|where|as(?!\s+well)|so|after|hence|therefore|thus
                          | due\ to|for\s+(?:all|any|each|every) )\b )""",
    re.VERBOSE,
)
"""A formula in delimiters (no stop in it ends a sentence; a dollar before a sum of money opens none), the end of a
sentence, or the beginning of an explanation. An exclamation mark that ends a sentence is no factorial."""

_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_NAMED = re.compile(r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_MATHEMATICAL_WORD = re.compile(
    r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|inf(?:inity)?|mod|gcd|lcm|max|min|and|or|percent|times"
    r"|plus|minus|over|choose|factorial|squared|cubed|degrees?|[mb]illion|thousand|hundred|dozen",
    re.IGNORECASE,
)
_WORD_OF_TWO_LETTERS = re.compile(
    r"is|of|to|in|we|it|as|at|by|be|he|an|on|so|if|do|no|my|us|am|me|up|go", re.IGNORECASE
)
_UNCERTAIN = re.compile(
    r"\b(?:or|any|maybe|perhaps|possibly|either|unless|not|neither|another|other|guess|might|could|except)\b",
    re.IGNORECASE,
)
_DOUBT = re.compile(r"\b(?:not|cannot|never|maybe|perhaps|possibly|might|could)\b|n't\b", re.IGNORECASE)
_COUNTED = re.compile(
    r"(?P<value>.*(?:[\d)}\]]|\\[A-Za-z]+))\s+(?P<noun>(?:[A-Za-z]{3,}|of)(?:[ -][a-z]{2,}){0,3})", re.DOTALL
)
_COPULA = re.compile(
    r"""\b(?: is|are|was|were|be|equals?|equal\ to|gives?|yields?|gets?|have|has|had|makes?|obtains?|finds?|needs?
            | costs?|takes?|pays?|earns?|spends?|saves?|leaves?|receives?|contains?|remains?
            | concludes?|follows|implies|means )\b (?:\s+that\b)? \s*[:=]?\s*
      | (?<=[A-Za-z]{3})(?:\s*=|:(?=\s))\s*""",
    re.VERBOSE | re.IGNORECASE,
)
"""What stands between what is asked for and its value; an equals sign only after words."""
_STATES = re.compile(r"is|are|equal|.*[=:]", re.IGNORECASE)
"""Those of them that state a value even if the sentence breaks off; "she has 5" may go on."""
_CONCLUSION = re.compile(
    r"^\s*(?:(?:so|thus|therefore|hence|then|finally|consequently|and|\\therefore|\N{THEREFORE})\b[,:]?\s*)+",
    re.IGNORECASE,
)
_SUPPOSITION = re.compile(
    r"\s*(?:\W*(?:so|now|then|but|and|first|next|wait|hmm|ok|okay)\b[,:]?\s*)*"
    r"(?:suppose|let|assume|if|consider|try|when|say|maybe|perhaps|given|recall|note|check|the case)\b",
    re.IGNORECASE,
)
_EXPLANATION = re.compile(r",?\s(?:which|because|since|as)\b.*", re.DOTALL)
_COURTESY = re.compile(
    r"(?:(?:we|we're|i|i'm|and|that|that's|this|is|are|am)\s+)*(?:done|q\.?e\.?d|hope|let me know|good luck|the end)\b",
    re.IGNORECASE,
)
_END_MARK = re.compile(r"(?:\s*(?:\\(?:square|blacksquare|checkmark|qed)\b|[\u2713\u2714\u2705\u220e\u25a1\u25a0]))+$")
_BEFORE = re.compile(r"\s+(?:(?<=\n)[-*+\u2022]\s+)?")
"""Blanks before an answer, and the bullet of a list on its own line."""
_ASIDE = re.compile(r"\s+\([^()\d]*\)?$")
_AROUND = " \t\n\"'`*_;,:"
_POLITE_ENDING = re.compile(
    r"\s*(?:\u3067\u3059|\u3067\u3042\u308b|\u3060|\uc785\ub2c8\ub2e4|\uc774\ub2e4|\uc608\uc694)$"
)


def stated_answers(text: str) -> list[Given]:
    """The last statements with a cue, in their order; a cue that no answer follows states none."""
    given: list[Given] = []
    end = 0
    for cue in list(CUE.finditer(text))[-MOST_CUES:]:
        if cue.start() < end or _DOUBT.search(cue[0]):  # within the answer of the cue before; "the answer cannot be"
            continue
        answer, stop = clause(text, cue.end())
        if answer and len(_words(answer)) <= 6:
            given.append(Given(cue.start(), stop, answer))
            end = stop
    return given


def clause(text: str, start: int) -> tuple[str, int]:
    """The answer that begins at `start`, without the delimiters of formulas, and where it ends."""
    bullet = _BEFORE.match(text, start)
    start = bullet.end() if bullet else start
    stop = min(len(text), start + LONGEST_CLAUSE)
    parts, position = [], start
    for piece in _PIECE.finditer(text, start, stop):
        parts.append(_money(text[position : piece.start()]))
        position = piece.end()
        if piece["formula"] is None:
            return _without_sentence("".join(parts)), piece.start()
        parts.append(_undelimited(piece["formula"]))
    if stop < len(text):
        return "", stop  # no sentence is that long
    parts.append(_money(text[position:stop]))
    return _without_sentence("".join(parts)), stop


def closing_answer(text: str) -> str:
    """The value that the last sentence ends in, or nothing: a number in unfinished or supposing prose is no answer."""
    body = text.strip()
    sentences = _sentences(body[-LONGEST_CLOSING:])
    while len(sentences) > 1 and _COURTESY.match(sentences[-1][0]):
        sentences.pop()
    if not sentences:
        return ""
    sentence, finished = sentences[-1]
    previous = sentences[-2][0] if len(sentences) > 1 else ""
    if _SUPPOSITION.match(sentence) or (_SUPPOSITION.match(previous) and not _words(sentence)):
        return ""
    whole = trimmed(_CONCLUSION.sub("", sentence, count=1))
    if len(sentences) == 1 and len(whole.split()) == 1:
        return whole
    concluding = _CONCLUSION.match(sentence) is not None
    return _ending(whole, finished, concluding) or _ending(_EXPLANATION.sub("", whole, count=1), finished, concluding)


def _ending(sentence: str, finished: bool, concluding: bool) -> str:
    """The value that a sentence is or ends in; a noun may follow it, and a word may stand for it, if it is finished."""
    if is_expression(sentence):
        return sentence
    if _DOUBT.search(sentence):
        return ""
    copulas = list(_COPULA.finditer(sentence))
    value = trimmed(sentence[copulas[-1].end() :]) if copulas else ""
    stated = bool(value) and (finished or "=" in value or _STATES.match(copulas[-1][0]) is not None)
    if not (stated or concluding):
        return ""
    value = value or sentence
    value = _without_noun(value) if finished else value
    return value if _is_value(value) or (finished and len(value.split()) == 1) else ""


def is_expression(text: str) -> bool:
    """Whether a text holds mathematics and no words of a sentence."""
    if not any(character.isdigit() or character in "\\=" or not character.isascii() for character in text):
        return len(text) == 1 and text.isalpha()
    return not _words(text)


def _is_value(text: str) -> bool:
    return is_expression(text) or has_unit(text)


def trimmed(text: str) -> str:
    """Without what surrounds an answer in a sentence: blanks, quotes, emphasis, a full stop."""
    answer = _END_MARK.sub("", text).strip(_AROUND).rstrip(".?").rstrip(_AROUND).lstrip("= ")
    return answer if answer.isascii() else _POLITE_ENDING.sub("", answer)


def _sentences(text: str) -> list[tuple[str, bool]]:
    """The sentences, without the delimiters of formulas, and whether each is finished by a stop (no question mark)."""
    sentences: list[tuple[str, bool]] = []
    parts: list[str] = []
    position = 0

    def end(finished: bool) -> None:
        sentence = "".join(parts).strip()
        parts.clear()
        if trimmed(sentence):
            sentences.append((sentence, finished))

    for piece in _PIECE.finditer(text):
        if piece["reason"] is not None:
            continue
        parts.append(_money(text[position : piece.start()]))
        position = piece.end()
        if piece["formula"] is not None:
            parts.append(_undelimited(piece["formula"]))
        else:
            end(finished=piece["stop"].startswith((".", "!")))
    parts.append(_money(text[position:]))
    end(finished=False)
    return sentences


def _without_sentence(text: str) -> str:
    """Of "the total is 5 apples" the 5; a text that is no such sentence as it is."""
    answer = trimmed(text)
    if is_expression(answer) or _UNCERTAIN.search(answer):
        return answer
    answer = _ASIDE.sub("", answer)
    copulas = list(_COPULA.finditer(answer))
    if copulas and (value := _without_noun(answer[copulas[-1].end() :])) and _is_value(value):
        return value
    return _without_noun(answer)


def _without_noun(text: str) -> str:
    """Of "5 different ways" the 5; units and words of quantity stay."""
    counted = _COUNTED.fullmatch(text)
    if counted is None or not is_expression(counted["value"]) or _UNCERTAIN.search(counted["noun"]):
        return text
    quantity = any(_MATHEMATICAL_WORD.fullmatch(word) for word in re.split("[ -]", counted["noun"]))
    return text if quantity or has_unit(text) else counted["value"]


def _words(text: str) -> list[str]:
    """The words of prose: no names of functions, products of two letters or anything in a command."""
    words = _WORD.findall(_NAMED.sub(" ", text))
    return [
        word
        for word in words
        if (len(word) > 2 and not _MATHEMATICAL_WORD.fullmatch(word)) or _WORD_OF_TWO_LETTERS.fullmatch(word)
    ]


def _undelimited(formula: str) -> str:
    if formula.startswith("\\"):
        return formula[2:-2]
    return formula.strip("$")


def _money(text: str) -> str:
    """A dollar sign outside of formulas is one of money."""
    return text.replace("$", "\\$").replace("\\\\$", "\\$")
