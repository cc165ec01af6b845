"""Units of measurement behind a number, and currency signs before it."""

from __future__ import annotations

import re

from gvm_stream.verify.math.tokens import names

_WORDS = names("""
    meter metre kilometer kilometre centimeter centimetre millimeter millimetre micrometer nanometer inch
    inches foot feet yard mile gram kilogram milligram ton tonne pound ounce liter litre milliliter millilitre
    gallon quart pint cup second minute hour day week month year decade century newton joule watt kilowatt
    volt ampere ohm hertz pascal kelvin celsius fahrenheit coulomb tesla farad mole calorie kilojoule dollar
    cent euro penny pence rupee yuan yen degree radian unit square acre hectare knot mph kph kmh kmph bit byte
    percent people person point step way time digit
""")
_GLUED = names(
    "km cm mm nm kg mg lb lbs oz ft yd mi ml mL sec min hr hrs kJ kW kWh Hz kHz MHz Pa kPa eV cc dm rad deg mol bps"
)
_SINGLE = names("m g s h L l J N W V A K C F")
_BLOCKED_COUNTS = names(
    "times tens hundreds thousands millions billions trillions dozens halves thirds fourths quarters fifths less plus "
    "minus is was others means equals does has this thus"
)
_SYNONYMS = {
    **dict.fromkeys(("meter", "metre"), "m"),
    **dict.fromkeys(("kilometer", "kilometre"), "km"),
    **dict.fromkeys(("centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("inches", "inch"), "in"),
    **dict.fromkeys(("foot", "feet"), "ft"),
    **dict.fromkeys(("hour", "hr", "hrs"), "h"),
    **dict.fromkeys(("second", "sec"), "s"),
    **dict.fromkeys(("minute",), "min"),
    **dict.fromkeys(("gram",), "g"),
    **dict.fromkeys(("kilogram",), "kg"),
    **dict.fromkeys(("pound", "lbs"), "lb"),
    **dict.fromkeys(("ounce",), "oz"),
    **dict.fromkeys(("yard",), "yd"),
    **dict.fromkeys(("mile",), "mi"),
    **dict.fromkeys(("litre", "liter", "l"), "L"),
    **dict.fromkeys(("degree", "deg", "\\circ"), "degree"),
    **dict.fromkeys(("\\dollar", "usd"), "dollar"),
    **{"€": "euro", "£": "pound sterling", "¥": "yen", "mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"},
    **{"joule": "J", "newton": "N", "watt": "W", "volt": "V", "square unit": "unit^2", "cubic unit": "unit^3"},
}


def _longest_first(words: frozenset[str]) -> list[str]:
    return sorted(words, key=lambda word: (-len(word), word))


_LONG = "|".join(f"{word}(?:s|es)?" for word in _longest_first(_WORDS))
_SHORT = "|".join(_longest_first(_GLUED))
_ANY = rf"(?:{_LONG}|{_SHORT}|in|{'|'.join(sorted(_SINGLE))})"
_EXPONENT = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_ONE = rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?{_ANY}{_EXPONENT}(?:\s+(?:squared|cubed))?"
_COMPOUND = rf"{_ONE}(?:\s*(?:/|\bper\b|\\cdot|\*|\s)\s*{_ONE})*"
_SPACED_UNIT = re.compile(rf"^(?P<amount>.*?[\d)}}\w])\s+(?P<unit>{_COMPOUND})$")
_GLUED_UNIT = re.compile(
    rf"^(?P<amount>.*?\d)(?P<unit>(?:{_LONG}|{_SHORT}){_EXPONENT}(?:\s*(?:/|per)\s*{_ONE})?|m/s{_EXPONENT}|(?:km|m)/h)$"
)
_DEGREES = re.compile(r"^(?P<amount>.*[\d)}])\s*\^\s*\{?\s*\\circ\s*\}?\s*(?P<scale>[CF]?)$")
_CURRENCY = re.compile(r"^(?P<sign>-?)\s*(?P<unit>\\dollar|[€£¥])\s*(?P<amount>[\d.].*)$")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_COUNTED = re.compile(r"^(?P<amount>-?[\d.,/]+|-?\\frac\{\d+\}\{\d+\})\s+(?P<unit>(?!\w+ths$)[a-z]{3,}s)$")


LONGEST = 200
"""Characters of a text in which a unit is looked for."""


def split_unit(text: str) -> tuple[str, str]:
    """(amount, unit in one spelling) of a normalised text; the unit is empty if there is none.

    A single letter glued to a number is a variable, not a unit; with a blank or as text it is a unit.
    """
    if len(text) > LONGEST:
        return text, ""
    if (match := _CURRENCY.match(text)) is not None:
        return match["sign"] + match["amount"], _unit(match["unit"])
    if (match := _DEGREES.match(text)) is not None and _amount(match["amount"]):
        return match["amount"], f"degree {match['scale']}".strip()
    if text[-1:].isdigit() and "^" not in text and "/" not in text:
        return text, ""
    open_text = _TEXT.sub(r" \1 ", text).strip()
    for pattern in (_SPACED_UNIT, _GLUED_UNIT, _COUNTED):
        match = pattern.match(open_text)
        if match is not None and _amount(match["amount"]) and match["unit"] not in _BLOCKED_COUNTS:
            return match["amount"].strip(), _unit(match["unit"])
    return text, ""


def _amount(text: str) -> bool:
    """It can stand before a unit: some value, without a word of its own."""
    return bool(re.search(r"\d|\\pi", text)) and not re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|[=<>+]\s*$", text)


def _unit(text: str) -> str:
    """One spelling: singular, short, exponents as ^2."""
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = re.sub(r"\b(?:square|sq\.?)\s+([a-zA-Z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+([a-zA-Z]+)", r"\1^3", text)
    text = text.replace(" squared", "^2").replace(" cubed", "^3")
    text = re.sub(r"\s*(?:/|\bper\b)\s*", "/", text)
    return re.sub(r"\\?[a-zA-Z€£¥]+", lambda match: _singular(match[0]), text).replace(" ", "")


def _singular(word: str) -> str:
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _SYNONYMS:
            return _SYNONYMS[form]
    return word.removesuffix("s") if len(word) > 3 else word
