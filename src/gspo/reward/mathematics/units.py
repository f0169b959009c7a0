"""Units behind a number: those that are known, and what is counted (64 apples)."""

import re

CURRENCIES = {"$": "dollar", "US$": "dollar", "USD": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
_ALIASES = {
    **{"metre": "m", "meter": "m", "centimetre": "cm", "centimeter": "cm", "millimetre": "mm", "millimeter": "mm"},
    **{"kilometre": "km", "kilometer": "km", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "yard": "yd"},
    **{"mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz", "litre": "l"},
    **{"liter": "l", "L": "l", "millilitre": "ml", "milliliter": "ml", "mL": "ml", "second": "s", "sec": "s"},
    **{"minute": "min", "hour": "h", "hr": "h", "degree": "deg", "radian": "rad", "dollar": "dollar", "usd": "dollar"},
    **{"euro": "euro", "cent": "cent", "watt": "W", "volt": "V", "newton": "N", "joule": "J", "kelvin": "K"},
    **{"people": "person", "children": "child", "men": "man", "women": "woman", "square": "sq", "cubic": "cubic"},
}
_KNOWN = {
    *_ALIASES.values(),
    *re.findall(
        r"\w+", "dm t kW kHz Hz Pa kPa mol A C F ms kWh mph rpm unit day week month year person child point way"
    ),
}
# Words behind a number that say that it is not the answer, or make another number of it.
_NO_UNITS = {
    *re.findall(
        r"\w+",
        "not no nor or and is isn was wasn are if but then than to of the a an so as plus minus times over by divided "
        "mod more less least most wrong false incorrect maybe perhaps probably possibly about approximately roughly "
        "around nearly almost else unless does guess guesses pi e i x y z half halves third thirds fourths quarters "
        "fifths sixths sevenths eighths ninths tenths hundredths thousandths hundred hundreds thousands millions "
        "billions dozens dozen tens ones squares cubes powers percents percentages its this his yes factorials digits "
        "primes versus vs negatives decimals others options choices answers cases steps",
    )
}
_FACTOR = re.compile(r"([A-Za-zµ]+)\.?(?:\s*\^?\s*\{?(-?[1-4])\}?)?")


def unit_name(text: str, *, apart: bool) -> str | None:
    """One name for the unit that a text is, None where it is none; letters that touch the number may be symbols."""
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", text.strip())
    words = re.split(r"\s*\*\s*|\s+(?!\^)", text)
    if len(words) > 6 or (not apart and len(words[0]) < 2):
        return None
    names = [_name(word) for word in words]
    if any(name is None for name in names):
        return None
    nouns = [word for word in words if word != "/"]
    if not nouns or not (_is_known(names[-1]) or re.fullmatch(r"[a-z]{2,}s", nouns[-1])):
        return None
    if not all(_is_known(name) for name in names) and ("/" in names or len(words) > 3):
        return None
    return " ".join(map(str, names))


def _is_known(name: str | None) -> bool:
    return name == "/" or (name is not None and re.sub(r"\^-?[0-9]$", "", name) in _KNOWN)


def _name(word: str) -> str | None:
    if word == "/":
        return word
    found = _FACTOR.fullmatch(word)
    if not found or found[1].lower() in _NO_UNITS:
        return None
    name, power = found[1], f"^{found[2]}" if found[2] else ""
    if name not in _KNOWN:
        lower = name.lower()
        name = next((its for its in (lower, lower.removesuffix("s")) if its in _KNOWN or its in _ALIASES), name)
        name = _ALIASES.get(name, name)
    if name not in _KNOWN and (power or len(name) < 3):
        return None
    return (name if name in _KNOWN else name.lower().removesuffix("s")) + power
