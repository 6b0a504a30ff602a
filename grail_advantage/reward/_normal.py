r"""One normal form for the spellings of an answer.

:data:`RULES` are applied from top to bottom, once, to ground truth and answer alike. A unit leaves the text, but its
words are kept: ``10\text{ km north}`` is ``10``, and not ``10\text{ km south}``. math-verify judges the result.
"""

import math
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import regex

from grail_advantage.reward._words import fold, is_unit, words_of

Match: TypeAlias = regex.Match[str]

# In patterns: (?!\pL) ends the name of a command; a named group may occur in several alternatives.
_UPRIGHT = "text|textrm|textnormal|textup|mathrm|mbox|hbox|textsf|texttt|mathsf|mathtt"
_FONTS = (
    f"{_UPRIGHT}|textbf|textit|emph|underline|mathbf|mathit|mathnormal|boldsymbol|bm|pmb|ensuremath"
)
_BRACED = r"(?P<braced>\{(?P<inside>(?:[^{}]++|(?&braced))*+)\})"
_PARENS = r"(?P<parens>\((?P<under>(?:[^()]++|(?&parens))*+)\))"
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
_IN_REALS = r"[A-Za-z] ?\\in ?\\mathbb ?\{ ?R ?\}"
_COMMA = r"(?:[,;]|\\text\{ ?and ?\})"
_ROOT = regex.compile(
    r"(?:\\(?:text|operatorname) ?\{ ?sqrt ?\}|\\?(?<![A-Za-z])sqrt(?!\pL)|\\surd(?!\pL)) ?(?P<index>\[[^\[\]]*\])? ?"
    rf"(?:{_PARENS}|(?<=surd(?:\[[0-9]\])? ?)(?:(?P<under>[0-9]+(?:\.[0-9]+)?|\pL)|{_BRACED.replace('inside', 'under')})"
    r"|(?<=\] ?)(?P<under>[0-9A-Za-z])|(?<=(?<!\\)sqrt ?)(?P<under>[0-9]+))"
)
# Words. In front of a pattern, the first lets it not look into them.
_NOT_IN_WORDS = r"\\(?:text|unit) ?\{[^{}]*\}(*SKIP)(*FAIL)|"
_JOINT = r"\\text\{ ?,? ?(?:and|or) ?\}"
TO = regex.compile(r"\\text\{ ?to ?\}")
WORDS = regex.compile(
    rf"(?<!_ ?\{{? ?)(?!{_JOINT})\\text\{{[^{{}}]*[A-Za-z]{{2}}[^{{}}]*\}}(?! ?=)"
)
"""Words in a normal form: neither an index, nor a name in front of ``=``, nor ``and`` or ``or``."""
_PER = r"(?: ?/ ?[A-Za-z]{1,6}(?:\^[0-9])?)?"
_ENDS = rf"(?= ?(?:\.? ?$|[,;:)\]=}}0-9^]|\\(?:[}}]|pm(?!\pL)|text)|{_JOINT}|and(?!\pL)|or(?!\pL)))"
_SHORT_WORDS = (
    r"(?:(?:[cdkmn]m|ft|in|yd|mi|mph|kph|kg|mg|lbs?|oz|sec|min|hrs?|deg|rad|USD|mL|ml|[km]?Hz|[kM]?eV|erg|[kM]?Pa|mol|days?"
    rf"|ways?|men|[apAP][mM]|(?<= )[mgs]){_PER}(?:{_ENDS}|(?= [A-Za-z]{{2}}))"
    r"|(?<= )(?:(?:sq|cu)\.? [a-z]+|(?:out of|of|to|by|per|in)(?= )))"
)
_BARE_WORDS = (
    r"\\(?:(?:begin|end|text|operatorname\*?|math[a-z]+) ?\{[^{}]*\}|[A-Za-z]+)(*SKIP)(*FAIL)|"
    rf"(?<![A-Za-z])(?:(?!(?:(?:{_FUNCTIONS})[a-z]?|sqrt|alpha|beta|gamma|delta|theta|lambda|sigma|omega|infty)(?!\pL))"
    r"(?=[A-Za-z]*[aeiou])(?:[A-Za-z]?[a-z]{3,}|[A-Z][a-z]{2}(?= [0-9]))"
    rf"|(?<=[0-9)}}%] ?|\\[a-z]+ ){_SHORT_WORDS})(?![A-Za-z(])"
    r"(?: (?!(?:and|or)(?!\pL))(?:[A-Za-z][A-Za-z]+|a)(?![A-Za-z(]))*"
)
# Of a choice, behind which words are the answer
_LETTER = r"^ ?(?:\\[a-z]+ ?\{ ?)?\(?[A-J][).] ?\}? ?"
_UNIT = rf"\\text\{{(?:[^{{}}0-9]|\^ ?\{{? ?-?[0-9] ?\}}?|(?<=[a-z])[23](?= ?\}}))+\}}{_POWER}"
_UNITS = (
    rf"(?<=[0-9}})\]a-zA-Z|.!%] ?)(?<!{_LETTER}) ?(?:{_UNIT}|\\frac ?\{{ ?{_UNIT} ?\}} ?\{{ ?{_UNIT} ?\}})"
    rf"(?: ?(?:\\cdot|\\times|/|\*)? ?(?:{_UNIT}|(?<=/ ?)[A-Za-z]{{1,6}}{_POWER}))*\.?"
    rf"(?= ?(?:$|[,;:)\]=}}]|\\(?:\}}|pm(?!\pL))|{_JOINT}|and(?!\pL)|or(?!\pL)))"
)


