"""Unicode characters of formulas in LaTeX."""

# ruff: noqa: RUF001  # look-alikes of ASCII characters are what this file is about
from __future__ import annotations

import re
import unicodedata

_CHARACTERS = {
    **dict.fromkeys("−–—‒―﹣", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u200e\u200f", ""),
    **dict.fromkeys("’‘′`", "'"),
    **{"√": r"\sqrt ", "∛": r"\sqrt[3]", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*"},
    **{"±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "°": r"^{\circ}", "º": r"^{\circ}", "∅": r"\emptyset ", "⁄": "/"},
    **{"≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "⟨": r"\langle ", "⟩": r"\rangle "},
    **{"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∧": r"\land ", "∨": r"\lor "},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},
    **{"∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "→": r"\to ", "⇒": r"\implies ", "∠": r"\angle "},
    **{"。": ".", "、": ",", "…": r"\ldots "},
}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta _ kappa lambda mu nu xi _ pi rho _ sigma tau _ phi chi psi omega"
)
_GREEK = {
    **{chr(0x3B1 + place): f"\\{name} " for place, name in enumerate(_GREEK_NAMES.split()) if name != "_"},
    **{
        "Γ": "\\Gamma ",
        "Δ": "\\Delta ",
        "Θ": "\\Theta ",
        "Λ": "\\Lambda ",
        "Σ": "\\Sigma ",
        "Φ": "\\Phi ",
        "Ω": "\\Omega ",
    },
}
_TABLE = str.maketrans({**_CHARACTERS, **_GREEK})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ⁽⁾", "0123456789+-ni()")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙₖ₍₎", "0123456789+-nk()")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ⁽⁾]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙₖ₍₎]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_ROOT_RUN = re.compile(r"√\s*([0-9.]+)")


def latex(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(
        lambda match: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("⁄")), text
    )
    text = _ROOT_RUN.sub(r"\\sqrt{\1}", text)
    # full-width forms (digits, brackets, letters) have compatibility equivalents in ASCII
    return unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
