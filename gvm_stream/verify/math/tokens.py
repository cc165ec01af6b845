"""A normalised formula in tokens: numbers, single letters, commands, words and signs."""

from __future__ import annotations

import re
from typing import NamedTuple


class Unreadable(ValueError):
    """A formula that the grammar does not cover; it is then compared as it is written."""


class Token(NamedTuple):
    kind: str
    """num, let, cmd, text, op or end."""
    text: str
    spaced: bool
    """A blank stands before it."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


END = Token("end", "", False)

FUNCTIONS = names(
    "sin cos tan cot sec csc sinh cosh tanh coth sech csch asin acos atan acot asec acsc arcsin arccos arctan arccot "
    "ln log lg exp gcd lcm max min floor ceil abs sgn det arg Re Im"
)
_NAMES = {name: name for name in FUNCTIONS} | {
    **{"sqrt": "sqrt", "pi": "pi", "infinity": "infty", "infty": "infty", "inf": "infty", "oo": "infty"},
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "mod": "mod", "union": "cup"},
    **{"alpha": "alpha", "beta": "beta", "theta": "theta", "phi": "phi", "lambda": "lambda", "omega": "omega"},
}
_PREFIXES = ("arcsin", "arccos", "arctan", "sqrt", "sin", "cos", "tan", "cot", "log", "ln", "exp", "pi")
_SEPARATORS = {"and": ",", "or": "or", "&": ","}
_PRODUCT_FAMILIES = tuple(map(set, ("abc", "xyzt", "pqrs", "ijkmn", "uvw", "xyab")))

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<rep>\d*\.\d*\\overline\s*\{\d+\})
    |(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\w.]))?)
    |\\text\{(?P<text>[^{}]*)\}
    |(?P<cmd>\\[a-zA-Z]+|\\\\|\\[{}|])
    |(?P<run>[a-zA-Z]+)
    |(?P<op>[-+*/^_=<>()\[\]{}|,;:!&%'])
    |(?P<dots>\.\.\.)""",
    re.VERBOSE,
)
_THOUSANDS = re.compile(r"^([^,()\[\]{}]*?)(?<![\d.])(\d{1,3}(?:,\d{3})+)(?=\s*[\\a-zA-Z^*/+-])([^,]*)$")
_MODULUS = re.compile(r"\(\s*(?:\\text\{)?\s*(?:\\b?)?mod(?:ulo)?\s*\}?\s*([^()]*)\)")
LONGEST = 4000
"""Characters of a formula that is read; a longer one is compared as it is written."""


def tokenise(text: str) -> list[Token]:
    """Raises Unreadable at the first character that belongs to no token."""
    if len(text) > LONGEST:
        raise Unreadable(f"a formula of {len(text)} characters is longer than {LONGEST}")
    text = _MODULUS.sub(r"\\pmod{\1}", text)
    if "," in text:  # 10,000\pi, but not (10,000x), which is a pair
        text = _THOUSANDS.sub(lambda match: match[1] + match[2].replace(",", "") + match[3], text)
    tokens: list[Token] = []
    place, spaced = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unreadable(f"{text[place]!r} has no meaning in a formula")
        place = match.end()
        kind = match.lastgroup or ""
        if kind == "space":
            spaced = True
            continue
        tokens += _tokens_of(kind, match[kind], spaced, glued=bool(tokens) and tokens[-1].kind == "num" and not spaced)
        spaced = False
    return tokens


def _tokens_of(kind: str, text: str, spaced: bool, *, glued: bool) -> list[Token]:
    if kind == "rep":
        return [Token("num", _repeating(text), spaced)]
    if kind == "text":
        return _text(text)
    if kind == "run":
        return _letters(text, spaced, glued=glued)
    if kind == "cmd":
        name = "{" if text == "\\{" else "}" if text == "\\}" else text[1:]
        return [Token("cmd", _NAMES.get(name, name), spaced)]
    return [Token(kind, text, spaced)]


def _repeating(text: str) -> str:
    """0.1(6) as a fraction of integers: (16 - 1) / 90."""
    plain, _, block = text.partition("\\overline")
    block = block.strip(" {}")
    whole, _, decimals = plain.partition(".")
    before = int((whole + decimals) or "0")
    return f"{int(f'{before}{block}') - before}/{(10 ** len(block) - 1) * 10 ** len(decimals)}"


def _text(text: str) -> list[Token]:
    """Words of a `\\text`, with the commas and the joining words as separators."""
    tokens: list[Token] = []
    for piece in re.findall(r"[,;]|[^,;]+", text):
        words = piece.split()
        phrase: list[str] = []
        for word in [*words, ""]:
            if word and word.lower() not in _SEPARATORS and word not in ",;":
                phrase.append(word)
                continue
            if phrase:
                joined = " ".join(phrase)
                tokens.append(Token("let", joined, True) if _is_letter(joined) else Token("text", joined.lower(), True))
                phrase = []
            if word:
                tokens.append(Token("op", _SEPARATORS.get(word.lower(), ","), True))
    return tokens


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isalpha()


def _letters(run: str, spaced: bool, *, glued: bool) -> list[Token]:
    """A name that mathematics knows, a word, or a product of letters."""
    if run.lower() in _SEPARATORS:
        return [Token("op", _SEPARATORS[run.lower()], spaced)]
    if run in _NAMES:
        return [Token("cmd", _NAMES[run], spaced)]
    for prefix in _PREFIXES:
        if run.startswith(prefix) and len(run) <= len(prefix) + 1:
            return [*_letters(prefix, spaced, glued=glued), *_letters(run[len(prefix) :], False, glued=False)]
    if is_word(run) and not glued:
        return [Token("text", run.lower(), spaced)]
    return [Token("let", letter, spaced and not index) for index, letter in enumerate(run)]


def is_name(run: str) -> bool:
    """Letters that mathematics has a meaning for: `pi`, `infinity`, `sinx`."""
    return run in _NAMES or any(run.startswith(prefix) and len(run) <= len(prefix) + 1 for prefix in _PREFIXES)


def is_word(run: str) -> bool:
    """Letters that are a word, not a product: `north`, `No`; but not `xy`, `abc`, `AB`."""
    if len(run) == 1:
        return False
    if len(run) == 2:
        return run.istitle() or run in ("no", "on", "up", "of", "is", "if", "to", "in", "at", "by", "it", "do", "so")
    return not (run.isupper() or any(set(run) <= family for family in _PRODUCT_FAMILIES))
