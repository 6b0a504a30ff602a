r"""Words beside numbers: which of them are a unit, and whether the units of two answers can be the same.

A unit may be left out, and of two measures either may stand, as data sets mix them. Other words stay in the text.
"""

from collections.abc import Sequence

import regex

# Spellings of one measure in a group, the first of which is its name; an ``s`` at the end makes no other word.
_MEASURES = """\
hour h hr hrs|minute min|second s sec|day|week|month|year yr|inch in inche|foot feet ft|yard yd|mile mi|meter m metre|point
kilometer km kilometre|centimeter cm centimetre|millimeter mm millimetre|decimeter dm decimetre|nanometer nm|ounce oz|mph
gram g|kilogram kg kilo|milligram mg|ton tonne|pound lb lbs|liter l litre|milliliter ml millilitre|gallon gal|quart|pint|cup
degree deg|radian rad|celsius c|fahrenheit f|kelvin k|newton n|joule j|watt w|volt v|ampere a amp|ohm|hertz hz|khz|mhz
tesla t|pascal pa|kpa|mpa|ev|kev|mev|erg|mole mol|dollar usd|cent|euro|rupee|yuan|yen|acre|hectare|kph|kmh|knot|calorie cal
bit|byte|unit|square sq|cubic cu|person people|man men|woman women|child children|way|term|triangle|mouse mice|tooth teeth
fish|sheep|candy|staff|money|dice|per"""
_MEASURE_OF = {
    word: group.split()[0] for group in regex.split(r"[|\n]", _MEASURES) for word in group.split()
}
# A word of direction or kind may be left out, but of two none is the other.
_OPPOSED = """\
north|south|east|west|northeast|northwest|southeast|southwest|left|right|up|down|upward|downward|early|late|earlier|later
|older|younger|taller|shorter|longer|faster|slower|heavier|lighter|ahead|behind|forward|backward|clockwise|counterclockwise
|anticlockwise|morning|afternoon|evening|night|uphill|downhill|inside|outside|real|complex|imaginary|rational|irrational
|profit|gain|increase|decrease|discount|am|pm|ad|ce|maximum|minimum""".replace("\n", "")
# A text with one of these words changes the number, or says something about it: it is no unit.
_OTHER = """\
or|and|not|no|nor|non|never|cannot|without|except|excluding|unless|if|for|when|where|which|with|only|maybe|about|almost
|approximately|nearly|roughly|less|least|most|than|to|from|mod|modulo|base|even|odd|all|any|every|none|prime|positive
|negative|divisible|hundred|thousand|factorial|squared|cubed|plus|minus|times|over|choose|above|below|more|fewer|half|halves
|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|elevenths?|twelfths?|pairs?|dozen|scores?
|gross|doubled?|tripled?|halved|negated|inverse|inverted|reciprocal|loss|losses|lost|deficit|debt|bce?|increased|decreased
|reduced|wrong|incorrect|false|impossible|invalid|rejected|disproved|is|are|was|has|does|fails|equals|exceeds|contradicts
|violates|becomes|remains|means|lies|seems|it|we|but|also|divided|multiplied|raised|powered|power|root|sqrt|logs?|pi
|infinity|remainder|by|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty
|seventy|eighty|ninety|this|thus|yes|always|perhaps|sometimes|lakh|crore
|[a-z]+(?:teen|teenth|ieth|illion|illionth|hundredth|thousandth)s?|[a-z]+n't""".replace("\n", "")
NO_UNIT = regex.compile(rf"(?i)(?<![\\a-z])(?:{_OTHER})(?![a-z])")
"""Words that change a number or say something about it."""
_UNIT = regex.compile(
    rf"(?<![\\A-Za-z])(?:(?i:(?:{'|'.join(_MEASURE_OF)}|{_OPPOSED})s?|[a-z]{{2,}}[^\W\ds]s)(?![A-Za-z])|(?<=\{{ ?)of )"
)
_LETTER = regex.compile(r"(?<![\\A-Za-z'])(?![mgslLhNJWVAKCFT])[A-Za-z](?![A-Za-z])(?<!. a)")
_ONE = regex.compile(
    r"(?<![0-9.,])(?:1|0?\.[0-9]+|[0-9]+/[0-9]+) ?$|\\frac ?\{[^{}]*\} ?\{[^{}]*\} ?$|% ?$"
)
_WORD = regex.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:'[a-z]+)?")


def words_of(text: str) -> list[str]:
    """Returns the words of LaTeX, without its commands."""
    return _WORD.findall(text)


def singular(word: str) -> str:
    """Returns a word without capitals and without the ``s`` of a plural."""
    return regex.sub("(?<=[a-z][a-z][^s])s$", "", word.lower())


def fold(word: str) -> str:
    """Returns a word in the same way, and a measure by its name: ``hour`` for ``hrs``."""
    return _MEASURE_OF.get(word.lower()) or _MEASURE_OF.get(singular(word), singular(word))


def is_unit(match: regex.Match[str]) -> bool:
    """Returns whether the words of a match behind a number are a unit: a measure, a plural, a direction, words that
    begin with ``of``; behind 1, fractions and percentages any noun."""
    text = match[0]
    if NO_UNIT.search(text) or _LETTER.search(text):
        return False
    return bool(_UNIT.search(text) or _ONE.search(match.string, 0, match.start()))


def same_units(gold_words: Sequence[str], answer_words: Sequence[str]) -> bool:
    """Returns whether the units of two equal answers can be the same: beside measures one has no words, or all words of
    the other in their order. ValueError: the words differ, as ``roots`` and ``solutions`` do."""
    sides = [
        [word for word in map(fold, words) if word not in _MEASURE_OF]
        for words in (gold_words, answer_words)
    ]
    shorter, longer = sorted(sides, key=len)
    rest = iter(longer)
    if all(word in rest for word in shorter):
        return True
    if all(regex.search(rf"\b(?:{_OPPOSED})\b", " ".join(side)) for side in sides):
        return False
    raise ValueError("the words beside equal numbers differ")
