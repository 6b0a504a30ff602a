r"""Responses made to hang, crash, blow up or trick a verifier of ``\boxed{...}`` answers; none states ``GOLD``."""

from __future__ import annotations

# Not a plain number, so that every answer has to be parsed.
GOLD = r"\frac{\sqrt{3}}{2}"


def _nested(opening: str, closing: str, depth: int, core: str = "2") -> str:
    return opening * depth + core + closing * depth


def hostile_responses(marker: str) -> dict[str, str]:
    """Responses by name. ``marker``: the path of a file that the ones with code in them try to create."""
    code = f"__import__('os').system('touch {marker}')"
    answers = {
        "power tower": "9^{9^{9^9}}", "long number to a long power": "7" * 400 + "^{" + "8" * 400 + "}",
        "huge exponent": "1e1000000000", "small number to a huge power": "0.1^{1000000000000}",
        "huge factorial": "(10^{9})!", "huge binomial": r"\binom{1000000000}{500000000}",
        "huge remainder": r"3^{10^{12}} \bmod 10^{9}", "long sum": r"\sum_{k=1}^{10^{9}} \frac{1}{k^{k}+1}",
        "integral without a closed form": r"\int_0^1 e^{-x^2}\sin(x^3)\log(x) \, dx",
        "limit": r"\lim_{x \to 0} \frac{\sin(x)^{x^{x}}-x^{\sin(x)}}{x^{x^{x}}-1}",
        "polynomial to a high power": "(x+y+z+w)^{500}", "equation to solve": "x^{50}+y^{49}+x^{3}y=7",
        "nested radicals": _nested(r"\sqrt{3+", "}", 40),
        "eigenvalues": r"\operatorname{eigenvals}(\begin{pmatrix}1&x&y&z\\x&2&w&v\\y&w&3&u\\z&v&u&4\end{pmatrix})",
        "identity matrix": r"\operatorname{eye}(100000)", "nested parentheses": _nested("(", ")", 400),
        "nested fractions": _nested(r"\frac{1}{1+", "}", 80), "nested boxes": _nested(r"\boxed{", "}", 120),
        "many minus signs": "-" * 900 + "1", "many commas": "1," * 450 + "1", "only commas": "," * 900,
        "many empty fractions": r"\frac" * 180, "infinite decimal": "0." + "3" * 900,
        "every number": ",".join(str(number) for number in range(250)), "opened text": r"\text{" * 90 + "}" * 90,
        "answer phrase": "answer: " * 120 + "x", "and or": "$1$ and or, " * 80,
        "digits without an end": "1 234" * 180 + "x", "python call": code,
        "python call in an operator name": rf"\operatorname{{{code}}}(1)",
        "python call in a variable": rf"\variable{{{code}}}",
        "python class walk": "().__class__.__base__.__subclasses__()", "python open": f"open('{marker}', 'w')",
        "sympy symbol name": f"Symbol('x').subs({code}, 1)", "tex input": r"\input{/etc/passwd}",
        "tex shell escape": rf"\immediate\write18{{touch {marker}}}",
        "nul bytes": "\\frac{\x00\\sqrt{3}}{2\x00}" + "\x00" * 100, "lone surrogates": "\ud800\\frac{\udfff}{2}",
        "right-to-left override": "\u202e2/3√", "zero-width characters": "\u200b\u200c\u200d\ufeff" * 100,
        "full-width digits": "\uff10.\uff18\uff16\uff16", "combining characters": "x" + "\u0301" * 900,
        "control characters": "".join(map(chr, range(1, 32))), "empty": "", "not a number": "nan",
        "infinity": r"\infty - \infty", "division by zero": r"\frac{1}{0}", "long answer": "9" * 200_000,
        "long nested answer": _nested("{", "}", 100_000),
    }  # fmt: skip
    responses = {name: rf"The answer is \boxed{{{answer}}}." for name, answer in answers.items()}
    responses |= {
        "200 kB without a box": "so x = 3, and " * 15_000,
        "200 kB of closing braces": r"\boxed{1" + "}" * 200_000,
        "200 kB of boxes": r"\boxed{1}" * 22_000,
        "box that never closes": rf"\boxed{{{GOLD}",
    }
    return responses
