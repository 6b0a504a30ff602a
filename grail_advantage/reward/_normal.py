r"""One normal form for the spellings of an answer: the only place where an answer's text is changed.

:data:`RULES` are applied from top to bottom, once, to ground truth and answer alike. math-verify judges the result.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import regex

Match: TypeAlias = "regex.Match[str]"

# In patterns: (?!\pL) ends the name of a command; a named group may occur in several alternatives.
_UPRIGHT = "text|textrm|textnormal|textup|mathrm|mbox|hbox|textsf|texttt|mathsf|mathtt"
_FONTS = f"{_UPRIGHT}|textbf|textit|emph|underline|mathbf|mathit|mathnormal|boldsymbol|bm|pmb|ensuremath"
_BRACED = r"(?P<braced>\{(?P<inside>(?:[^{}]++|(?&braced))*+)\})"
_FONT = regex.compile(rf"\\(?:{_FONTS})(?: ?{_BRACED}| (?P<inside>[A-Za-z0-9]))")
_FUNCTIONS = "arcsin|arccos|arctan|arccot|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|det"
_RING = rf"(?:\\(?:circ|degree)(?!\pL)|o(?!\pL)|\\(?:{_UPRIGHT}) ?\{{ ?o ?\}})"
_DEGREE = (
    rf"(?: ?(?:\{{ ?\}})?\^ ?(?:\{{ ?{_RING} ?\}}|{_RING})"
    rf"| ?(?:\\(?:{_UPRIGHT}) ?)?\{{ ?\^ ?{_RING} ?\}}| ?\\(?:text)?degree(?!\pL)"
    r"|(?<=[0-9]) ?\\circ(?= ?(?:$|[,;)}CFK])))"
)
_GAP = r"(?:(?:\\!)*,(?:\\!)+|(?:\\!)+,|(?:\\[,;: !]|\\thinspace|\{,\}|[ ~'])+)"
_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+"
_ALONE = r"(?<![A-Za-z0-9_^}).,/])"  # in front of a number: nothing that multiplies it, or of which it is a part
_POWER = r"(?: ?\^ ?(?:-?[0-9]|\{ ?-?[0-9]+ ?\}))?"
_ORDINAL = r"(?i:(?<=(?<!1)1[^0-9]*)st|(?<=(?<!1)2[^0-9]*)nd|(?<=(?<!1)3[^0-9]*)rd|(?<=(?:1[1-3]|[04-9])[^0-9]*)th)"
_ANGLED = r"(?<!arc)\\?(?:sin|cos|tan|cot|sec|csc)(?!\pL)"
# A text with one of these words changes an answer, so that it is no unit.
_NO_UNIT = (
    r"(?![^{}]*\b(?:or|and|not|no|if|for|when|where|with|more|less|least|most|than|to|from|mod|base|only|maybe|about"
    r"|even|odd|all|any|prime|positive|negative|divisible|hundred|thousand|million|billion|trillion|dozen|percent"
    r"|percentage|factorial|squared|cubed|times|plus|minus|over|hal[fv]\w*|thirds?|quarters?|choose|above|below)\b)"
)
_WRAPPED_UNIT = (
    rf"\\(?:{_UPRIGHT})\{{{_NO_UNIT}(?! ?[^mgslLhNJWVAKCFT] ?\}})"
    rf" ?[A-Za-zµΩ](?:[A-Za-zµΩ ./^·-]|\\cdot(?!\pL))*[23]? ?\}}{_POWER}"
)
_BARE_UNIT = (
    r"(?<=[0-9})] ?|\\[a-z]+ )(?:(?:(?:square|sq\.?|cubic|cu\.?) )?(?:[cdkmn]m|ft|in|yd|mi|mph|kph|kg|mg|lbs?|oz|sec"
    r"|min|hrs?|deg|rad|USD|mL|ml|[km]?Hz|[kM]?eV|erg|[kM]?Pa|mol|days?|ways?|men|[apAP]\.?[mM]\.?"
    rf"|{_NO_UNIT}(?!(?:{_FUNCTIONS}|sqrt|alpha|beta|gamma|theta|infty|infinity)(?!\pL))[A-Za-z]{{4,}})"
    r"|(?<= )[mgs](?=[^{}]*$))"
    rf"{_POWER}(?: ?/ ?[A-Za-z]{{1,6}}{_POWER})?(?![A-Za-z(])"
)
_LETTER = r"^ ?(?:\\[a-z]+ ?\{ ?)?\(?[A-J][).] ?\}? ?"  # of a choice, behind which words are the answer
_UNITS = (
    rf"(?<=[0-9}})a-zA-Z|.!] ?)(?<!{_LETTER})"
    rf" ?(?:{_WRAPPED_UNIT}|\\frac ?\{{ ?{_WRAPPED_UNIT} ?\}} ?\{{ ?{_WRAPPED_UNIT} ?\}}|{_BARE_UNIT})"
    rf"(?: ?(?:\\cdot|\\times|/|\*)? ?{_WRAPPED_UNIT})*\.?"
    r"(?= ?(?:$|[,;)\]=}]|\\(?:\}|pm(?!\pL)|text\{ ?,? ?(?:and|or) ?\})))"
)


def _mixed(match: Match) -> str:
    whole, top, bottom = (int(match[name]) for name in ("whole", "top", "bottom"))
    return f"\\frac{{{whole * bottom + top}}}{{{bottom}}}" if top < bottom else match[0]


def _repeating(match: Match) -> str:
    if match["dots"] and len(match["block"]) < 3:
        return match[0]
    once, block = match["once"] or "", match["unit"] if match["dots"] else regex.sub("[^0-9]", "", match["block"])
    start = int((match["whole"] or "0") + once)
    value = Fraction(int(f"{start}{block}") - start, 10 ** len(once) * (10 ** len(block) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _minutes(match: Match) -> str:
    degrees, minutes, seconds = (int(match[name] or 0) for name in ("degrees", "minutes", "seconds"))
    value = Fraction(degrees * 3600 + minutes * 60 + seconds, 3600)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _digits(match: Match) -> str:
    return regex.sub("[^0-9]", "", match[0])


def _with_commas(match: Match) -> str:
    merged = regex.sub(rf"(?<![0-9.,]){_THOUSANDS}(?![0-9])", _digits, match[0])
    return match[0] if regex.search(",(?! )", merged) else merged


def _without_font(match: Match) -> str:
    inside = _FONT.sub(_without_font, match["inside"])
    is_words = regex.fullmatch("[A-Za-z][A-Za-z0-9 .,;:'()-]*", inside.strip()) and regex.search("[A-Za-z]{2}", inside)
    return f"\\text{{{inside}}}" if is_words else inside


_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NAMES = dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "xfrac"), r"\frac")
_NAMES |= {"dbinom": r"\binom", "tbinom": r"\binom", "bmod": r"\mod", "lg": r"\log", "lbrace": r"\{", "rbrace": r"\}"}
_NAMES |= {"tg": r"\tan", "ctg": r"\cot", "arctg": r"\arctan", "arcctg": r"\arccot"}
_NAMES |= {"varnothing": r"\emptyset", "O": r"\emptyset", "pounds": "", "euro": ""}
_TABLE: tuple[tuple[str, str, str | Callable[[Match], str]], ...] = (
    (r"\tg x", rf"\\(?P<name>{'|'.join(_NAMES)})(?!\pL)", lambda match: _NAMES[match["name"]]),
    (r"\$18", r"\\?\$|[£€¥₹¢₩]", ""),
    ("**73**", r"^(?P<mark>\*\*|`+)(?P<inside>[^*`]+)(?P=mark)$", r"\g<inside>"),
    (r"\fbox{13}", rf"^\\(?:boxed|fbox|framebox) ?{_BRACED}$", r"\g<inside>"),
    (r"\phantom{0}13", rf"\\(?:[hv]?phantom|label) ?{_BRACED}|\\(?:text|mbox) ?\{{ *\}}", " "),
    ("2 1/2", rf"{_ALONE}(?P<whole>[0-9]+)(?:[ ~]|\\[ ,;:!])*\\frac ?(?:\{{ ?(?P<top>[0-9]+) ?\}}|(?P<top>[0-9])) ?"
     r"(?:\{ ?(?P<bottom>[0-9]+) ?\}|(?P<bottom>[0-9]))"
     rf"|{_ALONE}(?P<whole>[0-9]+)(?:[ ~]|\\[ ,;:])+(?P<top>[0-9]{{1,2}}|[0-9]{{4,}}) ?/ ?(?P<bottom>[0-9]+)(?![0-9.])",
     _mixed),
    (r"12{\,}345", r"(?<!\\[A-Za-z]+ ?|[\\\]}^_] ?)\{ ?(?P<space>(?:\\[,;:! ]|\\thinspace|~| )*) ?\}(?! ?[\^_])",
     r"\g<space>"),
    (r"10, \! 080", r"(?:(?<!\\) )?(?<!\\)\\(?:!|negthinspace(?!\pL)) ?", r"\\!"),
    (r"1\,234{,}567", rf"(?<![0-9.,])[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}})+(?![0-9])|(?<=[^\\]\{{){_THOUSANDS}(?=\}})",
     _digits),
    (r"1\!2", r"(?:\\!)+(?!\pL)", ""),
    (r"x\quad y", r"(?:(?<!\\)\\(?:[,;:! ]|(?:thinspace|quad|qquad|enspace)(?!\pL))|~)+", " "),
    (r"{\bf 13}", r"\{ ?\\(?:bf|it|rm|tt|sf|em)(?!\pL) ?", r"\\text{"),
    (r"\left(\large 13\right)",
     r"(?<!\\)\\(?:[\[\]()]|(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|bf|it|rm|bfseries|(?:display|text|script)"
     r"style|[bB]igg?[lrm]?|limits)(?!\pL) ?|(?:left|right|middle)(?!\pL) ?\.?)", ""),
    # Thousands with commas, where each other comma has a blank and no bracket is open
    (r"12,345\pi", r"^(?!.*(?:[(\[]|\\\{)).*[0-9],[0-9]{3}.*$", _with_commas),
    (r"\textcolor{red}{13}", rf"\\(?:(?:text)?color|colorbox) ?\{{[^{{}}]*\}} ?(?:{_BRACED})?", r"\g<inside>"),
    (r"\text{-}3{:}45",
     rf"(?:\\(?:{_FONTS}|math(?:bin|op|rel|ord|punct)|operatorname) ?)?\{{ ?(?P<sign>-{{1,3}}|[+:/]) ?\}}"
     r"|\\text(?:minus|endash)(?!\pL)(?: ?\{ ?\})?", lambda match: match["sign"] or "-"),
    (r"\frac12",
     r"\\(?P<name>frac|binom) ?(?:\{(?P<top>[^{}]*)\}|(?P<top>[0-9])) ?(?:\{(?P<bottom>[^{}]*)\}|(?P<bottom>[0-9]))",
     r"\\\g<name>{\g<top>}{\g<bottom>}"),
    (r"1\\[4pt]2", r"\\\\\*? ?(?:\[ ?-?[0-9.]+ ?(?:pt|ex|em|mm|cm|in) ?\])?|\\cr(?!\pL)", r"\\\\ "),
    (r"0.1\overline{6}",
     r"(?<![0-9])(?P<whole>[0-9]*)\.(?:(?P<once>[0-9]*)(?P<block>\\dot ?\{?[0-9]\}?[0-9]*\\dot ?\{?[0-9]\}?"
     r"|(?:\\(?:overline|overbar|bar|dot) ?(?:\{ ?[0-9]+ ?\}|[0-9]))+|\([0-9]+\)(?![0-9^!]))(?:\.\.\.| ?\\l?dots)?"
     r"|(?P<once>[0-9]{0,9}?)(?P<block>(?P<unit>[0-9]{1,9}?)(?P=unit)+) ?(?P<dots>\.\.\.|\\[lc]?dots(?!\pL)))",
     _repeating),
    (r"1.5\text{ million}", rf"(?<=[0-9]) ?(?:\\text\{{ ?(?P<word>{'|'.join(_ZEROS)})(?P<rest>[^{{}}]*)\}}"
     rf"|(?P<word>{'|'.join(_ZEROS)})(?!\pL))",
     lambda match: f" \\cdot 10^{{{_ZEROS[match['word']]}}}\\text{{{match['rest'] or ''}}}".removesuffix("\\text{}")),
    ("3 x 10^8", r"(?<=[0-9]) ?[xX*] ?(?=10 ?\^)", r" \\times "),
    (r"\text{negative }5", r"^(?:\\text\{ ?(?:negative|minus) ?\} ?(?!\\inf)|(?:negative|minus) )", "-"),
    ("13;", r"(?:[,;]|\\\\) ?$", ""),
    (r"\text{The answer is } 5",
     r"^(?:(?:\\text\{ ?[A-Za-z]{2}[A-Za-z ]*: ?\}|\\(?:approx|simeq|sim|therefore|implies|Rightarrow|to)(?!\pL)"
     r"|[=#≈∴⇒→]|\\text\{ ?(?:Rs\.?|USD|US|EUR|INR) ?\}|Rs\.?(?= ?[0-9])"
     r"|(?i:\\text\{ ?(?:(?:so|thus|hence),? )?(?:(?:the|final|my) )*(?:answer|result) ?(?:is)? ?:? ?\})) ?:?)+", ""),
    (r"20^\circ 30'", rf"(?<![0-9])(?P<degrees>[0-9]++){_DEGREE} ?(?P<minutes>[0-9]+)"
     r" ?(?:'|\^?\{?\\prime\}?)(?: ?(?P<seconds>[0-9]+) ?(?:''|\"))?", _minutes),
    (r"\sin 30^\circ", r"(?P<size>[0-9]+(?:\.[0-9]+)?|(?<![A-Za-z\\])[A-Za-z]|\\[A-Za-z]+|\\frac\{[^{}]*\}\{[^{}]*\})"
     rf"{_DEGREE}(?:(?<={_ANGLED}.*)|(?=.*{_ANGLED}))", r"(\\frac{\g<size>\\pi}{180})"),
    (r"30^\circ F", rf"(?<=[0-9}})a-zA-Z] ?){_DEGREE}(?: ?(?:\\(?:text|mathrm)\{{ ?[CFK] ?\}}|[CFK](?!\pL)))?", ""),
    (r"7^{\text{th}}",
     rf"(?<=[0-9]) ?\^? ?(?P<brace>\{{ ?)?\\(?:{_UPRIGHT}) ?\{{ ?-?{_ORDINAL} ?\}}(?(brace) ?\}})"
     rf"|(?<=[0-9]) ?\^ ?\{{ ?{_ORDINAL} ?\}}|(?<=^[0-9,]*){_ORDINAL}(?= ?(?:$|\.$|\\text))", ""),
    (r"50\% \text{ of the students}",
     rf"(?<=[0-9}}] ?)(?:\\?%|percent) ?(?:\\text\{{{_NO_UNIT} ?[A-Za-z]{{2}}[A-Za-z ,.'-]*\}}"
     rf"|{_NO_UNIT} ?[A-Za-z]{{2}}[A-Za-z ,.'-]*)$", r"\\%"),
    (r"3\,\mathrm{kg}\cdot\mathrm{m}/\mathrm{s}^2", _UNITS, ""),
    (r"2\mathrm{e}+\mathbf{13}", _FONT.pattern, _without_font),
    (r"\operatorname{lcm}(4,6)", rf"(?<!_ ?\{{? ?)\\(?:text|operatorname)\*? ?\{{ ?(?P<name>{_FUNCTIONS}) ?\}}"
     rf"|(?<![A-Za-z\\])(?P<name>{_FUNCTIONS}|sqrt|pi)(?![A-Za-z}}])", r"\\\g<name> "),
    (r"\log_e 2", r"\\log ?_ ?(?:e|\{ ?e ?\})(?!\pL)", r"\\ln "),
    (r"\log_2{4}/x", rf"(?P<name>\\(?:{_FUNCTIONS})(?: ?_ ?(?:[0-9A-Za-z]|\{{[^{{}}]*\}}))?) ?{_BRACED}",
     r"\g<name>(\g<inside>)"),
    # Where math-verify reads something else
    (r"\overline{3+4i}", r"\\(?:overline|bar) ?\{(?P<number>[-+0-9./ ]*i[-+0-9./ ]*)\}",
     lambda match: f"({match['number'].replace('i', '(-i)')})"),
    ("f'(x)", r"(?<=[A-Za-z])'+", lambda match: f"_{{{'p' * len(match[0])}}}"),
    (r"d \cdot 2", r"(?<![A-Za-z\\])d(?= ?\\(?:cdot|times|div|pm|[lg][et]q?|neq?|in)(?!\pL))", "{d}"),
    (r"x\equiv 3\bmod 5",
     r"(?: ?\(? ?(?:\\p?mod|\\text\{ ?\(? ?mod ?\}) ?(?:\{ ?(?P<m>[^{}]*?) ?\}|(?P<m>[0-9A-Za-z]+)) ?\)?"
     r"| ?\\text\{ ?\(? ?mod (?P<m>[0-9A-Za-z]+) ?\)? ?\}| ?\( ?mod (?P<m>[0-9A-Za-z]+) ?\))"
     r"(?:(?<=\\equiv.*)|(?=.*\\equiv))", r" \\pmod{\g<m>}"),
    (r"\langle 1,2\rangle",
     r"\\langle(?!\pL) ?(?P<of>(?:(?!\\[lr]angle|[|,]).)*+,(?:(?!\\[lr]angle|\|).)*)\\rangle(?!\pL)"
     r"|^<(?P<of>[^<>,]+,[^<>]+)>$", r"(\g<of>)"),
    ("]0,1[", r"(?<=^|\\cup ?)(?P<left>[\[\]])(?P<ends>[^\[\]]*,[^\[\]]*)(?P<right>[\[\]])(?= ?(?:$|\\cup))",
     lambda match: f"{'[('[match['left'] == ']']}{match['ends']}{'])'[match['right'] == '[']}"),
)  # fmt: skip
RULES = [(example, regex.compile(pattern), replacement) for example, pattern, replacement in _TABLE]
"""An answer that the rule is there for, the pattern, and what takes the place of its matches."""

_CHARACTERS = "−×·⋅∙÷∕⁄°º˚℃℉∘∞√∛≤≥⩽⩾≠±"  # noqa: RUF001
_CHARACTERS += "∪∩∈∅⟨⟩〈〉′″’、ℝℤℚℕℂ∠△∣≡"  # noqa: RUF001
_COMMANDS = (
    r"- \times \cdot \cdot \cdot \div / / ^\circ ^\circ ^\circ ^{\circ}C ^{\circ}F \circ"
    r" \infty \sqrt \sqrt[3] \le \ge \le \ge \neq \pm \cup \cap \in \emptyset \langle \rangle"
    r" \langle \rangle ' '' ' , \mathbb{R} \mathbb{Z} \mathbb{Q} \mathbb{N} \mathbb{C} \angle \triangle | \equiv"
)
_SYMBOLS = dict(zip(_CHARACTERS, _COMMANDS.split(), strict=True))
_RAISED = regex.compile("(?P<up>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+)|[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_ROOT = regex.compile(r"√ ?(?:(?P<under>[0-9]+(?:\.[0-9]+)?|[A-Za-zπ])|\((?P<under>[^()]*)\))")


def _in_ascii(char: str) -> str:
    """LaTeX for a character outside ASCII; Greek and other letters stay."""
    if char in _SYMBOLS:
        return _SYMBOLS[char] + " " * _SYMBOLS[char][-1].isalpha()
    plain = unicodedata.normalize("NFKC", char)
    if "\u2044" in plain:
        return f"\\frac{{{plain.replace(chr(0x2044), '}{')}}}"
    return {"Cf": "", "Pd": "-", "Zs": " "}.get(unicodedata.category(char), plain)


LONGEST = 2000  # characters of a text in LaTeX: the time of some rules grows with their square


@lru_cache(maxsize=8192)
def normal(text: str) -> str:
    """The text in its normal form: the same for the spellings of one answer, as far as text alone can tell. ValueError:
    it has more than :data:`LONGEST` characters in LaTeX."""
    if not text.isascii():
        text = _ROOT.sub(r"\\sqrt{\g<under>}", text)
        text = _RAISED.sub(lambda run: f"{'^' if run['up'] else '_'}{{{unicodedata.normalize('NFKC', run[0])}}}", text)
        text = "".join(char if char.isascii() else _in_ascii(char) for char in text)
    text = " ".join(text.split())
    if len(text) > LONGEST:
        raise ValueError(f"a text has {len(text)} characters in LaTeX, more than {LONGEST}")
    for _, pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text
