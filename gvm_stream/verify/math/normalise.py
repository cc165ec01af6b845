"""One spelling for what is written in several ways: Unicode, LaTeX styles, spacing, brackets, words for symbols.

Nothing here changes what a formula says: whatever is not known stays in the text, so that it counts in the comparison.
"""

from __future__ import annotations

import re

from gvm_stream.verify.math.characters import latex

_SYNONYMS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **{"dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge"},
    **{"neq": "ne", "varnothing": "emptyset", "smallsetminus": "setminus", "backslash": "setminus", "dots": "ldots"},
    **{"cdots": "ldots", "div": "/", "lt": "<", "gt": ">", "colon": ":", "ast": "*", "mid": "|", "vert": "|"},
    **{"lvert": "|", "rvert": "|", "lbrack": "[", "rbrack": "]", "lbrace": r"\{", "rbrace": r"\}", "wedge": "land"},
    **{"vee": "lor", "varphi": "phi", "varepsilon": "epsilon", "simeq": "approx", "thickapprox": "approx"},
    **{"rightarrow": "to", "Rightarrow": "implies", "bar": "overline", "sim": "approx", "degree": r"^{\circ}"},
    **{"arccos": "acos", "arcsin": "asin", "arctan": "atan", "percent": "%", "lnot": "neg", "prime": "'"},
}
_DROPPED = {
    *(
        "left",
        "right",
        "big",
        "Big",
        "bigg",
        "Bigg",
        "bigl",
        "bigr",
        "Bigl",
        "Bigr",
        "biggl",
        "biggr",
        "Biggl",
        "Biggr",
    ),
    *("displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "mathstrut", "tiny", "small", "normalsize"),
    *("large", "Large", "LARGE", "huge", "Huge", "bf", "rm", "it", "sf", "tt", "bfseries", "centering", "mathopen"),
    *("quad", "qquad", "thinspace", "medspace", "enspace", "space", "hfill", "mathclose", "hline", "therefore"),
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?")
_OPEN_SYSTEM = re.compile(
    r"\\left\s*\\(?:\{|lbrace)\s*\\begin\{(array|aligned|matrix|gathered|split)\}(?:\{[lcr| ]*\})?"
    r"(.*?)\\end\{\1\}\s*\\right\s*\.",
    re.DOTALL,
)
_ALIGNED_SIGN = re.compile(r"\s*&\s*=\s*&?|\s*=\s*&")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_CHOICE = re.compile(r"\{([^{}]*?)\\choose\b([^{}]*?)\}")
_SPACES = re.compile(r"\\[,;: >]|~|\s+")
_WRAPPERS = "boxed|fbox|underline|mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|pmb|mbox|ensuremath|mathord|phantom"
_WRAPPED = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{")
_COLOUR = re.compile(
    r"\\(?:textcolor|colorbox)\s*(?:\[[^\]]*\])?\{[^{}]*\}\s*\{|\\color\s*(?:\[[^\]]*\])?\{[^{}]*\}\s*"
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|emph|mathrm|operatorname|mbox)\s*\{([^{}]*)\}"
)
_PER_CENT = re.compile(r"(?<=[\d}\s)])\s*(?:\\text\{\s*)?(?:per\s?cent|percentage|pct)\b\.?(?:\s*\})?")
_LEAD_IN = re.compile(
    r"^(?:(?:so|thus|hence|therefore)[, ]+)?(?:the\s+)?(?:[a-z]+\s+){0,4}?(?:answers?|results?|values?|solutions?|it)"
    r"\s*(?:is|are|equals|=|:)[: ]\s*",
    re.IGNORECASE,
)
_GROUPED_DIGITS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,?\\!|\\,)\d{3})+(?!\d)")
_TIGHT = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_ONE_IN_BRACES = re.compile(r"([\^_])\{([0-9A-Za-z])\}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
LONGEST = 20_000
"""Characters of a text that is normalised; a longer one is compared as it is written."""
MOST_WRAPPERS = 200
"""Boxes, colours and the like that are taken off one text."""
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def gold_text(gold: str) -> str:
    """The answer in a gold column: after the last `####`, in the last box, or all of it."""
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    boxes = list(_BOX.finditer(gold))
    if boxes:
        inside = _braced(gold, boxes[-1].end())
        gold = inside if inside is not None else gold
    return gold


def normalise(text: str) -> str:
    """The text in one spelling; words stay in `\\text{...}`, single blanks separate what blanks separated."""
    if len(text) > LONGEST:
        return text.strip()
    text = latex(text)
    if "&" in text or "\\left" in text:
        text = _ALIGNED_SIGN.sub("=", _OPEN_SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text))
    text = _GROUPED_DIGITS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.replace("\\!", "").replace("{,}", ",").replace("\\$", "\\dollar ").replace("$", " ")
    text = _CHOICE.sub(r"\\binom{\1}{\2}", _DELIMITERS.sub(" ", text)).replace("...", "\\ldots ")
    text = text.replace("\\%", "%").replace("\\|", "|").replace("\\#", "#")
    text = _unwrap(text)
    text = _TEXT.sub(_words, text)
    text = _COMMAND.sub(_command, text)
    text = _SPACES.sub(" ", text.replace("\\\\", "\0")).replace("\0", "\\\\")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ").replace("==", "=")
    text = _PER_CENT.sub("%", text).strip(" *").lstrip("= ").replace("**", "^")
    text = text.rstrip(" .,;:")
    text = _LEAD_IN.sub("", _bare_words(text)).strip()
    return _outer_brackets(text)