def _mixed(match: Match) -> str:
    integer, top, bottom = (int(match[name]) for name in ("whole", "top", "bottom"))
    if top >= bottom:  # 2 5/4 is no mixed number
        return match[0]
    return f"\\frac{{{integer * bottom + top}}}{{{bottom}}}"


def _repeating(match: Match) -> str:
    if match["dots"] and len(match["block"]) < 3:
        return match[0]
    once = match["once"] or ""
    block = match["unit"] if match["dots"] else regex.sub("[^0-9]", "", match["block"])
    start = int((match["whole"] or "0") + once)
    # 0.1(6) is (16 - 1) / 90.
    value = Fraction(int(f"{start}{block}") - start, 10 ** len(once) * (10 ** len(block) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _digits(match: Match) -> str:
    return regex.sub("[^0-9]", "", match[0])


def _with_commas(match: Match) -> str:
    merged = regex.sub(rf"(?<![0-9.,]){_THOUSANDS}(?![0-9])", _digits, match[0])
    return match[0] if regex.search(",(?! )", merged) else merged


def _without_font(match: Match) -> str:
    inside = _FONT.sub(_without_font, match["inside"])
    is_words = regex.fullmatch(
        "[(]?[A-Za-z][A-Za-z0-9 .,;:'()-]*", inside.strip()
    ) and regex.search("[A-Za-z]{2}", inside)
    return f"\\text{{{inside}}}" if is_words else inside


def _root(match: Match) -> str:
    return f"\\sqrt{match['index'] or ''}{{{_ROOT.sub(_root, match['under'])}}}"


def _marked(match: Match) -> str:
    if not is_unit(match):
        return match[0]
    return f"\\unit{{{' '.join(words_of(match[0]) + regex.findall('-?[2-9]', match[0]))}}}"


_NAMES_OF = (
    r"dfrac=\frac|tfrac=\frac|cfrac=\frac|nicefrac=\frac|sfrac=\frac|xfrac=\frac|dbinom=\binom|tbinom=\binom|bmod=\mod"
    r"|lg=\log|lbrace=\{|rbrace=\}|tg=\tan|ctg=\cot|arctg=\arctan|arcctg=\arccot|colon=:|varnothing=\emptyset|O=\emptyset"
    r"|geqslant=\ge|leqslant=\le|pounds=|euro=|strut=|mathstrut="
)
_NAMES = dict(pair.split("=") for pair in _NAMES_OF.split("|"))
_MEANINGS = {
    "infinity": r"\infty ",
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    "empty set": r"\emptyset ",
}
_SCALE_WORDS = (
    r"ten=10|hundred=100|dozen=12|thousand=10^{3}|lakh=10^{5}|million=10^{6}|crore=10^{7}|billion=10^{9}|trillion=10^{12}"
    r"|quadrillion=10^{15}|half=\frac{1}{2}|halve=\frac{1}{2}|third=\frac{1}{3}|fourth=\frac{1}{4}|fifth=\frac{1}{5}"
    r"|sixth=\frac{1}{6}|seventh=\frac{1}{7}|eighth=\frac{1}{8}|ninth=\frac{1}{9}|tenth=\frac{1}{10}|twelfth=\frac{1}{12}"
    r"|hundredth=\frac{1}{100}|thousandth=\frac{1}{1000}"
)
_SCALES = dict(pair.split("=") for pair in _SCALE_WORDS.split("|"))
_MONTHS = "(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_TABLE: tuple[tuple[str, str, str | Callable[[Match], str]], ...] = (
    (r"\tg x", rf"\\(?P<name>{'|'.join(_NAMES)})(?!\pL)", lambda match: _NAMES[match["name"]]),
    (r"\$18", r"\\?\$|[£€¥₹¢₩]", ""),
    (r"5\mathrm{cm}", rf"\\(?:{_UPRIGHT}) ?(?=\{{)", r"\\text"),
    (r"\text{2 hours}", r"(?<=\\text\{[^{}]*)(?<![A-Za-z0-9^_.])[0-9]+(?:[.,/:-][0-9]+)*(?=[^{}]*\})", r"}\g<0>\\text{"),
    ("**73**", r"^(?P<mark>\*\*|`+)(?P<inside>[^*`]+)(?P=mark)$", r"\g<inside>"),
    (r"\fbox{13}", rf"^\\(?:boxed|fbox|framebox) ?{_BRACED}$", r"\g<inside>"),
    (r"\phantom{0}13", rf"\\(?:[hv]?phantom|[hv]space\*?|label) ?{_BRACED}|\\text\{{ *\}}", " "),
    ("2 1/2", rf"{_ALONE}(?P<whole>[0-9]+)(?:[ ~]|\\[ ,;:!])*(?P<open>\{{ ?)?\\frac ?(?:\{{ ?(?P<top>[0-9]+) ?\}}"
     r"|(?P<top>[0-9])) ?(?:\{ ?(?P<bottom>[0-9]+) ?\}|(?P<bottom>[0-9]))(?(open) ?\})"
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
    (r"\text{-}3{.}45",
     rf"(?:\\(?:{_FONTS}|math(?:bin|op|rel|ord|punct)|operatorname) ?)?\{{ ?(?P<sign>-{{1,3}}|[+:/.]) ?\}}"
     r"|\\text(?:minus|endash)(?!\pL)(?: ?\{ ?\})?", lambda match: match["sign"] or "-"),
    ("3!^2", r"(?P<factorial>(?<![0-9A-Za-z.])[0-9]+ ?!) ?(?=\^)", r"(\g<factorial>)"),
    ("7!!", r"(?<![0-9A-Za-z.])(?P<number>[0-9]{1,2}) ?! ?!(?! ?!)",
     lambda match: str(math.prod(range(int(match["number"]), 0, -2)))),
    (r"\frac12",
     r"\\(?P<name>frac|binom) ?(?:\{(?P<top>[^{}]*)\}|(?P<top>[0-9])) ?(?:\{(?P<bottom>[^{}]*)\}|(?P<bottom>[0-9]))",
     r"\\\g<name>{\g<top>}{\g<bottom>}"),
    ("sqrt(17)", _ROOT.pattern, _root),
    (r"\vec v", r"\\(?P<accent>vec|hat|bar|tilde|overline)(?: (?P<letter>[A-Za-z])(?!\pL)| ?\{ ?(?P<letter>[A-Za-z]) ?\})",
     lambda match: f"\\{match['accent'].replace('overline', 'bar')}{{{match['letter']}}}"),
    (r"1\\[4pt]2", r"\\\\\*? ?(?:\[ ?-?[0-9.]+ ?(?:pt|ex|em|mm|cm|in) ?\])?|\\cr(?!\pL)", r"\\\\ "),
    (r"(\begin{smallmatrix}1\end{smallmatrix})", r"(?<=\\(?:begin|end) ?\{[bpvBV]?)small(?=matrix)", ""),
    (r"\{\begin{array}{l}x=1\end{array}",
     r"^\\\{ ?\\begin ?\{array\} ?(?:\{[^{}]*\})?(?P<rows>(?:(?!\\begin|\\end).)*+)\\end ?\{array\}$",
     r"\\begin{cases}\g<rows>\\end{cases}"),
    (r"x, & \text{if }x>0", r",? ?& ?(?:\\text\{ ?(?:if|for|when|where) ?\})? ?", " & "),
    (r"0.1\overline{6}",
     r"(?<![0-9])(?P<whole>[0-9]*)\.(?:(?P<once>[0-9]*)(?P<block>\\dot ?\{?[0-9]\}?[0-9]*\\dot ?\{?[0-9]\}?"
     r"|(?:\\(?:overline|overbar|bar|dot) ?(?:\{ ?[0-9]+ ?\}|[0-9]))+|\([0-9]+\)(?![0-9^!]))(?:\.\.\.| ?\\l?dots)?"
     r"|(?P<once>[0-9]{0,9}?)(?P<block>(?P<unit>[0-9]{1,9}?)(?P=unit)+) ?(?P<dots>\.\.\.|\\[lc]?dots(?!\pL)))",
     _repeating),
    # Words
    ("3 p.m.", r"(?<=[0-9] ?(?:\\text\{ ?)?)(?P<first>[A-Za-z])\. ?(?P<second>[A-Za-z])(?:\.|(?!\pL))",
     r"\g<first>\g<second>"),
    (r"\text{minus infinity}",
     rf"(?i:(?:(?P<open>\\text\{{ ?)|(?<![A-Za-z\\]))(?:(?P<minus>negative |minus |-)|positive |plus |\+)?"
     rf"(?P<name>{'|'.join(_MEANINGS)})(?(open)\.? ?\}}|(?!\pL)))",
     lambda match: ("-" if match["minus"] else "") + _MEANINGS[match["name"].lower()]),
    ("5 km per hour", _BARE_WORDS, r"\\text{\g<0>}"),
    (r"2\text{ cm and }3", r"\\text\{(?P<words>[^{}]*[A-Za-z]),? (?P<joint>and|or) \}(?= ?[-0-9\\])",
     r"\\text{\g<words>}\\text{ \g<joint> }"),
    (r"5\text{ R. }2", r"(?<=[0-9] ?)(?:\\text\{ ?(?:[Rr]|rem)\.? ?\}|[Rr]) ?(?=[0-9])", r"\\text{ remainder }"),
    (r"2\text{ h }15", r"(?<=[0-9] ?)(?:\\text\{ ?(?P<letter>[hmsgLl])\.? ?\}|(?P<letter>h)) ?(?=[0-9])",
     lambda match: f"\\text{{ {fold(match['letter'])} }}"),
    (r"\text{July }4 1776", rf"(?<=\\text\{{ ?{_MONTHS}\.? ?\}} ?[0-9]{{1,2}}) (?=[0-9]{{4}})", ", "),
    (r"3\text{ out of }5",
     r"(?<![0-9.,/}])(?P<top>[0-9]+) ?\\text\{ ?(?:out of|in)(?: every)? ?\} ?(?P<bottom>[0-9]+)(?= ?(?:$|\\text))",
     r"\\frac{\g<top>}{\g<bottom>}"),
    (r"1.5\text{ million}",
     rf"(?<=[0-9}}]) ?\\text\{{ ?(?i:(?P<word>{'|'.join(_SCALES)})s?)(?!\pL)(?P<rest>[^{{}}]*)\}}",
     lambda match: f" \\cdot {_SCALES[match['word'].lower()]}\\text{{{match['rest']}}}"),
    ("3 x 10^8", r"(?<=[0-9]) ?[xX*] ?(?=10 ?\^)", r" \\times "),
    (r"\text{negative }5", r"^\\text\{ ?(?:negative|minus) ?\} ?(?=[0-9.\\(])", "-"),
    ("13;", r"(?:[,;]|\\\\) ?$", ""),
    (r"\text{The answer is } 5",
     r"^(?:(?:\\text\{ ?[A-Za-z]{2}[A-Za-z ]*: ?\}(?!.*: ?\})|\\(?:approx|simeq|sim|therefore|implies|Rightarrow|to)(?!\pL)"
     r"|[=#≈∴⇒→]|\\text\{ ?(?:Rs\.?|USD|US|EUR|INR) ?\}|Rs\.?(?= ?[0-9])"
     r"|(?i:\\text\{ ?(?:(?:so|thus|hence),? )?(?:(?:the|final|my) )*(?:answer|result) ?(?:is)? ?:? ?\})) ?:?)+", ""),
    (r"20^\circ 30'", rf"(?<![0-9])(?P<degrees>[0-9]++){_DEGREE} ?(?P<minutes>[0-9]+)"
     r" ?(?:'|\^?\{?\\prime\}?)(?: ?(?P<seconds>[0-9]+) ?(?:''|\"))?",
     r"(\g<degrees>+\\frac{\g<minutes>}{60}+\\frac{0\g<seconds>}{3600})"),
    ("5' 6''", r"(?<=(?<![A-Za-z^_{0-9.])[0-9.]+) ?(?P<inches>''|\")|(?<=(?<![A-Za-z^_{0-9.])[0-9.]+) ?'",
     lambda match: "\\text{ in }" if match["inches"] else "\\text{ ft }"),
    (r"\sin 30^\circ", r"(?P<size>[0-9]+(?:\.[0-9]+)?|(?<![A-Za-z\\])[A-Za-z]|\\[A-Za-z]+|\\frac\{[^{}]*\}\{[^{}]*\})"
     rf"{_DEGREE}(?:(?<={_ANGLED}.*)|(?=.*{_ANGLED}))", r"(\\frac{\g<size>\\pi}{180})"),
    (r"30^\circ F", rf"(?<=[0-9}})a-zA-Z] ?){_DEGREE}(?: ?(?:\\text\{{ ?[CFK] ?\}}|[CFK](?!\pL)))?", ""),
    (r"40\ \Omega", r"(?<=[0-9] ?)(?:\\Omega(?!\pL)|Ω)(?= ?$)", r"\\text{ohm}"),
    (r"7^{\text{th}}",
     rf"(?<=[0-9]) ?\^? ?(?P<brace>\{{ ?)?\\text\{{ ?-?{_ORDINAL} ?\}}(?(brace) ?\}})"
     rf"|(?<=[0-9] ?)(?P<text>\\text\{{ ?){_ORDINAL}(?= )"
     rf"|(?<=[0-9]) ?\^ ?\{{ ?-?{_ORDINAL} ?\}}|(?<=^[0-9,]*)-?{_ORDINAL}(?= ?(?:$|\.$|\\text))", r"\g<text>"),
    (r"50 \text{percent}", r"(?<=[0-9}] ?)\\text\{ ?(?:percent(?:age)?(?!\pL)|per cent(?!\pL)|\\?%)\.?(?P<rest>[^{}]*)\}",
     r"\\%\\text{\g<rest>}"),
    (r"3\,\mathrm{kg}\cdot\mathrm{m}/\mathrm{s}^2", _UNITS, _marked),
    (r"2\mathrm{e}+\mathbf{13}", _FONT.pattern, _without_font),
    (r"\operatorname{lcm}(4,6)", rf"(?<!_ ?\{{? ?)\\(?:text|operatorname)\*? ?\{{ ?(?P<name>{_FUNCTIONS}) ?\}}"
     rf"|{_NOT_IN_WORDS}(?<![A-Za-z\\])(?P<name>{_FUNCTIONS}|sqrt|pi)(?![A-Za-z}}])", r"\\\g<name> "),
    (r"\log_e 2", r"\\log ?_ ?(?:e|\{ ?e ?\})(?!\pL)", r"\\ln "),
    (r"\log_2{4}/x", rf"(?P<name>\\(?:{_FUNCTIONS})(?: ?_ ?(?:[0-9A-Za-z]|\{{[^{{}}]*\}}))?) ?{_BRACED}",
     r"\g<name>(\g<inside>)"),
    ("(A), (C)", r"(?<=^|[,;] ?)\((?P<letter>[A-J])\)(?= ?[,;])|(?<=[,;] ?)\((?P<letter>[A-J])\)$", r"\g<letter>"),
    # Sets
    (r"x\in\mathbb{R}, x>3", rf"(?<=(?:^|\\mid|[:|]) ?){_IN_REALS} ?{_COMMA}|{_COMMA} ?{_IN_REALS}(?= ?(?:\\\}})?$)", ""),
    (r"\{x: x>3\}",
     r"^\\\{ ?[A-Za-z](?: ?\\in ?\\mathbb ?\{ ?R ?\})? ?(?:\\mid(?!\pL)|:|\||\\text\{ ?such that ?\})"
     r"(?!.*\\in(?!\pL)(?! ?\\mathbb ?\{ ?R)) ?(?P<condition>[^:]*(?:[<>]|\\(?:[lg]|n)eq?(?!\pL))[^:]*?) ?\\\}$",
     r"\g<condition>"),
    # Where math-verify reads something else
    ("(x,y)=(5,-1)", r"\((?P<a>[^(),=]+),(?P<b>[^(),=]+)\) ?= ?\((?P<c>[^(),=]+),(?P<d>[^(),=]+)\)",
     r"\g<a>=\g<c>,\g<b>=\g<d>"),
    ("(x,y,z)=(5,-1,2)", r"\((?P<a>[^(),=]+),(?P<b>[^(),=]+),(?P<c>[^(),=]+)\) ?= ?"
     r"\((?P<d>[^(),=]+),(?P<e>[^(),=]+),(?P<f>[^(),=]+)\)", r"\g<a>=\g<d>,\g<b>=\g<e>,\g<c>=\g<f>"),
    ("P(3,4)", r"(?<![A-Za-z\\])(?P<point>[A-Z]) ?(?=\([^()]*,[^()]*\) ?(?:$|[,;]|\\text))", r"\g<point>="),
    (r"\overline{3+4i}", r"\\(?:overline|bar) ?\{(?P<number>[-+0-9./ ]*i[-+0-9./ ]*)\}",
     lambda match: f"({match['number'].replace('i', '(-i)')})"),
    ("f'(x)", rf"{_NOT_IN_WORDS}(?<=[A-Za-z])'+", lambda match: f"_{{{'p' * len(match[0])}}}"),
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
    ("13.", r"(?<!\.) ?\.(?= ?(?:\\unit\{[^{}]*\})?$)", ""),
)  # fmt: skip
RULES = [(example, regex.compile(pattern), replacement) for example, pattern, replacement in _TABLE]
"""An answer that the rule is there for, the pattern, and what takes the place of its matches."""
_MARKED = regex.compile(r" ?\\unit\{(?P<words>[^{}]*)\}")

_CHARACTERS = "−×·⋅∙÷∕⁄∶°º˚℃℉∘∞√∛∜≤≥⩽⩾≠±"  # noqa: RUF001
_CHARACTERS += "∪∩∈∅⟨⟩〈〉′″’、ℝℤℚℕℂ∠△∣≡"  # noqa: RUF001
_COMMANDS = (
    r"- \times \cdot \cdot \cdot \div / / : ^\circ ^\circ ^\circ ^{\circ}C ^{\circ}F \circ"
    r" \infty \surd \surd[3] \surd[4] \le \ge \le \ge \neq \pm \cup \cap \in \emptyset \langle \rangle"
    r" \langle \rangle ' '' ' , \mathbb{R} \mathbb{Z} \mathbb{Q} \mathbb{N} \mathbb{C} \angle \triangle | \equiv"
)
_SYMBOLS = dict(zip(_CHARACTERS, _COMMANDS.split(), strict=True))
_RAISED = regex.compile("(?P<up>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+)|[₀₁₂₃₄₅₆₇₈₉₊₋]+")


def _in_ascii(char: str) -> str:
    """LaTeX for a character outside ASCII; Greek and other letters stay."""
    if char in _SYMBOLS:
        # A blank behind a command, or the x of ``·x`` would be a part of its name.
        return _SYMBOLS[char] + " " * _SYMBOLS[char][-1].isalpha()
    plain = unicodedata.normalize("NFKC", char)
    # NFKC spells one half as 1, U+2044, 2.
    if "\u2044" in plain:
        return f"\\frac{{{plain.replace(chr(0x2044), '}{')}}}"
    return {"Cf": "", "Pd": "-", "Zs": " "}.get(unicodedata.category(char), plain)


class Form(NamedTuple):
    """An answer in normal form, and the words of the unit that was left out."""

    text: str
    unit: tuple[str, ...] = ()


LONGEST = 2000  # characters of a text in LaTeX: the time of some rules grows with their square


@lru_cache(maxsize=8192)
def read(text: str) -> Form:
    """Returns the normal form: the same for the spellings of one answer, as far as text alone can tell. ValueError: the
    text has more than :data:`LONGEST` characters in LaTeX."""
    if not text.isascii():
        # Before the single characters: NFKC makes a plain 2 of a raised one.
        text = _RAISED.sub(
            lambda run: f"{'^' if run['up'] else '_'}{{{unicodedata.normalize('NFKC', run[0])}}}",
            text,
        )
        text = "".join(char if char.isascii() else _in_ascii(char) for char in text)
    text = " ".join(text.split())
    if len(text) > LONGEST:
        raise ValueError(f"a text has {len(text)} characters in LaTeX, more than {LONGEST}")
    for _, pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    units = [tuple(match["words"].split()) for match in _MARKED.finditer(text)]
    bare = _MARKED.sub("", text)
    # Words that differ, such as those of feet and inches, are compared with their numbers.
    if len({tuple(map(fold, unit)) for unit in units}) > 1 or (
        units and WORDS.search(TO.sub(":", bare))
    ):
        bare = _MARKED.sub(r"\\text{ \g<words>}", text)
        units = []
    return Form(" ".join(bare.split()), units[0] if units else ())


def normal(text: str) -> str:
    """Returns the text of :func:`read`."""
    return read(text).text