def squeezed(text: str) -> str:
    """A normalised text without the blanks and braces that mean nothing; for literal comparison."""
    return _ONE_IN_BRACES.sub(r"\1\2", _TIGHT.sub("", text))


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name in _DROPPED:
        return " "
    synonym = _SYNONYMS.get(name)
    if synonym is None:
        return match[0]
    return f"\\{synonym}" if synonym.isalpha() else synonym


def _words(match: re.Match[str]) -> str:
    """Text stays text, except letters and numbers that stand for themselves and names of functions."""
    words = match[1].strip()
    command = match[0][1:].split("{")[0].strip()
    if not words:
        return " "
    if not re.search(r"[^\W\d_]", words) or (command == "mathrm" and len(words) == 1):
        return f" {words} "
    if command in ("operatorname", "mathrm", "text") and words in (
        "lcm",
        "gcd",
        "sgn",
        "exp",
        "ln",
        "log",
        "sin",
        "cos",
    ):
        return f"\\{words} "
    return rf"\text{{{match[1]}}}"


def _unwrap(text: str) -> str:
    """Drop commands that only say how their argument looks."""
    for pattern in (_COLOUR, _WRAPPED):
        for _ in range(MOST_WRAPPERS):
            match = pattern.search(text)
            if match is None:
                break
            if not match[0].endswith("{"):  # \color{blue} holds until the group ends
                text = text[: match.start()] + text[match.end() :]
                continue
            inside = _braced(text, match.end() - 1)
            if inside is None:
                return text
            text = f"{text[: match.start()]} {inside} {text[match.end() + len(inside) + 1 :]}"
    return text


def _bare_words(text: str) -> str:
    """An answer that is one piece of text, without its wrapper."""
    while (match := re.fullmatch(r"\\text\{([^{}]*)\}|\{(.*)\}", text)) is not None:
        inside = match[1] if match[1] is not None else match[2]
        if match[1] is None and _braced(text, 0) != inside:
            return text
        text = inside.strip(" .,;")
    lead, _, rest = text.partition("}")
    if lead.startswith("\\text{") and _LEAD_IN.match(lead[6:] + " "):
        return rest.strip()
    return text


def _outer_brackets(text: str) -> str:
    """Doubled brackets once, in one pass: ((x)) is (x) however deep."""
    stack: list[int] = []
    closing: dict[int, int] = {}
    for place, character in enumerate(text):
        if character in "([{" and text[place - 1 : place] != "\\":
            stack.append(place)
        elif character in ")]}" and text[place - 1 : place] != "\\":
            if not stack or _BRACKETS[text[stack[-1]]] != character:
                return text
            closing[stack.pop()] = place
    if stack:
        return text
    doubled = {
        place
        for start, end in closing.items()
        if text[start] == "(" and text[start + 1 : start + 2] == "(" and closing.get(start + 1) == end - 1
        for place in (start, end)
    }
    return "".join(character for place, character in enumerate(text) if place not in doubled) if doubled else text


def _braced(text: str, start: int) -> str | None:
    """What is between the brace at `start` and its partner; None if it has none."""
    depth = 0
    for place in range(start, len(text)):
        if text[place - 1 : place] == "\\":
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 1 : place]
    return None
